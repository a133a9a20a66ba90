"""The published FP8 scheme: `X.weight` in e4m3 with `X.weight_scale_inv`, one float32 multiplier for each 128 × 128 block.

Where the computing device has no FP8 GEMM the weight is dequantised as the loader writes it. What a tensor is is read from its dtype,
never from `scale_fmt`: V3.1 and V3.2 declare ue8m0 and store float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.kernels.fp8_block.ref import dequantize

KEPT_BLOCK = (128, 128)  # what GPU kernels compute with
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def scale_name(weight: str) -> str:
    """The checkpoint name of a weight's scales."""
    return f"{weight}_scale_inv"


def decode(name: str, q_NK: Tensor, scale: Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)) -> Tensor:
    """float32 weights of a slice that starts at row and column `first`; `scale` is the whole weight's.

    Pure in the slice: any destination slice can be rewritten alone. Raises CheckpointError when the scales do not fit.
    """
    ends = [start + size for start, size in zip(first, q_NK.shape, strict=True)]
    if scale.dtype not in SCALE_DTYPES or scale.dim() != 2:
        raise CheckpointError(f"{scale_name(name)}: expected a float32 matrix, got {scale.dtype} {tuple(scale.shape)}")
    if any(size * step < end for size, step, end in zip(scale.shape, block, ends, strict=True)):
        raise CheckpointError(
            f"{scale_name(name)}: scales {tuple(scale.shape)} do not cover {name} up to {tuple(ends)} in blocks of {block}"
        )
    near = [start // step for start, step in zip(first, block, strict=True)]
    inner = [start % step for start, step in zip(first, block, strict=True)]
    padded = q_NK.float()
    if any(inner):
        padded = torch.nn.functional.pad(padded, (inner[1], 0, inner[0], 0))
    scales = scale[near[0] : -(-ends[0] // block[0]), near[1] : -(-ends[1] // block[1])]
    return dequantize(padded, scales, block, torch.float32)[inner[0] :, inner[1] :]
