"""Grammar masks on logits. Letters: E emitting rows, G of them under a grammar, V vocabulary, W = ceil(V / 32)."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.grammar import Masks


def forbid(logits_EV: Tensor, masks: Masks) -> None:
    """-inf, in place, for every token whose bit is not set. bits: int32 [G, W], lowest bit first."""
    bits_GB = torch.from_numpy(masks.bits).view(torch.uint8).to(logits_EV.device)
    shift_8 = torch.arange(8, dtype=torch.uint8, device=logits_EV.device)
    forbidden_GV = (bits_GB[:, :, None] >> shift_8 & 1 == 0).view(len(bits_GB), -1)[:, : logits_EV.shape[1]]
    if len(masks.rows) == len(logits_EV):
        logits_EV.masked_fill_(forbidden_GV, -torch.inf)
        return
    row_G = torch.tensor(masks.rows, dtype=torch.int64, device=logits_EV.device)
    logits_EV.index_copy_(0, row_G, logits_EV.index_select(0, row_G).masked_fill(forbidden_GV, -torch.inf))
