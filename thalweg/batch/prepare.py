"""`prepare`: a plan (host, upper bounds) and `Slots` (device, truth) make a `Batch`. Bounds become truth here: tokens at or past a
slot's end, which is 0 for one that has ended, turn into padding, which touches the null page only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group
from thalweg.batch.slots import Slots
from thalweg.core.plan import PAGE, Row, StepPlan

PAGE_BITS = PAGE.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """batch: for the model. Of the emitting rows: slot_E int64, their slots; ints_EI int64, the slots' integers as this step finds them."""

    batch: Batch
    slot_E: Tensor
    ints_EI: Tensor


def prepare(plan: StepPlan, slots: Slots) -> Prepared:
    """Binds, extends page tables, and gathers the step's tokens. A prefill chunk that does not emit moves its slot's `at` here."""
    slots.bind(plan.binds)
    slots.append(plan.appends)
    rows, device = plan.rows, slots.ints_SI.device
    slot_R = torch.tensor([row.slot for row in rows], dtype=torch.int64, device=device)
    ints_RI = slots.ints_SI.index_select(0, slot_R)
    if len(rows) == sum(row.n for row in rows):  # single tokens need no expansion
        slot_T, ints_TI, position_T = slot_R, ints_RI, ints_RI[:, 1]
    else:
        slot_T, ints_TI, position_T = _expand(rows, slot_R, ints_RI)
    ids_T, position_T, write_T, real_T = _gather(slot_T, position_T, ints_TI, slots.tokens_SL, slots.table_SP)
    ends = list(accumulate(row.n for row in rows))
    emits = [i for i, row in enumerate(rows) if row.emit]
    batch = Batch(
        ids_T=ids_T,
        positions_T=position_T,
        write_T=write_T,
        table_RP=slots.table_SP[:, : -(-plan.reach // PAGE)].index_select(0, slot_R),
        real_T=real_T,
        emit_E=torch.tensor([ends[i] - 1 for i in emits], dtype=torch.int64, device=device),
        groups=_groups(rows),
    )
    if len(emits) == len(rows):
        return Prepared(batch, slot_R, ints_RI)
    moved_R = torch.tensor([0 if row.emit else row.n for row in rows], dtype=torch.int64, device=device)
    slots.at.index_add_(0, slot_R, moved_R)
    emit_E = torch.tensor(emits, dtype=torch.int64, device=device)
    return Prepared(batch, slot_R.index_select(0, emit_E), ints_RI.index_select(0, emit_E))


def _gather(
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
    n_R = [row.n for row in rows]
    row_T = torch.arange(len(rows), device=slot_R.device).repeat_interleave(torch.tensor(n_R, device=slot_R.device))
    first_R = torch.tensor([0, *accumulate(n_R[:-1])], dtype=torch.int64, device=slot_R.device)
    base_T = (ints_RI[:, 1] - first_R).index_select(0, row_T)
    position_T = base_T + torch.arange(len(row_T), device=slot_R.device)
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
