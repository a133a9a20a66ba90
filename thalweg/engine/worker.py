"""The worker of a rank: runs both parts of each step, forward and sample, in order on the device's stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Mapping, Protocol, Sequence, TypeVar

from thalweg.core.agreement import AgreedStep, RankStep
from thalweg.core.grammar import GrammarMasks
from thalweg.core.messages import Control
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
    """The stream of a CPU with one step on its way: runs work when it is submitted, and drafts when they are read."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Streams run work in order. The returned function waits for its result, and raises what the work raised."""
        value = work()
        return lambda: value

    def submit_sampling(self, sample: Sample, draft: Draft) -> Sampling:
        """Submits the sampling half of a step. The tokens do not wait for the drafts."""
        sampled = sample()
        return lambda: sampled, lambda: draft(sampled)


class ThreadStream(InlineStream):
    """The stream of a CPU with several steps on their way: one thread, so that the host plans the next step
    meanwhile.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        return self.pool.submit(work).result

    def submit_sampling(self, sample: Sample, draft: Draft) -> Sampling:
        sampled = self.submit(sample)
        return sampled, self.submit(lambda: draft(sampled()))


class Followers(Protocol):
    """The other processes of a data-parallel rank, as its leader calls them."""

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        """They run the first half of this step, too."""

    def sample(self, num_drafts: int, masks: GrammarMasks | None) -> None:
        """They run the second half of the last step, too."""

    def control(self, message: Control) -> None:
        """They carry it out, too, before the next step."""

    def stop(self) -> None:
        """Nothing follows."""


class NoFollowers:
    """The rank has one process."""

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        return

    def sample(self, num_drafts: int, masks: GrammarMasks | None) -> None:
        return

    def control(self, message: Control) -> None:
        return

    def stop(self) -> None:
        return


NO_FOLLOWERS = NoFollowers()


class Worker:
    """Runs the steps of one runner. `forward` and `sample` return at once, `output` and `add_drafts` wait."""

    def __init__(
        self,
        runner: Runner,
        stream: InlineStream,
        grammars: GrammarRegistry | None = None,
        followers: Followers = NO_FOLLOWERS,
    ) -> None:
        """grammars: None in a follower, which is sent masks."""
        self.runner, self.stream, self.grammars, self.followers = runner, stream, grammars, followers
        self._forwarded: dict[int, Callable[[], ForwardResult | None]] = {}  # by step
        self._sampled: dict[int, Sampling] = {}

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        """agreed: the step of all processes; None: there is one."""
        runner = self.runner
        self.followers.forward(plan, agreed)
        self._forwarded[plan.step] = self.stream.submit(lambda: runner.forward(plan, agreed))

    def sample(self, plan: StepPlan, states: Mapping[int, GrammarState], num_drafts: int) -> None:
        """Samples a forwarded step and proposes `num_drafts` drafts for each sampled row. states: see
        `Scheduler.grammar_states`; their masks are built while the device computes the forward.
        """
        masks = self.grammars.fill(plan, states) if states and self.grammars else None
        self.followers.sample(num_drafts, masks)
        self.sample_masked(plan, masks, num_drafts)

    def sample_masked(self, plan: StepPlan, masks: GrammarMasks | None, num_drafts: int) -> None:
        """As `sample`, with masks that have been built."""
        forwarded, runner = self._forwarded[plan.step], self.runner
        self._sampled[plan.step] = self.stream.submit_sampling(
            lambda: runner.sample(forwarded(), masks), lambda sampled: runner.draft(forwarded(), sampled, num_drafts)
        )

    def output(self, plan: StepPlan) -> Sequence[Output]:
        """One Output for each row of a launched step, still without drafts. Waits for the tokens."""
        return self.runner.outputs(self._forwarded.pop(plan.step)(), self._sampled[plan.step][0]())

    def add_drafts(self, plan: StepPlan, outputs: Sequence[Output]) -> Sequence[Output]:
        """The outputs of a step with the drafts that it proposed. Waits for them."""
        return self.runner.add_drafts(plan, outputs, self._sampled.pop(plan.step)[1]())

    def finish(self, plan: StepPlan) -> None:
        """Waits for a step whose outputs nobody reads."""
        del self._forwarded[plan.step]
        sampled, drafted = self._sampled.pop(plan.step)
        sampled()
        drafted()
        self.runner.raise_if_lost()

    def rank_step(self, plan: StepPlan, epoch: int) -> RankStep:
        """The sizes of this plan, for other data-parallel ranks. Waits for steps in flight, whose drafts count."""
        runner = self.runner
        return self.stream.submit(lambda: runner.rank_step(plan, epoch))()
