"""`prepare`: a plan (host, upper bounds) and `Slots` (device, truth) make a `Batch`. Bounds become truth here: tokens at or past a
slot's end, which is 0 for one that has ended, turn into padding, which touches the null page only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Extent, Group
from thalweg.batch.slots import Slots
from thalweg.batch.upload import upload
from thalweg.core.plan import PAGE, Row, StepPlan

PAGE_BITS = PAGE.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """batch: for the model. Of the emitting rows: slot_E int64, their slots; ints_EI int64, the slots' integers as this step finds them. all_emitted:
    whether every token's logits are sampled, in order."""

    batch: Batch
    slot_E: Tensor
    ints_EI: Tensor
    all_emitted: bool


def prepare(plan: StepPlan, slots: Slots) -> Prepared:
    """Gathers the step's tokens; its binds and appends have been made. A prefill chunk that does not emit moves its slot's `at` here."""
    rows, device = plan.rows, slots.ints_SI.device
    slot_R = upload([row.slot for row in rows], torch.int64, device)
    ints_RI = slots.ints_SI.index_select(0, slot_R)
    if len(rows) == sum(row.n for row in rows):  # single tokens need no expansion
        slot_T, ints_TI, position_T = slot_R, ints_RI, ints_RI[:, 1]
    else:
        slot_T, ints_TI, position_T = _expand(rows, slot_R, ints_RI)
    ids_T, position_T, write_T, real_T = gather(slot_T, position_T, ints_TI, slots.tokens_SL, slots.table_SP)
    emits, sampled = [i for i, row in enumerate(rows) if row.emit], sampled_tokens(plan)
    all_emitted = len(sampled) == plan.tokens and sampled == list(range(plan.tokens))
    batch = Batch(
        ids_T=ids_T,
        positions_T=position_T,
        write_T=write_T,
        table_RP=slots.table_SP[:, : -(-plan.reach // PAGE)].index_select(0, slot_R),
        real_T=real_T,
        emit_N=upload(sampled, torch.int64, device),
        groups=_groups(rows),
        extents=tuple(Extent(row.n, row.start + row.n) for row in rows),
    )
    if len(emits) == len(rows):
        return Prepared(batch, slot_R, ints_RI, all_emitted)
    moved_R = upload([0 if row.emit else row.n for row in rows], torch.int64, device)
    slots.at.index_add_(0, slot_R, moved_R)
    emit_E = upload(emits, torch.int64, device)
    return Prepared(batch, slot_R.index_select(0, emit_E), ints_RI.index_select(0, emit_E), all_emitted)


def sampled_tokens(plan: StepPlan) -> list[int]:
    """Which of the step's tokens have their logits sampled: of each emitting row the last one and those before its drafts, and of one with fewer
    drafts than `plan.query` has room for the last one again."""
    ends, ahead = accumulate(row.n for row in plan.rows), range(plan.query)
    emitting = [(end - 1 - row.drafts, row.drafts) for end, row in zip(ends, plan.rows, strict=True) if row.emit]
    if len(ahead) == 1:
        return [first for first, _ in emitting]
    return [first + min(j, drafts) for first, drafts in emitting for j in ahead]


def gather(
    slot_T: Tensor, position_T: Tensor, ints_TI: Tensor, tokens_SL: Tensor, table_SP: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, position, write index and reality of each token; what is padding is 0 in all of them."""
    real_T = position_T < ints_TI[:, 2]
    position_T = position_T * real_T
    page_T = table_SP.view(-1).index_select(0, slot_T * table_SP.size(1) + (position_T >> PAGE_BITS))
    write_T = torch.add(position_T & (PAGE - 1), page_T, alpha=PAGE) * real_T
    ids_T = tokens_SL.view(-1).index_select(0, slot_T * tokens_SL.size(1) + position_T) * real_T
    return ids_T, position_T, write_T, real_T


def _expand(rows: Sequence[Row], slot_R: Tensor, ints_RI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, integers and position of each token."""
    n_R, device = [row.n for row in rows], slot_R.device
    tokens = sum(n_R)
    n_on_device, first_R = upload([n_R, [0, *accumulate(n_R[:-1])]], torch.int64, device)
    # told how many there are, the expansion does not ask the device
    row_T = torch.arange(len(rows), device=device).repeat_interleave(n_on_device, output_size=tokens)
    base_T = (ints_RI[:, 1] - first_R).index_select(0, row_T)
    position_T = base_T + torch.arange(tokens, device=device)
    return slot_R.index_select(0, row_T), ints_RI.index_select(0, row_T), position_T


def _groups(rows: Sequence[Row]) -> tuple[Group, ...]:
    """Rectangles of consecutive rows with equal n."""
    groups: list[Group] = []
    token = first = 0
    for i, row in enumerate(rows):
        if i + 1 == len(rows) or rows[i + 1].n != row.n:
            count = i + 1 - first
            reach = max(r.start + r.n for r in rows[first : i + 1])
            groups.append(Group(first, count, token, row.n, reach))
            token += count * row.n
            first = i + 1
    return tuple(groups)
