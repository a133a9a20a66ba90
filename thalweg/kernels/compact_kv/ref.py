"""Copies rows within each of several planes."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor


def move(planes: Sequence[Tensor], from_N: Tensor, to_N: Tensor) -> None:
    """Copies row `from[i]` of each plane, any type [rows, dim], to row `to[i]`; int64. All rows are read before any is
    written.
    """
    for plane in planes:
        stored = plane.view(torch.uint8)  # FP8 is no type that torch copies by index on a CPU
        stored.index_copy_(0, to_N, stored.index_select(0, from_N))
