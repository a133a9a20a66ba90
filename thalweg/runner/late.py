"""What a drafter has not looked at yet: while nothing is drafted, its state lags behind, and catches up with many steps at once.

To learn from one token costs a drafter nearly what it costs to learn from sixty (the bundled model's layer, one EPYC core: 0.38 ms, a fifth of a
step; 2.7 ms for 512 of them at once), so steps that draft nothing are only kept: their tokens and the target's hidden states."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Extent
from thalweg.batch.prepare import groups_of
from thalweg.batch.slots import Slots
from thalweg.batch.upload import upload
from thalweg.core.plan import PAGE, Row, StepPlan
from thalweg.spec.drafter import Seen

TOKENS = 512  # that lag at most: what they take is far less than a step of as many


class Kept(NamedTuple):
    """A step of single tokens, [T] each and hidden_TX: as in `Seen`."""

    plan: StepPlan
    ids_T: Tensor
    positions_T: Tensor
    write_T: Tensor
    real_T: Tensor
    hidden_TX: Tensor


class Late:
    """Steps in order. passing: whether what they lie in is written again by the next step, so that it must be copied; such a step may have padding
    behind it, others have none."""

    def __init__(self, slots: Slots, passing: bool) -> None:
        self.slots, self.passing = slots, passing
        self.steps: list[Kept] = []
        self.tokens = 0

    @property
    def full(self) -> bool:
        return self.tokens >= TOKENS

    def keep(self, seen: Seen) -> None:
        """seen: a step each of whose rows is one token."""
        plan, batch, rows = seen.plan, seen.batch, len(seen.plan.rows)
        kept = Kept(plan, batch.ids_T, batch.positions_T, batch.write_T, batch.real_T, seen.hidden_TH)
        self.steps.append(Kept(plan, *(one[:rows].clone() for one in kept[1:])) if self.passing else kept)
        self.tokens += rows

    def drop(self) -> None:
        self.steps, self.tokens = [], 0

    def joined(self) -> Seen | None:
        """All of them as one step, whose rows are what each slot has done meanwhile; None where there is nothing. They are dropped."""
        steps = self.steps
        self.drop()
        if not steps:
            return None
        rows, order = _by_slot(steps)
        device, context = steps[0].hidden_TX.device, self.slots.context
        order_T = upload(order, torch.int64, device)
        ids_T, positions_T, write_T, real_T, hidden_TX = (
            torch.cat(fields).index_select(0, order_T) for fields in zip(*(kept[1:] for kept in steps), strict=True)
        )
        reach = min(max(kept.plan.reach for kept in steps), context)
        slot_R = upload([row.slot for row in rows], torch.int64, device)
        table_RP = self.slots.table_SP[:, : -(-reach // PAGE)].index_select(0, slot_R)
        groups, extents = groups_of(rows), tuple(Extent(row.n, min(row.start + row.n, context)) for row in rows)
        batch = Batch(ids_T, positions_T, write_T, table_RP, real_T, slot_R[:0], groups, extents)
        return Seen(StepPlan(steps[-1].plan.step, steps[-1].plan.seen, rows, reach=reach), batch, hidden_TX)


def _by_slot(steps: Sequence[Kept]) -> tuple[tuple[Row, ...], list[int]]:
    """A row for each slot, those of equally many tokens together; and where the tokens of these rows stand in the steps, one behind the other."""
    places: dict[int, list[int]] = {}
    last: dict[int, Row] = {}
    first = [0, *accumulate(len(kept.plan.rows) for kept in steps)]
    for begin, kept in zip(first, steps, strict=False):
        for at, row in enumerate(kept.plan.rows, begin):
            places.setdefault(row.slot, []).append(at)
            last[row.slot] = row
    slots = sorted(places, key=lambda slot: len(places[slot]))
    rows = tuple(
        Row(last[slot].uid, slot, last[slot].start + 1 - len(places[slot]), len(places[slot]), 0, True)
        for slot in slots
    )
    return rows, [at for slot in slots for at in places[slot]]
