"""A drafter in its place behind accept. It only accelerates: whatever it does wrong costs speed, and neither a request
nor a token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Callable, NamedTuple, Protocol, Sequence, TypeVar

from thalweg.batch.inputs import groups_of
from thalweg.batch.slots import Slots
from thalweg.core.errors import is_out_of_memory
from thalweg.core.plan import Bind, StepPlan
from thalweg.memory.planes import Planes
from thalweg.runner.deferred_kv import DeferredKV
from thalweg.spec.drafter import NO_DRAFTER, Drafter, DraftExtendInput, DraftOutput, DraftRequest

log = logging.getLogger("thalweg.engine")

OFF = "the drafter is switched off, and decoding goes on without it: %s"

T = TypeVar("T")


class DrafterError(Exception):
    """The engine can start without its drafter alone; says why."""


@contextmanager
def blamed_on_drafter() -> Iterator[None]:
    """Around what records its steps: whatever is raised in here and is no lack of memory becomes DrafterFails."""
    try:
        yield
    except Exception as error:  # whatever it is: its steps are guarded in the same way
        if is_out_of_memory(error):
            raise
        raise DrafterError(f"steps with it cannot be recorded: {type(error).__name__}: {error}") from error


class CapturedDrafts(Protocol):
    """What a drafter does, recorded."""

    def extend(self, seen: DraftExtendInput) -> bool:
        """Learns from a step; False of one that was not recorded."""

    def propose(self, asked: DraftRequest, width: int) -> DraftOutput | None:
        """As `Drafter.propose`; None for what was not recorded."""


class NoCapturedDrafts:
    """Off is a value."""

    def extend(self, seen: DraftExtendInput) -> bool:
        return False

    def propose(self, asked: DraftRequest, width: int) -> None:
        return


NO_CAPTURED_DRAFTS = NoCapturedDrafts()


class Either(NamedTuple):
    """Recordings of several kinds, each of which knows its own."""

    kinds: tuple[CapturedDrafts, ...]

    def extend(self, seen: DraftExtendInput) -> bool:
        return any(kind.extend(seen) for kind in self.kinds)

    def propose(self, asked: DraftRequest, width: int) -> DraftOutput | None:
        proposed = (kind.propose(asked, width) for kind in self.kinds)
        return next((one for one in proposed if one is not None), None)


class Drafting:
    """One that fails is switched off for good. lost: whether that has happened."""

    def __init__(self, drafter: Drafter, slots: Slots, planes: Planes) -> None:
        self.drafter, self.slots, self.planes = drafter, slots, planes
        recorded = planes.device.type == "cuda"  # a step's tensors may be the next one's, too
        self.deferred = DeferredKV(slots, passing=recorded)
        self.learns = bool(drafter.planes())  # one that keeps nothing has nothing to learn
        self.lost = False

    def forget(self) -> None:
        """What was seen was nobody's: steps of an engine's start."""
        self.deferred.drop()

    def leave(self, plan: StepPlan) -> None:
        """Slots and pages may change hands in this step: of those who have left nothing may be late, nor in pages that
        a prompt may have found.
        """
        if self.deferred.behind and (plan.binds or plan.appends):
            stay = {row.slot for row in plan.rows} - {bind.slot for bind in plan.binds}
            if any(bind.computed for bind in plan.binds):
                stay -= self.deferred.filled()
            self._trying(lambda: self._catch_up(self.deferred.behind.keys() - stay))

    def catch_up(self) -> None:
        """With all that is late."""
        self._trying(lambda: self._catch_up(None))

    def bind(self, binds: Sequence[Bind]) -> None:
        self._trying(lambda: self.drafter.bind(binds, self.slots, self.planes))

    def draft(
        self,
        seen: DraftExtendInput | None,
        asked: DraftRequest | None,
        width: int,
        recorded: CapturedDrafts = NO_CAPTURED_DRAFTS,
    ) -> DraftOutput | None:
        """Learns from a step, and proposes for its emitting rows. seen: None for a step that nothing can be learned
        from. Where nothing is drafted, single tokens are looked at later, of many steps at once.
        """
        if seen is not None and self.learns:
            self._trying(lambda: self._learn(seen, width, recorded))
        if asked is None:
            return None
        return self._trying(lambda: self._propose(asked, width, NO_CAPTURED_DRAFTS if self.lost else recorded))

    def _propose(self, asked: DraftRequest, width: int, recorded: CapturedDrafts) -> DraftOutput | None:
        return recorded.propose(asked, width) or self.drafter.propose(asked, width, self.slots, self.planes)

    def _learn(self, seen: DraftExtendInput, width: int, recorded: CapturedDrafts) -> None:
        rows, deferred = seen.plan.rows, self.deferred
        single = next((i for i, row in enumerate(rows) if row.n > 1), len(rows))
        if single == len(rows) and (not width or any(row.slot in deferred.behind for row in rows)):
            deferred.keep(seen, single)
            if width or deferred.full:
                self._catch_up(None if deferred.full else [row.slot for row in rows])
            return
        if single and not width and len(seen.batch.table_RP) == len(rows):  # a recorded one has a row for each token
            deferred.keep(seen, single)
            seen = _from(seen, single)
        self._catch_up(None if deferred.full else [row.slot for row in seen.plan.rows])
        if not recorded.extend(seen):
            self.drafter.extend(seen, self.slots, self.planes)

    def _catch_up(self, slots: Iterable[int] | None) -> None:
        """Of these slots, or of all."""
        seen = self.deferred.joined(slots)
        if seen is not None:
            self.drafter.extend(seen, self.slots, self.planes)

    def _trying(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception:  # whatever it raises, its drafts can be done without
            log.exception(OFF, "it raised")
            self._off()
            return None

    def rubbish(self) -> None:
        """What it computed turned out not to be numbers, or not to be tokens."""
        if not self.lost:
            log.error(OFF, "its hidden states or logits are not numbers, or its drafts no tokens")
            self._off()

    def _off(self) -> None:
        self.lost, self.drafter = True, NO_DRAFTER
        self.learns = False
        self.deferred.drop()
        self.slots.made.zero_()  # it may have left something half done


def _from(seen: DraftExtendInput, first: int) -> DraftExtendInput:
    """The step without its first rows, so many, of a token each."""
    plan, batch = replace(seen.plan, rows=seen.plan.rows[first:]), seen.batch
    rest = replace(
        batch,
        ids_T=batch.ids_T[first:],
        positions_T=batch.positions_T[first:],
        write_T=batch.write_T[first:],
        table_RP=batch.table_RP[first:],
        real_T=batch.real_T[first:],
        groups=groups_of(plan.rows),
        extents=batch.extents[first:],
    )
    return DraftExtendInput(plan, rest, seen.hidden_TH[first:])
