"""Rotary embedding of neighbouring pairs (GPT-J order), in place."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_(x: Tensor, cis: Tensor) -> Tensor:
    """Turns the dims (2j, 2j+1) of x by cis[..., j] in place and returns x.

    x: [..., d] float32 or bfloat16, last stride 1. cis: complex64 [..., d/2], broadcastable. Computed in float32.
    """
    pairs = x.view(*x.shape[:-1], x.shape[-1] // 2, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(cis)
        return x
    pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(cis)))
    return x
