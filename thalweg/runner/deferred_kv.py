"""Deferred draft KV: while nothing is drafted, tokens and the target's hidden states are stored, and the draft KV of
many steps is written at once.

Extending a drafter's KV by one token costs nearly as much as by sixty (the bundled model's layer, one EPYC core:
0.38 ms, a fifth of a step; 2.7 ms for 512 at once).
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
from thalweg.core.plan import Row, StepPlan
from thalweg.spec.drafter import DraftExtendInput

MAX_TOKENS_PER_SLOT = 512  # writing the draft KV of so many takes far less time than a step of as many tokens
INEXACT_STEPS = 2  # steps after drafts whose positions the host knows only as upper bounds
MAX_TOKENS = 2048  # of all slots: a token of the largest models has some 14 to 43 kB of hidden states


class DeferredStep(NamedTuple):
    """Inputs of the leading rows of a step, one token each; see `DraftExtendInput`."""

    ids_T: Tensor
    positions_T: Tensor
    write_T: Tensor
    real_T: Tensor
    hidden_TX: Tensor


class TokenLocation(NamedTuple):
    """Location of a deferred token."""

    step: int  # index of the deferred step
    row: int  # index in that step


class DeferredSlot(NamedTuple):
    """The deferred tokens of a slot."""

    locations: list[TokenLocation]
    last: Row  # the latest row


def is_full(tokens: int, longest: int) -> bool:
    """Whether deferred tokens must be written now. longest: the most tokens of one slot."""
    return tokens >= MAX_TOKENS or longest >= MAX_TOKENS_PER_SLOT


class DeferredKV:
    """The deferred tokens of all slots."""

    def __init__(self, slots: Slots, copies_tensors: bool) -> None:
        """copies_tensors: the next step overwrites the tensors of a step, so they are copied."""
        self.slots, self.copies_tensors = slots, copies_tensors
        self.clear()

    def clear(self) -> None:
        self.steps: list[DeferredStep] = []
        self.tokens = 0  # stored tokens, including those whose KV has been written since
        self.longest = 0  # most tokens of one slot
        self.max_kv_len = 0
        self.by_slot: dict[int, DeferredSlot] = {}

    @staticmethod
    def max_steps(rows: int) -> int:
        """Number of steps with so many rows that can be deferred before all must be written."""
        return max(min(MAX_TOKENS_PER_SLOT, -(-MAX_TOKENS // rows)), 1)

    def slots_with_full_page(self) -> set[int]:
        """Slots whose deferred tokens filled a page, which may be the prefix of another sequence by now."""
        page = self.slots.page_size
        return {
            slot
            for slot, (locations, last) in self.by_slot.items()
            if len(locations) <= INEXACT_STEPS or (last.start + 1) // page > (last.start + 1 - len(locations)) // page
        }

    def defer(self, draft_input: DraftExtendInput, rows: int) -> None:
        """Stores the leading rows of a step, which have one token each."""
        batch = draft_input.batch
        inputs = batch.ids_T, batch.positions_T, batch.write_T, batch.real_T, draft_input.hidden_TH
        is_copied = self.copies_tensors or len(batch.ids_T) > rows  # a view would keep the whole tensor in memory
        self.steps.append(DeferredStep(*(x[:rows].clone() if is_copied else x for x in inputs)))
        for i, row in enumerate(draft_input.plan.rows[:rows]):
            deferred = self.by_slot.get(row.slot)
            locations = [] if deferred is None else deferred.locations
            locations.append(TokenLocation(len(self.steps) - 1, i))
            self.by_slot[row.slot] = DeferredSlot(locations, row)
            self.longest = max(self.longest, len(locations))
        self.tokens += rows
        self.max_kv_len = max(self.max_kv_len, draft_input.plan.max_kv_len)

    def pop(self, slots: Iterable[int] | None = None) -> DraftExtendInput | None:
        """Removes the deferred tokens of these slots, or of all, and returns them as one step with a row for each
        slot; None if there are none.
        """
        by_slot = self.by_slot
        if slots is not None:
            by_slot = {slot: by_slot[slot] for slot in slots if slot in by_slot}
        if not by_slot:
            return None
        ordered = sorted(by_slot.values(), key=lambda slot: len(slot.locations))
        draft_input = self._step(tuple(slot.last for slot in ordered), [slot.locations for slot in ordered])
        if len(by_slot) == len(self.by_slot):
            self.clear()
        else:
            for slot in by_slot:
                del self.by_slot[slot]
        return draft_input

    def _step(self, last: tuple[Row, ...], locations: list[list[TokenLocation]]) -> DraftExtendInput:
        """Gathers the tokens at these locations as one step. last: the latest row of each slot."""
        rows = tuple(
            row._replace(start=row.start + 1 - len(row_locations), n=len(row_locations), num_drafts=0)
            for row, row_locations in zip(last, locations, strict=True)
        )
        device, context = self.steps[0].hidden_TX.device, self.slots.context
        ordered = sorted(location for row_locations in locations for location in row_locations)
        index = {location: i for i, location in enumerate(ordered)}
        order_T = upload([index[location] for row in locations for location in row], torch.int64, device)
        ids_T, positions_T, write_T, real_T, hidden_TX = (
            torch.cat(fields).index_select(0, order_T) for fields in zip(*self._parts(ordered), strict=True)
        )
        max_kv_len = min(self.max_kv_len, context)
        slot_R = upload([row.slot for row in rows], torch.int64, device)
        table_RP = self.slots.table_SP[:, : self.slots.num_pages(max_kv_len)].index_select(0, slot_R)
        groups, extents = groups_of(rows), tuple(RowExtent(row.n, min(row.start + row.n, context)) for row in rows)
        batch = Batch(ids_T, positions_T, write_T, table_RP, real_T, slot_R[:0], groups, extents)
        return DraftExtendInput(StepPlan(0, 0, rows, max_kv_len=max_kv_len), batch, hidden_TX)

    def _parts(self, ordered: list[TokenLocation]) -> list[DeferredStep]:
        """Stored inputs of the tokens at these locations: consecutive rows of each step, mostly the whole step."""
        parts: list[DeferredStep] = []
        for (number, _), group in groupby(enumerate(ordered), lambda pair: (pair[1].step, pair[1].row - pair[0])):
            rows, step = [location.row for _, location in group], self.steps[number]
            is_whole = len(rows) == len(step.ids_T)
            parts.append(step if is_whole else DeferredStep(*(field[rows[0] : rows[-1] + 1] for field in step)))
        return parts
