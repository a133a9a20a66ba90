"""How the leaders of data-parallel ranks agree on what all processes run next."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from thalweg.core.agreement import AgreedStep, RankStep, coordinate_step, rank_step_of
from thalweg.core.plan import StepPlan
from thalweg.parallel.step_records import StepExchange

if TYPE_CHECKING:  # needs torch
    from thalweg.engine.worker import Worker


class RankState(NamedTuple):
    """What a rank says besides its plan; see `core.agreement.RankStep`."""

    epoch: int = 0  # of its weights
    control: int = 0  # the control message that it carries out next; 0: none
    has_ended: bool = False  # it drains and has no request left
    prefill_wait: int = 0


class Coordinator(Protocol):
    """Makes the plan of one rank the step of all processes."""

    is_shared: bool  # there are other data-parallel ranks: control messages wait until all of them have theirs

    @property
    def is_busy(self) -> bool:
        """Other ranks have work, so this one takes part in the next step at once."""

    def agree(self, plan: StepPlan, state: RankState) -> AgreedStep | None:
        """The step; None: there is one process, whose own plan decides."""


class OwnPlan:
    """There is one process."""

    is_shared = is_busy = False

    def agree(self, plan: StepPlan, state: RankState) -> None:
        return None


OWN_PLAN = OwnPlan()


class SingleSchedulerSteps:
    """There is one data-parallel rank, of several processes."""

    is_shared = is_busy = False

    def __init__(self, worker: Worker, processes: int) -> None:
        self.worker, self.processes = worker, processes

    def agree(self, plan: StepPlan, state: RankState) -> AgreedStep:
        """Waits for steps in flight only where the drafter keeps KV."""
        drafting = self.worker.runner.drafting
        if drafting.has_draft_kv:
            own = self.worker.rank_step(plan, state.epoch)
        else:
            own = rank_step_of(plan)._replace(epoch=state.epoch, has_drafter=not drafting.has_failed)
        return coordinate_step([own])._replace(ranks=self.processes)


class DataParallelSteps:
    """There are several data-parallel ranks. While none of them has rows, a leader takes part in a round only if it has
    news or another leader waits for it; so idle leaders sleep, and the first to wake wakes the others.
    """

    is_shared = True

    def __init__(self, worker: Worker, exchange: StepExchange, processes: int) -> None:
        self.worker, self.exchange, self.processes = worker, exchange, processes
        self._had_rows = False  # the last agreed step

    @property
    def is_busy(self) -> bool:
        """Also if another rank waits already: it may have woken this one before the last step was agreed."""
        return self._had_rows or self.exchange.is_called

    def agree(self, plan: StepPlan, state: RankState) -> AgreedStep:
        if not (plan.rows or self.is_busy or state.control or state.has_ended):
            return coordinate_step([RankStep(plan.step)])
        own = self.worker.rank_step(plan, state.epoch)
        own = own._replace(control=state.control, has_ended=state.has_ended, prefill_wait=state.prefill_wait)
        agreed = coordinate_step(self.exchange.exchange(own))
        self._had_rows = agreed.rows > 0
        return agreed._replace(ranks=self.processes)
