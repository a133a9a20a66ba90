"""Adds what all ranks have computed to the residual stream, and norms the result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.quantize.ref import quantize


class NormedRows(NamedTuple):
    """The residual stream after an addition, and its norm."""

    x_TH: Tensor
    rows_TH: Tensor  # normed, in x's dtype
    codes_TH: Tensor | None = None  # the normed rows in e4m3, where asked for
    scales_TG: Tensor | None = None  # float32 [T, H / 128]


def add_norm(partials_WTH: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float, with_codes: bool = False) -> NormedRows:
    """x + the sum over ranks, in float32 and rounded once; RMSNorm of that; and the norm quantized by groups of 128."""
    x_TH = (x_TH.float() + partials_WTH.float().sum(0)).to(x_TH.dtype)
    wide = x_TH.float()
    rows_TH = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight_H).to(x_TH.dtype)
    return NormedRows(x_TH, rows_TH, *(quantize(rows_TH) if with_codes else (None, None)))
