"""Drafts by looking up the sequence in itself: what followed the last tokens when they stood there before (prompt
lookup; Saxena 2023).

It has no weights and no state. Texts that repeat themselves, as answers about a given text, code and records do, are
drafted many tokens at a time; where nothing is found there are no drafts.

Letters: E rows, C columns of the longest sequence, K drafts.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.memory.planes import Planes
from thalweg.models.interface import Target
from thalweg.sampling.draft_sampling import DraftSampling
from thalweg.spec.drafter import DraftOutput, DraftRequest, StatelessDrafter

LEAST, MOST = 2, 5  # last tokens that must, and that may, have stood there before


class NgramDrafter(StatelessDrafter):
    """The longest of these that is found counts, and of its places the last."""

    def propose(self, request: DraftRequest, num_drafts: int, slots: Slots, planes: Planes) -> DraftOutput | None:
        slot_E, columns = request.slot_E, min(request.max_kv_len + 1, slots.context)
        if not num_drafts:
            slots.num_drafts.index_fill_(0, slot_E, 0)
            return None
        tokens_EC = slots.tokens_SL[:, :columns].index_select(0, slot_E)
        length_E = slots.length.index_select(0, slot_E)
        at_E, found_E = lookup(tokens_EC, length_E)
        num_drafts_E = found_E * num_drafts
        slots.num_drafts.index_copy_(0, slot_E, num_drafts_E)
        # what stands there may end with the sequence itself, and goes round then
        ahead_K = torch.arange(num_drafts, device=slot_E.device)
        place_EK = at_E.unsqueeze(1) + ahead_K % (length_E - at_E).clamp(min=1).unsqueeze(1)
        drafts_EK = tokens_EC.gather(1, place_EK.clamp(max=columns - 1))
        column_EK = (length_E.unsqueeze(1) + ahead_K).clamp(max=slots.context)
        place_EK = slot_E.unsqueeze(1) * slots.tokens_SL.shape[1] + column_EK
        slots.tokens_SL.view(-1).index_copy_(0, place_EK.flatten(), drafts_EK.flatten())
        return DraftOutput(
            drafts_EK.to(torch.int64), num_drafts_E, torch.ones((), dtype=torch.bool, device=slot_E.device)
        )


def lookup(tokens_EC: Tensor, length_E: Tensor) -> tuple[Tensor, Tensor]:
    """Where the sequence went on, int64 [E], the last time that its last tokens stood in it; and whether they did, bool
    [E].
    """
    rows, columns = tokens_EC.shape
    column_C = torch.arange(columns, dtype=torch.int32, device=tokens_EC.device)
    run_EC = column_C < length_E.unsqueeze(1) - 1  # where the sequence has gone on
    longest_EC = torch.zeros(rows, columns, dtype=torch.int8, device=tokens_EC.device)
    for back in range(MOST):
        last_E1 = tokens_EC.gather(1, (length_E - 1 - back).clamp(min=0).unsqueeze(1))
        run_EC[:, :back] = False
        run_EC[:, back:] &= tokens_EC[:, : max(columns - back, 0)] == last_E1
        longest_EC += run_EC
    best_E = torch.add(column_C, longest_EC, alpha=columns).argmax(1)
    return best_E + 1, longest_EC.gather(1, best_E.unsqueeze(1)).squeeze(1) >= LEAST


def build(target: Target, folder: Path, draft_sampling: DraftSampling) -> NgramDrafter:
    return NgramDrafter()
