"""`prepare`: a plan (host, upper bounds) and `Slots` (device, truth) make a `Batch`. Bounds become truth here: tokens at or past a
slot's end and all tokens of an ended slot turn into padding, which touches the null page only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group
from thalweg.batch.slots import Slots
from thalweg.core.plan import PAGE, Row, StepPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """batch: for the model. slot_E int64: slots of the emitting rows; live_E bool: those that have not ended."""

    batch: Batch
    slot_E: Tensor
    live_E: Tensor


def prepare(plan: StepPlan, slots: Slots) -> Prepared:
    """Binds, extends page tables, and gathers the step's tokens. A prefill chunk that does not emit moves its slot's `at` here."""
    slots.bind(plan.binds)
    slots.append(plan.appends)
    rows, device = plan.rows, slots.ints_SI.device
    slot_R = torch.tensor([row.slot for row in rows], dtype=torch.int64, device=device)
    ends = list(accumulate(row.n for row in rows))
    slot_T, positions_T = _positions(rows, ends, slot_R, slots)
    state_TI = slots.ints_SI[slot_T]
    real_T = (positions_T < state_TI[:, 2]) & (state_TI[:, 3] == 0)
    positions_T = positions_T * real_T
    page_T = slots.table_SP[slot_T, positions_T // PAGE]
    batch = Batch(
        ids_T=slots.tokens_SL[slot_T, positions_T] * real_T,
        positions_T=positions_T,
        write_T=(page_T * PAGE + positions_T % PAGE) * real_T,
        table_RP=slots.table_SP[slot_R, : -(-plan.reach // PAGE)],
        real_T=real_T,
        emit_E=torch.tensor([end - 1 for row, end in zip(rows, ends, strict=True) if row.emit], dtype=torch.int64, device=device),
        groups=_groups(rows),
    )
    moved = [row for row in rows if not row.emit]
    if moved:
        index = torch.tensor([row.slot for row in moved], dtype=torch.int64, device=device)
        slots.at[index] += torch.tensor([row.n for row in moved], dtype=torch.int64, device=device)
        slot_E = torch.tensor([row.slot for row in rows if row.emit], dtype=torch.int64, device=device)
    else:
        slot_E = slot_R
    return Prepared(batch, slot_E, slots.done[slot_E] == 0)


def _positions(rows: Sequence[Row], ends: list[int], slot_R: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """The slot and the position of each token; a step of single tokens needs no expansion."""
    if ends[-1] == len(rows):
        return slot_R, slots.at[slot_R]
    n_R = torch.tensor([row.n for row in rows], dtype=torch.int64, device=slot_R.device)
    slot_T = slot_R.repeat_interleave(n_R, output_size=ends[-1])
    first_R = torch.tensor([0, *ends[:-1]], dtype=torch.int64, device=slot_R.device)
    base_T = (slots.at[slot_R] - first_R).repeat_interleave(n_R, output_size=ends[-1])
    return slot_T, base_T + torch.arange(ends[-1], device=slot_R.device)


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
