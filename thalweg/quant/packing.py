"""Integers that are packed into 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ASCENDING = tuple(range(8))


def unpack_words(words: Tensor, dim: int, order: Sequence[int] = ASCENDING) -> Tensor:
    """uint8 codes 0 to 15 of int32 words that hold eight each along `dim`. order: of each code, which nibble of the
    word it is.
    """
    shifts = 4 * torch.tensor(order, dtype=torch.int32, device=words.device)
    spread = words.movedim(dim, -1).unsqueeze(-1) >> shifts & 15
    return spread.flatten(-2).to(torch.uint8).movedim(-1, dim)


def pack_words(codes: Tensor, dim: int, order: Sequence[int] = ASCENDING) -> Tensor:
    """The inverse: int32."""
    shifts = 4 * torch.tensor(order, dtype=torch.int32, device=codes.device)
    last = codes.movedim(dim, -1).to(torch.int32)
    groups = last.reshape(*last.shape[:-1], last.shape[-1] // 8, 8)
    return (groups << shifts).sum(-1, dtype=torch.int32).movedim(-1, dim).contiguous()
