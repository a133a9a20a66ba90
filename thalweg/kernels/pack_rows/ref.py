"""Rows of several tensors as bytes side by side. Letters: N rows, B bytes of a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [N, ...] as bytes [N, B]."""
    return torch.cat([x.flatten(1).contiguous().view(torch.uint8) for x in tensors], 1)


def unpacked(bytes_NB: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of `packed`, as many rows as there are. like: those that were packed, or the first of them."""
    found, first = [], 0
    for x in like:
        size = row_bytes(x)
        part = bytes_NB[:, first : first + size].clone(memory_format=torch.contiguous_format)  # aligned, one row too
        found.append(part.view(x.dtype).view(len(bytes_NB), *x.shape[1:]))
        first += size
    return tuple(found)


def row_bytes(x: Tensor) -> int:
    return x.dtype.itemsize * x.shape[1:].numel()
