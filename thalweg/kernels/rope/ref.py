"""Rotary embedding of neighbouring pairs (GPT-J order), in place."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_(x_TX: Tensor, cos_sin_T1c: Tensor, first: int, heads: int, dim: int) -> None:
    """Turns, in each of `heads` blocks of `dim` columns, the 2c columns from `first` on: (2j, 2j+1) by cis[..., j]. In
    place, in float32.

    x_TX: float32 or bfloat16 [T, X], last stride 1; for float32 row stride, dim and first must be even. cis_T1c:
    complex64 [T, 1, c].
    """
    size = (len(x_TX), heads, cos_sin_T1c.shape[-1], 2)
    pairs = x_TX.as_strided(size, (x_TX.stride(0), dim, 2, 1), x_TX.storage_offset() + first)
    if x_TX.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(cos_sin_T1c)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(cos_sin_T1c)))
