"""Copies rows within each of several planes."""

from __future__ import annotations

from typing import Sequence

from torch import Tensor


def move(planes: Sequence[Tensor], from_N: Tensor, to_N: Tensor) -> None:
    """Copies row `from[i]` of each plane, uint8 [P, tokens of a page, bytes] as of `Planes.entries`, to row `to[i]`;
    int64. All rows are read before any is written.
    """
    for plane in planes:
        page = plane.shape[1]
        plane[to_N // page, to_N % page] = plane[from_N // page, from_N % page]
