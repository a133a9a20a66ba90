"""The drafter's part of a step: it extends its KV by the step, and drafts.

A drafter only makes decoding faster: one that fails is switched off and costs neither a request nor a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from thalweg.batch.padding import empty_batch, pad_batch, without_first_group
from thalweg.batch.slots import Slots
from thalweg.core.agreement import AgreedStep, Record
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
def blamed_on_drafter() -> Iterator[None]:
    """Errors raised inside become DrafterError, except for a lack of memory."""
    try:
        yield
    except Exception as error:  # any: the steps of a drafter are guarded in the same way
        if is_out_of_memory(error):
            raise
        raise DrafterError(f"steps with it cannot be recorded: {type(error).__name__}: {error}") from error


class ExtendPlan(NamedTuple):
    """What the drafter writes for a step, and for deferred tokens of earlier steps."""

    kept: int  # leading rows of one token whose draft KV is deferred
    slots: tuple[int, ...] | None  # whose deferred tokens are written; None: of all slots
    tokens: int  # deferred tokens that are written
    extends: bool  # the drafter extends by the other rows of the step


class Drafting:
    """A drafter with its deferred KV. A drafter that fails is switched off for good."""

    def __init__(self, drafter: Drafter, slots: Slots, planes: Planes) -> None:
        self.drafter, self.slots, self.planes = drafter, slots, planes
        self.original = drafter  # runs the padded passes after it has failed, until all ranks know
        captured = planes.device.type == "cuda"  # the next step may overwrite the tensors of a step
        self.deferred = DeferredKV(slots, passing=captured)
        self.learns = bool(drafter.planes())  # a drafter without planes has nothing to extend
        self.lost = False  # the drafter has failed
        self.is_off = drafter is NO_DRAFTER
        self.hidden_TX: Tensor | None = None  # of the last step; padded passes take its width and type

    def forget(self) -> None:
        """Drops what is deferred: the steps of an engine's start belong to no request."""
        self.deferred.drop()

    def record(self, plan: StepPlan, record: Record) -> Record:
        """Adds the drafter's part to the record of a step."""
        if not self.learns:
            return record._replace(has_drafter=not self.lost)
        leaving = self._leaving(plan)
        kept, extended = (self._plan(plan.rows, False, False, leaving, keeps) for keeps in (True, False))
        return record._replace(
            has_drafter=not self.lost,
            leaving=sum(len(self.deferred.behind[slot].places) for slot in leaving),
            deferred_if_kept=kept.tokens,
            deferred_if_extended=extended.tokens,
        )

    def prepare(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        """Before a step: writes the deferred KV of slots and pages that change hands, since a prompt may find them."""
        if agreed is not None and not agreed.has_drafter and not self.lost:
            log.error(OFF, "another rank has lost its drafter")
            self._switch_off()
        size = agreed.leaving if agreed else 0
        leaving = self._leaving(plan)
        if size or leaving:
            self._run(lambda: self._write_deferred(leaving, size), lambda: self._extend_padding(size))

    def bind(self, binds: Sequence[Bind]) -> None:
        """After these slots were bound and have their pages."""
        self._run(lambda: self.drafter.bind(binds, self.slots, self.planes))

    def catch_up(self) -> None:
        """Writes all that is deferred."""
        self._run(lambda: self._write_deferred(None, 0))

    def draft(
        self,
        seen: DraftExtendInput | None,
        request: DraftRequest | None,
        num_drafts: int,
        captured: DraftGraphs = NO_DRAFT_GRAPHS,
        agreed: AgreedStep | None = None,
    ) -> DraftOutput | None:
        """Extends the drafter by a step, and drafts for its emitting rows. seen: None for a step without hidden states.

        If nothing is drafted, the draft KV of single tokens is deferred and written for many steps at once.
        """
        if seen is not None and (self.learns or agreed):
            self._extend(seen, num_drafts, captured, agreed)
        if agreed is not None and agreed.num_drafts:
            return self._draft_padded(request, captured, agreed)
        if request is None:
            return None
        return self._run(lambda: self._propose(request, num_drafts, captured))

    def _propose(self, request: DraftRequest, num_drafts: int, captured: DraftGraphs) -> DraftOutput | None:
        drafts = None if self.lost else captured.propose(request, num_drafts)
        return drafts or self.drafter.propose(request, num_drafts, self.slots, self.planes)

    def _draft_padded(
        self, request: DraftRequest | None, captured: DraftGraphs, agreed: AgreedStep
    ) -> DraftOutput | None:
        """Drafts for as many rows as the busiest rank has; the missing ones are of the spare slot."""
        num_drafts, spare = agreed.num_drafts, len(self.slots.length) - 1
        spare_E = torch.full((agreed.emitting,), spare, dtype=torch.int64, device=self.planes.device)
        padding = DraftRequest(spare_E, 1, SamplingNeeds())
        if request is None:
            own, padded = 0, padding
        else:
            own = len(request.slot_E)
            padded = replace(request, slot_E=torch.cat((request.slot_E, spare_E[own:])))
        drafts = self._run(
            lambda: self._propose(padded, num_drafts, captured),
            lambda: self.original.propose(padding, num_drafts, self.slots, self.planes),
        )
        return None if drafts is None or not own else drafts.first(own)

    def _extend(
        self, seen: DraftExtendInput, num_drafts: int, captured: DraftGraphs, agreed: AgreedStep | None
    ) -> None:
        self.hidden_TX, rows, batch = seen.hidden_TH, seen.plan.rows, seen.batch
        can_split = agreed is None and len(batch.table_RP) == len(rows)  # a captured step has a row for each token
        plan = self._plan(rows, num_drafts > 0, can_split, set(), None if agreed is None else not agreed.extends)
        if plan.kept:
            self.deferred.keep(seen, plan.kept)
        size, tokens = agreed.deferred if agreed else 0, len(batch.ids_T)
        if size or plan.slots is None or plan.slots:
            self._run(lambda: self._write_deferred(plan.slots, size), lambda: self._extend_padding(size))
        if plan.extends or agreed and agreed.extends:
            rest, size = seen, agreed.tokens if agreed else 0
            if plan.kept:
                others = replace(seen.plan, rows=rows[plan.kept :])
                rest = DraftExtendInput(others, without_first_group(batch), seen.hidden_TH[plan.kept :])
            self._run(
                lambda: self._extend_step(rest, captured, size),
                lambda: self._extend_padding(size and max(size, tokens)),
            )

    def _extend_step(self, seen: DraftExtendInput, captured: DraftGraphs, size: int) -> None:
        if not captured.extend(seen):
            self.drafter.extend(self._padded(seen, size), self.slots, self.planes)

    def _extend_padding(self, tokens: int) -> None:
        if tokens and self.hidden_TX is not None:
            self.original.extend(self._padded(None, tokens), self.slots, self.planes)

    def _write_deferred(self, slots: Iterable[int] | None, size: int) -> None:
        """Writes the deferred KV of these slots, or of all. size: tokens of the pass with its padding."""
        seen = self.deferred.joined(slots)
        if seen is not None or size:
            self.drafter.extend(self._padded(seen, size), self.slots, self.planes)

    def _padded(self, seen: DraftExtendInput | None, tokens: int) -> DraftExtendInput:
        if seen is None:
            assert self.hidden_TX is not None, "every rank has run a step before KV is deferred"
            none_TX = self.hidden_TX[:0]
            seen = DraftExtendInput(StepPlan(0, 0), empty_batch(self.slots), none_TX)
        missing = tokens - len(seen.batch.ids_T)
        if missing <= 0:
            return seen
        hidden_TX = torch.cat((seen.hidden_TH, seen.hidden_TH.new_zeros(missing, seen.hidden_TH.shape[1])))
        return replace(seen, batch=pad_batch(seen.batch, tokens), hidden_TH=hidden_TX)

    def _leaving(self, plan: StepPlan) -> set[int]:
        """Slots whose deferred KV must be written before this step."""
        behind = self.deferred.behind
        if not behind or not (plan.binds or plan.appends):
            return set()
        stay = {row.slot for row in plan.rows} - {bind.slot for bind in plan.binds}
        if any(bind.computed for bind in plan.binds):
            stay -= self.deferred.filled()
        return behind.keys() - stay

    def _plan(
        self, rows: Sequence[Row], drafts: bool, can_split: bool, gone: set[int], keeps: bool | None = None
    ) -> ExtendPlan:
        """drafts: whether drafts are made after the step. can_split: whether its leading rows may be deferred alone.
        gone: slots whose deferred KV is written before the step. keeps: whether all ranks defer the step; None: one
        rank decides.
        """
        lengths = {slot: len(places) for slot, (places, _) in self.deferred.behind.items() if slot not in gone}
        single = next((i for i, row in enumerate(rows) if row.n > 1), len(rows))
        if keeps is None:
            keeps = single == len(rows) and (not drafts or any(row.slot in lengths for row in rows))
        kept = len(rows) if keeps else single if can_split and not drafts else 0
        tokens, longest = (self.deferred.tokens, self.deferred.longest) if lengths else (0, 0)
        for row in rows[:kept]:
            lengths[row.slot] = lengths.get(row.slot, 0) + 1
            longest = max(longest, lengths[row.slot])
        if is_full(tokens + kept, longest):
            return ExtendPlan(kept, None, sum(lengths.values()), not keeps)
        written = rows[kept:] if not keeps else rows if drafts else ()
        slots = tuple(row.slot for row in written if row.slot in lengths)
        return ExtendPlan(kept, slots, sum(lengths[slot] for slot in slots), not keeps)

    def _run(self, work: Callable[[], T], padding: Callable[[], object] | None = None) -> T | None:
        """Runs a pass of the drafter. padding: the same pass on nothing but padding, for a drafter that has failed."""
        if not self.lost:
            try:
                return work()
            except Exception:  # whatever it raises: decoding goes on without drafts
                log.exception(OFF, "it raised")
                self._switch_off()
        if padding is not None:
            padding()
        return None

    def reject_output(self) -> None:
        """Switches the drafter off: its output was NaN or no token."""
        if not self.lost:
            log.error(OFF, "its hidden states or logits are not numbers, or its drafts no tokens")
            self._switch_off()

    def _switch_off(self) -> None:
        self.lost, self.is_off, self.learns, self.drafter = True, True, False, NO_DRAFTER
        self.deferred.drop()
        self.slots.made.zero_()  # the drafter may have left something half done
