"""The hands of a rank: runs A and B of each step in order on its stream, and keeps their outputs until the loop
asks.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Generic, Mapping, Protocol, Sequence, TypeVar

from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import GrammarState, Output, Shape, StepPlan
from thalweg.runner.runner import ForwardResult, StepResult

T = TypeVar("T")
R = TypeVar("R", covariant=True)


class Pending(Protocol[R]):
    """Work that was given to a stream."""

    def result(self) -> R:
        """What it returned, once it has; raises what it raised."""


class Stream(Protocol):
    """Runs what it is given, in order."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Enqueues."""


class Halves(Protocol):
    """A and B of a step: a `Runner`'s."""

    def forward(self, plan: StepPlan) -> ForwardResult | None: ...

    def sample(
        self, forwarded: ForwardResult | None, masks: GrammarMasks | None = None, width: int = 0
    ) -> StepResult | None: ...

    def outputs(self, published: StepResult | None) -> tuple[Output, ...]: ...


class Masker(Protocol):
    """Makes the masks of a plan's rows that are under a grammar."""

    def fill(self, plan: StepPlan, states: Mapping[int, GrammarState]) -> GrammarMasks | None:
        """On the caller's thread, while A runs: what the masks need is committed. None where no row has one."""


class Finished(Generic[T]):
    """Pending work that is not."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def result(self) -> T:
        return self.value


class InlineStream:
    """Depth 1 on a CPU: work is done when it is submitted."""

    def submit(self, work: Callable[[], T]) -> Finished[T]:
        return Finished(work())


class ThreadStream:
    """The CPU's stand-in for a device stream: one thread, so the host plans the next step meanwhile."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self.pool.submit(work)


def stream_for(depth: int) -> Stream:
    """The CPU's stream for a loop of this depth."""
    return InlineStream() if depth == 1 else ThreadStream()


class CpuWorker:
    """Drives one runner. `forward` and `sample` return at once (depth 2 and more); `output` waits. masker: makes the
    masks of a step.
    """

    def __init__(self, runner: Halves, stream: Stream, masker: Masker) -> None:
        self.runner, self.stream, self.masker = runner, stream, masker
        self.forwarded: dict[int, Pending[ForwardResult | None]] = {}
        self.outputs: dict[int, Pending[tuple[Output, ...]]] = {}

    def forward(self, plan: StepPlan, shape: Shape) -> None:
        self.forwarded[plan.step] = self.stream.submit(lambda: self.runner.forward(plan))

    def sample(self, plan: StepPlan, masks: Mapping[int, GrammarState], width: int) -> None:
        forwarded, made = self.forwarded.pop(plan.step), self.masker.fill(plan, masks)
        runner = self.runner
        self.outputs[plan.step] = self.stream.submit(
            lambda: runner.outputs(runner.sample(forwarded.result(), made, width))
        )

    def output(self, plan: StepPlan) -> Sequence[Output]:
        return self.outputs.pop(plan.step).result()
