"""The worker of a rank: runs both parts of each step, forward and sample, in order on the device's stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Mapping, Sequence, TypeVar

from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import GrammarState, Output, StepPlan
from thalweg.engine.grammars import GrammarRegistry
from thalweg.runner.runner import ForwardResult, Runner
from thalweg.sampling.sample import Sampled
from thalweg.spec.drafter import DraftOutput

T = TypeVar("T")
Sample = Callable[[], Sampled | None]
Draft = Callable[[Sampled | None], DraftOutput | None]
Sampling = tuple[Sample, Callable[[], DraftOutput | None]]  # wait for the tokens and for the drafts, on the host


class InlineStream:
    """The stream of a CPU at depth 1: runs work when it is submitted, and drafts when they are read."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Streams run work in order. The returned function waits for its result, and raises what the work raised."""
        value = work()
        return lambda: value

    def submit_sampling(self, sample: Sample, draft: Draft) -> Sampling:
        """Submits the sampling half of a step. The tokens do not wait for the drafts."""
        sampled = sample()
        return lambda: sampled, lambda: draft(sampled)


class ThreadStream(InlineStream):
    """The stream of a CPU at depth 2: one thread, so that the host plans the next step meanwhile."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        return self.pool.submit(work).result

    def submit_sampling(self, sample: Sample, draft: Draft) -> Sampling:
        sampled = self.submit(sample)
        return sampled, self.submit(lambda: draft(sampled()))


class Worker:
    """Runs the steps of one runner. `forward` and `sample` return at once, `output` and `add_drafts` wait."""

    def __init__(self, runner: Runner, stream: InlineStream, grammars: GrammarRegistry) -> None:
        self.runner, self.stream, self.grammars = runner, stream, grammars
        self._forwarded: dict[int, Callable[[], ForwardResult | None]] = {}  # by step
        self._sampled: dict[int, Sampling] = {}

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        """agreed: the step of all DP ranks; None: there is one rank."""
        runner = self.runner
        self._forwarded[plan.step] = self.stream.submit(lambda: runner.forward(plan, agreed))

    def sample(self, plan: StepPlan, states: Mapping[int, GrammarState], num_drafts: int) -> None:
        """Samples a forwarded step and proposes `num_drafts` drafts for each sampled row. states: see
        `Scheduler.grammar_states`; their masks are built while the device computes the forward.
        """
        forwarded, runner = self._forwarded[plan.step], self.runner
        masks = self.grammars.fill(plan, states) if states else None
        self._sampled[plan.step] = self.stream.submit_sampling(
            lambda: runner.sample(forwarded(), masks), lambda sampled: runner.draft(forwarded(), sampled, num_drafts)
        )

    def output(self, plan: StepPlan) -> Sequence[Output]:
        """One Output for each row of a launched step, still without drafts. Waits for the tokens."""
        return self.runner.outputs(self._forwarded.pop(plan.step)(), self._sampled[plan.step][0]())

    def add_drafts(self, plan: StepPlan, outputs: Sequence[Output]) -> Sequence[Output]:
        """The outputs of a step with the drafts that it proposed. Waits for them."""
        return self.runner.add_drafts(plan, outputs, self._sampled.pop(plan.step)[1]())
