"""y = x Wᵀ (+ bias) (+ residual), with plain or FP8 block-quantized weights."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128  # columns that share an activation scale; rows × columns of a weight block (DeepSeek-V3 report §3.3.2)
E4M3_MAX = 448.0


def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, residual_MN: Tensor | None = None) -> Tensor:
    """In x's dtype; summed in float32."""
    y = x_MK.float() @ w_NK.float().t()
    if bias_N is not None:
        y += bias_N.float()
    if residual_MN is not None:
        y += residual_MN.float()
    return y.to(x_MK.dtype)


def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes e4m3 [M, K] and multipliers float32 [M, K / 128]: each group's largest magnitude becomes 448."""
    groups = x_MK.float().view(len(x_MK), -1, GROUP)
    scale = groups.abs().amax(-1).clamp_min(1e-10) / E4M3_MAX
    codes = (groups / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(1), scale


def linear_fp8(
    x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None, quantized: bool = True
) -> Tensor:
    """w e4m3 [N, K] with float32 multipliers [ceil(N / 128), K / 128]; x is quantized per token and group of 128, or is
    not.
    """
    x = x_MK.float()
    if quantized:
        codes, scale = quantize(x_MK)
        x = (codes.float().view(len(codes), -1, GROUP) * scale.unsqueeze(-1)).flatten(1)
    w = w_NK.float() * scale_BB.repeat_interleave(GROUP, 0)[: len(w_NK)].repeat_interleave(GROUP, 1)
    return linear(x, w, None, residual_MN).to(x_MK.dtype)
