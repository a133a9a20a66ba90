"""The worker of a rank: runs both parts of each step, forward and sample, in order on the device's stream."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Generic, Mapping, Protocol, Sequence, TypeVar

from thalweg.core.agreement import AgreedStep
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import GrammarState, Output, StepPlan
from thalweg.runner.runner import ForwardResult, StepResult

T = TypeVar("T")
R = TypeVar("R", covariant=True)
Sample = Callable[[], StepResult | None]
Read = Callable[[StepResult | None], tuple[Output, ...]]


class StepRunner(Protocol):
    """A `Runner`, or a wrapper that profiles it."""

    def forward(self, plan: StepPlan, agreed: AgreedStep | None = None) -> ForwardResult | None: ...

    def sample(
        self, forwarded: ForwardResult | None, masks: GrammarMasks | None = None, width: int = 0
    ) -> StepResult | None: ...

    def outputs(self, published: StepResult | None) -> tuple[Output, ...]: ...


class MaskBuilder(Protocol):
    """Builds the grammar masks of a step."""

    def fill(self, plan: StepPlan, states: Mapping[int, GrammarState]) -> GrammarMasks | None:
        """Runs on the caller's thread, while the device computes the step's forward."""


class Pending(Protocol[R]):
    """Result of work that was submitted to a stream."""

    def result(self) -> R:
        """Waits. Raises what the work raised."""


class DeviceStream(Protocol):
    """Runs work in order."""

    def submit(self, work: Callable[[], T]) -> Pending[T]: ...

    def publish(self, work: Sample, read: Read) -> Pending[tuple[Output, ...]]:
        """Submits the sampling of a step; `read` turns its result on the device into outputs."""


class _Done(Generic[T]):
    """Work that was run when it was submitted."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def result(self) -> T:
        return self.value


class InlineStream:
    """The stream of a CPU at depth 1: runs work at once."""

    def submit(self, work: Callable[[], T]) -> _Done[T]:
        return _Done(work())

    def publish(self, work: Sample, read: Read) -> Pending[tuple[Output, ...]]:
        return _Done(read(work()))


class ThreadStream:
    """The stream of a CPU at depth 2: one thread, so that the host plans the next step meanwhile."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self.pool.submit(work)

    def publish(self, work: Sample, read: Read) -> Pending[tuple[Output, ...]]:
        return self.pool.submit(lambda: read(work()))


class Worker:
    """Runs the steps of one runner. `forward` and `sample` return at once, `output` waits."""

    def __init__(self, runner: StepRunner, stream: DeviceStream, masks: MaskBuilder) -> None:
        self.runner, self.stream, self.masks = runner, stream, masks
        self._forwarded: dict[int, Pending[ForwardResult | None]] = {}  # by step
        self._outputs: dict[int, Pending[tuple[Output, ...]]] = {}

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        self._forwarded[plan.step] = self.stream.submit(lambda: self.runner.forward(plan, agreed))

    def sample(self, plan: StepPlan, states: Mapping[int, GrammarState], num_drafts: int) -> None:
        forwarded, runner = self._forwarded.pop(plan.step), self.runner
        masks = self.masks.fill(plan, states) if states else None
        self._outputs[plan.step] = self.stream.publish(
            lambda: runner.sample(forwarded.result(), masks, num_drafts), runner.outputs
        )

    def output(self, plan: StepPlan) -> Sequence[Output]:
        return self._outputs.pop(plan.step).result()
