"""A drafter in its place behind accept. It only accelerates: whatever it does wrong costs speed, and neither a request nor a token."""

from __future__ import annotations

import logging
from typing import Callable, Sequence, TypeVar

from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind
from thalweg.memory.planes import Planes
from thalweg.spec.drafter import NO_DRAFTER, Asked, Drafter, Proposed, Seen

log = logging.getLogger("thalweg.engine")

OFF = "the drafter is switched off, and decoding goes on without it: %s"

T = TypeVar("T")


class Drafting:
    """One that fails is switched off for good. lost: whether that has happened."""

    def __init__(self, drafter: Drafter, slots: Slots, planes: Planes) -> None:
        self.drafter, self.slots, self.planes = drafter, slots, planes
        self.lost = False

    def bind(self, binds: Sequence[Bind]) -> None:
        self._trying(lambda: self.drafter.bind(binds, self.slots, self.planes))

    def draft(self, seen: Seen | None, asked: Asked | None, width: int) -> Proposed | None:
        """Learns from a step, and proposes for its emitting rows. seen: None for a step that nothing can be learned from. Where nothing is drafted,
        decoding is not looked at: it costs what it would without a drafter, which misses some of what it knows of these sequences later."""
        if seen is not None and (width or not seen.plan.verifies):
            self._trying(lambda: self.drafter.observe(seen, self.slots, self.planes))
        if asked is None:
            return None
        return self._trying(lambda: self.drafter.propose(asked, width, self.slots, self.planes))

    def _trying(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception:  # whatever it raises, its drafts can be done without
            log.exception(OFF, "it raised")
            self._off()
            return None

    def rubbish(self) -> None:
        """What it computed turned out not to be numbers."""
        if not self.lost:
            log.error(OFF, "its hidden states are not numbers")
            self._off()

    def _off(self) -> None:
        self.lost, self.drafter = True, NO_DRAFTER
        self.slots.made.zero_()  # it may have left something half done
