"""y = x Wᵀ (+ bias) (+ residual), with plain weights or FP8 block weights."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue

BLOCK = (128, 128)  # rows and columns that share a scale (DeepSeek-V3 report §3.3.2)


def linear(x_MK: Tensor, w_NK: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """Summed in float32."""
    y = x_MK.float() @ w_NK.float().t()
    if epilogue.bias_N is not None:
        y += epilogue.bias_N.float()
    if epilogue.residual_MN is not None:
        y += epilogue.residual_MN.float()
    return epilogue.result(len(x_MK), len(w_NK), x_MK).copy_(y)


def linear_fp8(x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """w: e4m3 [N, K] with float32 scales [ceil(N / 128), K / 128]. x is not quantized."""
    return linear(x_MK, dequantize(w_NK, scale_BB, BLOCK, torch.float32), epilogue)
