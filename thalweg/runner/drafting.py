"""The drafter's part of a step: it extends its KV by the step and proposes drafts.

A drafter that fails is switched off. No request fails and no token changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from thalweg.batch.padding import empty_batch, pad_batch, without_first_group
from thalweg.batch.slots import Slots
from thalweg.core.agreement import AgreedStep, RankStep
from thalweg.core.errors import is_out_of_memory
from thalweg.core.plan import Bind, Row, SamplingNeeds, StepPlan
from thalweg.memory.planes import Planes
from thalweg.runner.deferred_kv import DeferredKV, is_full
from thalweg.runner.draft_graphs import NO_DRAFT_GRAPHS, DraftGraphs
from thalweg.spec.drafter import NO_DRAFTER, Drafter, DraftExtendInput, DraftOutput, DraftRequest

log = logging.getLogger("thalweg.engine")

OFF = "the drafter is switched off, and decoding goes on without it: %s"

T = TypeVar("T")


class DrafterError(Exception):
    """The engine can start only without its drafter; the message says why."""


@contextmanager
def raise_as_drafter_error() -> Iterator[None]:
    """Raises errors of the block as DrafterError, except for a lack of memory."""
    try:
        yield
    except Exception as error:  # any: the steps of a drafter are guarded in the same way
        if is_out_of_memory(error):
            raise
        raise DrafterError(f"steps with it cannot be captured: {type(error).__name__}: {error}") from error


class ExtendPlan(NamedTuple):
    """The draft KV to write after a step."""

    num_deferred: int  # leading rows of one token whose draft KV is deferred
    written_slots: tuple[int, ...] | None  # slots whose deferred KV is written; None: all slots
    written_tokens: int  # deferred tokens whose KV is written
    extends: bool  # the drafter extends by the other rows of the step


class Drafting:
    """A drafter with its deferred KV. A drafter that fails is switched off for good."""

    def __init__(self, drafter: Drafter, slots: Slots, planes: Planes) -> None:
        self.drafter, self.slots, self.planes = drafter, slots, planes
        self.initial_drafter = drafter  # runs the padded passes after it has failed, until all ranks know
        captured = planes.device.type == "cuda"  # the next step may overwrite the tensors of a step
        self.deferred = DeferredKV(slots, copies_tensors=captured)
        self.has_draft_kv = bool(drafter.planes())  # a drafter without planes has nothing to extend
        self.drafter_failed = False
        self.output_rejected = False  # it is switched off before the next step, on all ranks together
        self.is_off = drafter is NO_DRAFTER
        self.hidden_TX: Tensor | None = None  # of the last step; padded passes take its width and type

    def drop_deferred(self) -> None:
        """Discards all deferred tokens: the steps of an engine's start belong to no request."""
        self.deferred.clear()

    def rank_step(self, plan: StepPlan, rank_step: RankStep) -> RankStep:
        """Adds the drafter's part to the sizes of a step."""
        if not self.has_draft_kv:
            return rank_step._replace(has_drafter=not self.has_failed)
        slots = self._slots_to_write(plan)
        deferred, extended = (self._plan(plan.rows, False, False, slots, defers) for defers in (True, False))
        return rank_step._replace(
            has_drafter=not self.has_failed,
            written_before=sum(len(self.deferred.by_slot[slot].locations) for slot in slots),
            written_if_deferred=deferred.written_tokens,
            written_if_extended=extended.written_tokens,
        )

    def prepare(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        """Before a step: writes the deferred KV of slots that are rebound and of pages that a new request may share."""
        if not self.drafter_failed and (self.output_rejected if agreed is None else not agreed.has_drafter):
            if not self.output_rejected:
                log.error(OFF, "the drafter of another rank has failed")
            self._switch_off()
        size = agreed.written_before if agreed else 0
        slots = self._slots_to_write(plan)
        if size or slots:
            self._run(lambda: self._write_deferred(slots, size), lambda: self._extend_padding(size))

    def bind(self, binds: Sequence[Bind]) -> None:
        """After these slots were bound and have their pages."""
        self._run(lambda: self.drafter.bind(binds, self.slots, self.planes))

    def write_all_deferred(self) -> None:
        """Writes the deferred KV of all slots."""
        self._run(lambda: self._write_deferred(None, 0))

    def draft(
        self,
        draft_input: DraftExtendInput | None,
        request: DraftRequest | None,
        num_drafts: int,
        captured: DraftGraphs = NO_DRAFT_GRAPHS,
        agreed: AgreedStep | None = None,
    ) -> DraftOutput | None:
        """Extends the drafter by a step, and drafts for its sampled rows. draft_input: None for a step without hidden
        states.

        If nothing is drafted, the draft KV of single tokens is deferred; it is written for many steps at once.
        """
        if draft_input is not None and (self.has_draft_kv or agreed):
            self._extend(draft_input, num_drafts, captured, agreed)
        if agreed is not None and agreed.num_drafts:
            return self._draft_padded(request, captured, agreed)
        if request is None:
            return None
        return self._run(lambda: self._propose(request, num_drafts, captured))

    def _propose(self, request: DraftRequest, num_drafts: int, captured: DraftGraphs) -> DraftOutput | None:
        drafts = None if self.drafter_failed else captured.propose(request, num_drafts)
        return drafts or self.drafter.propose(request, num_drafts, self.slots, self.planes)

    def _draft_padded(
        self, request: DraftRequest | None, captured: DraftGraphs, agreed: AgreedStep
    ) -> DraftOutput | None:
        """Drafts for as many rows as the busiest rank has. Padding rows use the spare slot."""
        num_drafts, spare = agreed.num_drafts, len(self.slots.length) - 1
        spare_E = torch.full((agreed.sampled_rows,), spare, dtype=torch.int64, device=self.planes.device)
        padding = DraftRequest(spare_E, 1, SamplingNeeds())
        if request is None:
            own, padded = 0, padding
        else:
            own = len(request.slot_E)
            padded = replace(request, slot_E=torch.cat((request.slot_E, spare_E[own:])))
        drafts = self._run(
            lambda: self._propose(padded, num_drafts, captured),
            lambda: self.initial_drafter.propose(padding, num_drafts, self.slots, self.planes),
        )
        return None if drafts is None or not own else drafts.first(own)

    def _extend(
        self, draft_input: DraftExtendInput, num_drafts: int, captured: DraftGraphs, agreed: AgreedStep | None
    ) -> None:
        self.hidden_TX, rows, batch = draft_input.hidden_TH, draft_input.plan.rows, draft_input.batch
        can_split = agreed is None and len(batch.table_RP) == len(rows)  # a captured step has a row for each token
        plan = self._plan(rows, num_drafts > 0, can_split, set(), None if agreed is None else not agreed.extends)
        if plan.num_deferred:
            self.deferred.defer(draft_input, plan.num_deferred)
        size, tokens = agreed.written_after if agreed else 0, len(batch.ids_T)
        if size or plan.written_slots is None or plan.written_slots:
            self._run(lambda: self._write_deferred(plan.written_slots, size), lambda: self._extend_padding(size))
        if plan.extends or agreed and agreed.extends:
            rest, size = draft_input, agreed.tokens if agreed else 0
            if plan.num_deferred:
                others = replace(draft_input.plan, rows=rows[plan.num_deferred :])
                rest = DraftExtendInput(others, without_first_group(batch), draft_input.hidden_TH[plan.num_deferred :])
            self._run(
                lambda: self._extend_step(rest, captured, size),
                lambda: self._extend_padding(size and max(size, tokens)),
            )

    def _extend_step(self, draft_input: DraftExtendInput, captured: DraftGraphs, size: int) -> None:
        if not captured.extend(draft_input):
            self.drafter.extend(self._padded(draft_input, size), self.slots, self.planes)

    def _extend_padding(self, tokens: int) -> None:
        if tokens and self.hidden_TX is not None:
            self.initial_drafter.extend(self._padded(None, tokens), self.slots, self.planes)

    def _write_deferred(self, slots: Iterable[int] | None, size: int) -> None:
        """Writes the deferred KV of these slots, or of all. size: tokens of the pass with its padding."""
        draft_input = self.deferred.pop(slots)
        if draft_input is not None or size:
            self.drafter.extend(self._padded(draft_input, size), self.slots, self.planes)

    def _padded(self, draft_input: DraftExtendInput | None, tokens: int) -> DraftExtendInput:
        if draft_input is None:
            assert self.hidden_TX is not None, "every rank has run a step before KV is deferred"
            none_TX = self.hidden_TX[:0]
            draft_input = DraftExtendInput(StepPlan(0, 0), empty_batch(self.slots), none_TX)
        missing = tokens - len(draft_input.batch.ids_T)
        if missing <= 0:
            return draft_input
        hidden_TX = torch.cat(
            (draft_input.hidden_TH, draft_input.hidden_TH.new_zeros(missing, draft_input.hidden_TH.shape[1]))
        )
        return replace(draft_input, batch=pad_batch(draft_input.batch, tokens), hidden_TH=hidden_TX)

    def _slots_to_write(self, plan: StepPlan) -> set[int]:
        """Slots whose deferred KV must be written before this step."""
        by_slot = self.deferred.by_slot
        if not by_slot or not (plan.binds or plan.appends):
            return set()
        stay = {row.slot for row in plan.rows} - {bind.slot for bind in plan.binds}
        if any(bind.computed for bind in plan.binds):
            stay -= self.deferred.slots_with_full_page()
        return by_slot.keys() - stay

    def _plan(
        self, rows: Sequence[Row], is_drafting: bool, can_split: bool, written: set[int], defers: bool | None = None
    ) -> ExtendPlan:
        """is_drafting: drafts are made after the step. can_split: its leading rows may be deferred alone. written:
        slots whose deferred KV is written before the step. defers: whether all ranks defer the step; None: one rank
        decides.
        """
        lengths = {
            slot: len(locations) for slot, (locations, _) in self.deferred.by_slot.items() if slot not in written
        }
        single = next((i for i, row in enumerate(rows) if row.n > 1), len(rows))
        if defers is None:
            defers = single == len(rows) and (not is_drafting or any(row.slot in lengths for row in rows))
        num_deferred = len(rows) if defers else single if can_split and not is_drafting else 0
        tokens, longest = (self.deferred.tokens, self.deferred.longest) if lengths else (0, 0)
        for row in rows[:num_deferred]:
            lengths[row.slot] = lengths.get(row.slot, 0) + 1
            longest = max(longest, lengths[row.slot])
        if is_full(tokens + num_deferred, longest):
            return ExtendPlan(num_deferred, None, sum(lengths.values()), not defers)
        extended = rows[num_deferred:] if not defers else rows if is_drafting else ()
        slots = tuple(row.slot for row in extended if row.slot in lengths)
        return ExtendPlan(num_deferred, slots, sum(lengths[slot] for slot in slots), not defers)

    def _run(self, work: Callable[[], T], padding: Callable[[], object] | None = None) -> T | None:
        """Runs a pass of the drafter. padding: the same pass on padding alone, for a drafter that has failed."""
        if not self.drafter_failed:
            try:
                return work()
            except Exception:  # any error: decoding goes on without drafts
                log.exception(OFF, "it raised")
                self._switch_off()
        if padding is not None:
            padding()
        return None

    def reject_output(self) -> None:
        """Switches the drafter off before the next step: its output was NaN or no token. Steps in flight run as they
        were planned, since the same passes run on other ranks.
        """
        if not self.has_failed:
            log.error(OFF, "its hidden states or logits are NaN or infinite, or its drafts are no token ids")
            self.output_rejected = True

    @property
    def has_failed(self) -> bool:
        return self.drafter_failed or self.output_rejected

    def _switch_off(self) -> None:
        self.drafter_failed, self.is_off, self.has_draft_kv, self.drafter = True, True, False, NO_DRAFTER
        self.deferred.clear()
        self.slots.num_drafts.zero_()  # the drafter may have failed halfway


class DraftsElsewhere(Drafting):
    """On a pipeline stage that is not the last, where nothing is drafted."""

    def __init__(self, slots: Slots, planes: Planes) -> None:
        super().__init__(NO_DRAFTER, slots, planes)

    def prepare(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        return

    def draft(self, *given: Any, **named: Any) -> None:
        return
