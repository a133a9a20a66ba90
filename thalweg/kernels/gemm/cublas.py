"""FP8 block GEMM of cuBLASLt, through torch (≥ 2.11, CUDA ≥ 12.9, Hopper): scales for 1 × 128 of x and 128 × 128 of the
weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = (
    65  # refuses one row; up to 64 the own kernel, which reads weights at the speed of memory, is as fast or faster
)
MOST_INNER = 12288  # refuses V3's output projection, K = 16,384 (measured on an H100, CUDA 13.0)


def serves(rows: int, inner: int) -> bool:
    """Whether it takes a product of so many rows and columns of K. Its scales of a weight lie in rows of a multiple of
    four.
    """
    return rows >= MIN_ROWS and inner % 512 == 0 and inner <= MOST_INNER


def matmul(codes_MK: Tensor, scales_MG: Tensor, w_NK: Tensor, scale_BB: Tensor) -> Tensor:
    """y [M, N] bf16 = x Wᵀ. codes e4m3 [M, K] with scales float32 [M, K / 128], strides (1, M): M a multiple of four; w
    e4m3 [N, K], scale float32 [ceil(N / 128), K / 128].
    """
    return F.scaled_mm(
        codes_MK,
        w_NK.t(),
        scales_MG,
        F.ScalingType.BlockWise1x128,
        scale_BB.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
