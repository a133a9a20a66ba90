"""Grammar masks on logits. Letters: E sampled rows, G of them under a grammar, V vocabulary, B = bytes of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.slots import upload
from thalweg.core.grammar import GrammarMasks

# What eight token ids get for a byte of a mask: 0 where the bit is set, else -inf. Adding is cheaper than filling by a
# condition.
BYTE_BIAS = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1, 0.0, -torch.inf)


def apply_grammar_mask(logits_EV: Tensor, masks: GrammarMasks) -> None:
    """-inf, in place, for every token whose bit is not set."""
    device, vocab = logits_EV.device, logits_EV.shape[1]
    bits = torch.from_numpy(masks.bits)
    if device.type != "cpu":
        bits = bits.pin_memory()
    bytes_GB = bits.to(device, non_blocking=True).view(torch.uint8)
    bias_GV = BYTE_BIAS.to(device).index_select(0, bytes_GB.view(-1).int()).view(len(bytes_GB), -1)[:, :vocab]
    if len(masks.rows) == len(logits_EV):
        logits_EV.add_(bias_GV)
    else:
        logits_EV.index_add_(0, upload(masks.rows, torch.int64, device), bias_GV)
