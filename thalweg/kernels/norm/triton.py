"""RMSNorm, one block a row. Floor: 2 · T · H bytes read and written once; at decode it is one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x_TH, weight_H, y_TH, stride_x, stride_y, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    h_B = tl.arange(0, BLOCK)
    inside = h_B < H
    weight = tl.load(weight_H + h_B, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_TH + row * stride_x + h_B, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / H + eps) * weight
    tl.store(y_TH + row * stride_y + h_B, y.to(y_TH.dtype.element_ty), mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim, in x's dtype. x: rows with any stride. weight: float32."""
    rows, width = x_TH.shape
    y = torch.empty(rows, width, dtype=x_TH.dtype, device=x_TH.device)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x_TH, weight_H, y, x_TH.stride(0), y.stride(0), eps, width, block, True,
        num_warps=8 if block >= 4096 else 4, launch_pdl=True,
    )  # fmt: skip
    return y
