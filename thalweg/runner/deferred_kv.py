"""Deferred draft KV: while nothing is drafted, tokens and the target's hidden states are kept, and their draft KV is
written for many steps at once.

To extend a drafter's KV by one token costs nearly what sixty cost (the bundled model's layer, one EPYC core: 0.38 ms, a
fifth of a step; 2.7 ms for 512 at once).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, RowExtent
from thalweg.batch.inputs import groups_of
from thalweg.batch.slots import Slots, upload
from thalweg.core.plan import PAGE, Row, StepPlan
from thalweg.spec.drafter import DraftExtendInput

ROW = 512  # most tokens of a sequence: their draft KV takes far less time than a step of as many
LOOSE = 2  # steps whose places the host knows as a bound only, while drafts are in flight
TOKENS = 2048  # most of all together: a token of the largest models has some 14 to 43 kB of hidden states


class Kept(NamedTuple):
    """The first rows of a step, of a token each; see `DraftExtendInput`."""

    ids_T: Tensor
    positions_T: Tensor
    write_T: Tensor
    real_T: Tensor
    hidden_TX: Tensor


class Place(NamedTuple):
    """Where a kept token is."""

    step: int  # which of the kept steps
    row: int  # of that step


class Behind(NamedTuple):
    """The deferred tokens of a slot."""

    places: list[Place]
    last: Row  # its latest


def is_full(tokens: int, longest: int) -> bool:
    """Whether so many deferred tokens, of which one slot has `longest`, must be written now."""
    return tokens >= TOKENS or longest >= ROW


class DeferredKV:
    """The deferred tokens of all slots."""

    def __init__(self, slots: Slots, passing: bool) -> None:
        """passing: the next step overwrites the tensors of a step, so they are copied."""
        self.slots, self.passing = slots, passing
        self.drop()

    def drop(self) -> None:
        self.steps: list[Kept] = []
        self.tokens = 0  # kept, those of slots whose KV was written since included
        self.longest = 0  # tokens of one slot at most
        self.max_kv_len = 0
        self.behind: dict[int, Behind] = {}

    @staticmethod
    def room(rows: int) -> int:
        """Steps of so many rows that are kept before all are written."""
        return max(min(ROW, -(-TOKENS // rows)), 1)

    def filled(self) -> set[int]:
        """Slots whose kept tokens ended a page: it may be the prefix of another sequence by now."""
        return {
            slot
            for slot, (places, last) in self.behind.items()
            if len(places) <= LOOSE or (last.start + 1) // PAGE > (last.start + 1 - len(places)) // PAGE
        }

    def keep(self, seen: DraftExtendInput, rows: int) -> None:
        """Keeps the first rows of a step, which have one token each."""
        batch = seen.batch
        whole = batch.ids_T, batch.positions_T, batch.write_T, batch.real_T, seen.hidden_TH
        copied = self.passing or len(batch.ids_T) > rows  # a part would hold the rest
        self.steps.append(Kept(*(one[:rows].clone() if copied else one for one in whole)))
        for number, row in enumerate(seen.plan.rows[:rows]):
            before = self.behind.get(row.slot)
            places = [] if before is None else before.places
            places.append(Place(len(self.steps) - 1, number))
            self.behind[row.slot] = Behind(places, row)
            self.longest = max(self.longest, len(places))
        self.tokens += rows
        self.max_kv_len = max(self.max_kv_len, seen.plan.max_kv_len)

    def joined(self, wanted: Iterable[int] | None = None) -> DraftExtendInput | None:
        """The deferred tokens of these slots, or of all, as one step with a row for each slot; None if there are none.
        They are dropped here.
        """
        found = self.behind if wanted is None else {slot: self.behind[slot] for slot in wanted if slot in self.behind}
        if not found:
            return None
        order = sorted(found.values(), key=lambda one: len(one.places))
        joined = self._step(tuple(one.last for one in order), [one.places for one in order])
        if len(found) == len(self.behind):
            self.drop()
        else:
            for slot in found:
                del self.behind[slot]
        return joined

    def _step(self, last: tuple[Row, ...], places: list[list[Place]]) -> DraftExtendInput:
        """The step of these rows, whose tokens are at these places."""
        rows = tuple(
            row._replace(start=row.start + 1 - len(of), n=len(of), num_drafts=0)
            for row, of in zip(last, places, strict=True)
        )
        device, context = self.steps[0].hidden_TX.device, self.slots.context
        ordered = sorted(place for of in places for place in of)
        number = {place: i for i, place in enumerate(ordered)}
        order_T = upload([number[place] for of in places for place in of], torch.int64, device)
        ids_T, positions_T, write_T, real_T, hidden_TX = (
            torch.cat(fields).index_select(0, order_T) for fields in zip(*self._parts(ordered), strict=True)
        )
        max_kv_len = min(self.max_kv_len, context)
        slot_R = upload([row.slot for row in rows], torch.int64, device)
        table_RP = self.slots.table_SP[:, : -(-max_kv_len // PAGE)].index_select(0, slot_R)
        groups, extents = groups_of(rows), tuple(RowExtent(row.n, min(row.start + row.n, context)) for row in rows)
        batch = Batch(ids_T, positions_T, write_T, table_RP, real_T, slot_R[:0], groups, extents)
        return DraftExtendInput(StepPlan(0, 0, rows, max_kv_len=max_kv_len), batch, hidden_TX)

    def _parts(self, ordered: list[Place]) -> list[Kept]:
        """What is kept of the tokens at these places: consecutive rows of each step, mostly all of it."""
        parts: list[Kept] = []
        for (step, _), together in groupby(enumerate(ordered), lambda one: (one[1].step, one[1].row - one[0])):
            rows, kept = [place.row for _, place in together], self.steps[step]
            whole = len(rows) == len(kept.ids_T)
            parts.append(kept if whole else Kept(*(field[rows[0] : rows[-1] + 1] for field in kept)))
        return parts
