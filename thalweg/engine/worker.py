"""The worker of a rank: runs both parts of each step, forward and sample, in order on the device's stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Mapping, Sequence, TypeVar

from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import GrammarState, Output, StepPlan
from thalweg.engine.grammars import GrammarRegistry
from thalweg.runner.runner import ForwardResult, Runner, StepResult

T = TypeVar("T")
Sample = Callable[[], StepResult | None]
Read = Callable[[StepResult | None], tuple[Output, ...]]


class InlineStream:
    """The stream of a CPU at depth 1: runs work when it is submitted."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Streams run work in order. The returned function waits for its result, and raises what the work raised."""
        value = work()
        return lambda: value

    def submit_sampling(self, work: Sample, read: Read) -> Callable[[], tuple[Output, ...]]:
        """Submits the sampling half of a step; `read` makes outputs of its result."""
        return self.submit(lambda: read(work()))


class ThreadStream(InlineStream):
    """The stream of a CPU at depth 2: one thread, so that the host plans the next step meanwhile."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        return self.pool.submit(work).result


class Worker:
    """Runs the steps of one runner. `forward` and `sample` return at once, `output` waits."""

    def __init__(self, runner: Runner, stream: InlineStream, grammars: GrammarRegistry) -> None:
        self.runner, self.stream, self.grammars = runner, stream, grammars
        self._forwarded: dict[int, Callable[[], ForwardResult | None]] = {}  # by step
        self._outputs: dict[int, Callable[[], tuple[Output, ...]]] = {}

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        """agreed: the step of all DP ranks; None: there is one rank."""
        runner = self.runner
        self._forwarded[plan.step] = self.stream.submit(lambda: runner.forward(plan, agreed))

    def sample(self, plan: StepPlan, states: Mapping[int, GrammarState], num_drafts: int) -> None:
        """Samples a forwarded step and proposes `num_drafts` drafts for each sampled row. states: see
        `Scheduler.grammar_states`; their masks are built while the device computes the forward.
        """
        forwarded, runner = self._forwarded.pop(plan.step), self.runner
        masks = self.grammars.fill(plan, states) if states else None
        self._outputs[plan.step] = self.stream.submit_sampling(
            lambda: runner.sample(forwarded(), masks, num_drafts), runner.outputs
        )

    def output(self, plan: StepPlan) -> Sequence[Output]:
        """One Output for each row of a launched step. Waits for the device."""
        return self._outputs.pop(plan.step)()
