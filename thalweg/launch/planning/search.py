"""Which layout serves a load best: the roofline of every layout under it, ranked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from thalweg.config.machines import Hardware
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import PAGE
from thalweg.launch.planning.collectives import collectives
from thalweg.launch.planning.gpu_memory import GpuMemory
from thalweg.launch.planning.layouts import ParallelLayout, layouts
from thalweg.launch.planning.roofline import Ceilings, StepShape, phases, seconds
from thalweg.launch.planning.weights import PlannedModel

MAX_REQUESTS = 1 << 20  # at a time


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be served. Without concurrency and rate: as many requests as targets and memory allow."""

    input: int = 0  # tokens of a prompt; 0: usual ones
    output: int = 0
    concurrency: int = 0  # requests at a time
    rate: float = 0.0  # requests a second
    tpot: float = 0.0  # seconds that a token may take; 0: any
    ttft: float = 0.0  # seconds that a first token may take; 0: any
    skew: float = 0.0  # of the experts' popularity


@dataclass(frozen=True, slots=True)
class PlanningTarget:
    """GPUs, and how they hold this model."""

    hardware: Hardware
    top: Ceilings
    model: PlannedModel
    memory: Callable[[ParallelLayout], GpuMemory]  # of one GPU; raises UnsupportedConfig


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """A layout under a load, at best."""

    layout: ParallelLayout
    room: GpuMemory
    requests: int  # at a time on the whole machine
    tpot: float  # seconds between tokens of a request, with the prompts of others between them
    ttft: float  # seconds of a prompt on an idle machine
    output: float  # tokens a second of the whole machine
    total: float
    holds: int  # tokens of each KV cache
    sent: float  # seconds of a step for communication
    trouble: str  # why it does not serve the load; "" where it does

    @property
    def fits(self) -> bool:
        return self.requests > 0


class ServedLayout:
    """A layout of a model on a machine. Raises UnsupportedConfig where the model cannot be divided so."""

    def __init__(self, target: PlanningTarget, layout: ParallelLayout, load: Workload) -> None:
        self.target, self.layout, self.load = target, layout, load
        self.facts, self.model = target.model.facts, target.model.on(layout)
        self.room = target.memory(layout)

    @cached_property
    def holds(self) -> int:
        """Tokens of each of its KV caches."""
        return self.room.tokens

    @cached_property
    def most(self) -> int:
        """Requests of this load that all caches hold at a time."""
        each = -(-(self.load.input + self.load.output) // PAGE) * PAGE
        return min(self.holds // each * self.layout.caches, MAX_REQUESTS)

    def step(self, requests: int) -> tuple[float, float]:
        """Seconds of a decode step of so many requests on each copy, and those of them for sending. A pipeline has its
        rows in as many cohorts as stages, and its slowest stage counts.
        """
        active = min(requests, self.layout.dp)
        cohort = -(-requests // (self.layout.dp * self.layout.pp))
        context = self.load.input + self.load.output // 2
        return self._times(StepShape(cohort, 1, context, skew=self.load.skew, attentions=active), is_paced=True)

    @cached_property
    def prompt(self) -> float:
        """Seconds of one prompt on an idle machine."""
        return self._times(
            StepShape(1, self.load.input, self.load.input, skew=self.load.skew, attentions=1), is_paced=False
        )[0]

    @cached_property
    def prompts(self) -> float:
        """Seconds that a prompt takes from others of its copy, when all attentions have one."""
        shape = StepShape(1, self.load.input, self.load.input, skew=self.load.skew)
        return self._times(shape, is_paced=False)[0] / (self.layout.dp * self.layout.pp)

    def _times(self, shape: StepShape, is_paced: bool) -> tuple[float, float]:
        """Seconds, and those of them for communication. is_paced: steps follow one another, so that a pipeline's
        slowest stage counts.
        """
        layout, top = self.layout, self.target.top
        parts = phases(self.model, shape)
        computed = seconds(parts, top)
        sent = sum(one.seconds(self.target.hardware) for one in collectives(self.facts, shape, layout))
        if not is_paced or layout.pp == 1:
            return computed + sent, sent
        head = sum(part.seconds(top) for part in parts if part.name == "head")
        slowest = (computed - head) * -(-self.facts.layers // layout.pp) / self.facts.layers
        return max(slowest * layout.pp, computed) + sent, sent

    def tpot(self, requests: int) -> tuple[float, float]:
        """Seconds between two tokens with so many requests on the whole machine, and those of them for sending."""
        layout, load = self.layout, self.load
        a_copy = -(-requests // layout.copies)
        step, sent = self.step(a_copy)
        return step + a_copy * self.prompts / load.output, sent

    def finished(self, requests: int) -> float:
        """Requests a second."""
        return requests / (self.prompt + self.load.output * self.tpot(requests)[0])


def outcomes(
    target: PlanningTarget, load: Workload, gpus: int, only: ParallelLayout | None = None
) -> list[LayoutForecast]:
    """Every layout that uses this many GPUs, the best first; or one alone. Layouts that the layers cannot be divided
    into are left out, but for one that was asked for, which raises UnsupportedConfig.
    """
    if only is not None:
        return [_outcome(ServedLayout(target, only, load))]
    forecasts = []
    for layout in layouts(target.model.facts, gpus):
        try:
            forecasts.append(_outcome(ServedLayout(target, layout, load)))
        except UnsupportedConfig:
            continue
    return sorted(forecasts, key=lambda one: _rank(one, load))


def _rank(one: LayoutForecast, load: Workload) -> tuple[bool, bool, float, float]:
    """What does not fit comes last, before it what misses a target. Of those that keep up with a rate, the one whose
    tokens come fastest is the best, else the one that makes most of them.
    """
    keeps_up = bool(load.rate) and not one.trouble
    return not one.fits, bool(one.trouble), one.tpot if keeps_up else -one.output, one.ttft


def _outcome(served: ServedLayout) -> LayoutForecast:
    load, room = served.load, served.room
    if served.most < 1:
        reason = "weights do not fit" if room.pages < 1 else f"no request of {load.input + load.output:,} tokens fits"
        return LayoutForecast(served.layout, room, 0, 0.0, 0.0, 0.0, 0.0, served.holds, 0.0, reason)
    requests, trouble = _requests(served)
    tpot, sent = served.tpot(requests)
    if not trouble and load.tpot and tpot > load.tpot:
        trouble = f"a token takes {_time(tpot)}"
    if not trouble and load.ttft and served.prompt > load.ttft:
        trouble = f"a first token takes {_time(served.prompt)}"
    output = requests / tpot
    total = output * (load.input + load.output) / load.output
    return LayoutForecast(
        served.layout, room, requests, tpot, served.prompt, output, total, served.holds, sent, trouble
    )


def _time(seconds: float) -> str:
    """With three digits, however short."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 5e-5 else f"{1e6 * seconds:.3g} us"


def _requests(served: ServedLayout) -> tuple[int, str]:
    """How many at a time this load makes, and why a layout cannot have as many."""
    load = served.load
    if load.concurrency:
        if load.concurrency > served.most:
            return served.most, f"memory holds {served.most:,} requests"
        return load.concurrency, ""
    if load.rate:
        if served.finished(served.most) < load.rate:
            return served.most, f"at most {served.finished(served.most):.3g} requests/s"
        return _first(served.most, lambda count: served.finished(count) >= load.rate), ""
    if load.tpot and served.tpot(1)[0] <= load.tpot:
        over = _first(served.most + 1, lambda count: count > served.most or served.tpot(count)[0] > load.tpot)
        return max(over - 1, 1), ""
    return (1, "") if load.tpot else (served.most, "")


def _first(most: int, holds: Callable[[int], bool]) -> int:
    """The least count from 1 to `most` for which this holds, where it holds for all greater ones."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
