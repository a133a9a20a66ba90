"""A load on layouts of a machine: the least times of each, what they probably are, and the layouts ranked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from thalweg.config.machines import A_NODE, Hardware
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.kernels import unsupported_layout
from thalweg.launch.parallelism import unshared_indexer, whole_contexts
from thalweg.launch.planning.collectives import Collective, collectives
from thalweg.launch.planning.estimate import estimated
from thalweg.launch.planning.gpu_memory import GpuMemory
from thalweg.launch.planning.layouts import ParallelLayout, layouts
from thalweg.launch.planning.roofline import Ceilings, StepPhase, StepShape, by_name, divided, expected, phases
from thalweg.launch.planning.weights import PlannedModel
from thalweg.models.stages import stage_borders

MAX_REQUESTS = 1 << 20  # at a time
SENDING = "sending"


@dataclass(frozen=True, slots=True)
class Workload:
    """The load to serve. Without concurrency and rate: as many requests as targets and memory allow."""

    input: int = 0  # tokens of a prompt; 0: usual ones
    output: int = 0
    concurrency: int = 0  # requests at a time
    rate: float = 0.0  # requests a second
    tpot: float = 0.0  # seconds that a token may take; 0: any
    ttft: float = 0.0  # seconds that a first token may take; 0: any
    skew: float = 0.0  # of the experts' popularity


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """A machine, and how it holds a model."""

    hardware: Hardware | None  # None on a CPU, and for GPUs without figures
    top: Ceilings | None  # None for GPUs without figures
    model: PlannedModel
    memory: Callable[[ParallelLayout], GpuMemory] | None = None  # of one GPU; raises UnsupportedConfig; None on a CPU


@dataclass(frozen=True, slots=True)
class StepBound:
    """Lower bound of a step's time."""

    batch: int  # requests on the whole machine
    new: int  # tokens that each computes
    context: int
    experts: float  # distinct ones that a layer reads
    phases: dict[str, float]  # seconds by kind
    seconds: float
    rate: float  # tokens a second of the machine
    estimate: float  # seconds that it probably takes; 0.0 for GPUs without figures and on a CPU


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """A layout under a load, at best, and estimated."""

    layout: ParallelLayout
    room: GpuMemory
    trouble: str = ""  # why it does not serve the load; "" where it does
    requests: int = 0  # at a time on the whole machine
    tpot: float = 0.0  # seconds between tokens of a request, with the prompts of others between them
    ttft: float = 0.0  # seconds of a prompt on an idle machine
    output_throughput: float = 0.0  # tokens a second of the whole machine
    total_throughput: float = 0.0  # with those of prompts
    sending: float = 0.0  # seconds of a step for communication
    # with the same requests, see `estimate`
    tpot_estimate: float = 0.0
    ttft_estimate: float = 0.0
    output_estimate: float = 0.0

    @property
    def fits(self) -> bool:
        return self.requests > 0


class PlannedLayout:
    """Step times on a layout: lower bounds, or estimates. Raises UnsupportedConfig where it cannot divide the model."""

    def __init__(
        self, planning: PlanningInput, layout: ParallelLayout, load: Workload, is_estimated: bool = False
    ) -> None:
        self.planning, self.layout, self.load, self.is_estimated = planning, layout, load, is_estimated
        self.facts, self.model = planning.model.facts, planning.model.on(layout)
        kernels, named = planning.model.kernels, planning.model.named
        reason = unsupported_layout(kernels, named, self.facts, layout.attention, layout.cp, layout.dcp)
        if layout.dcp > 1:
            reason = reason or whole_contexts(kernels, self.facts)
        if layout.shard_indexer:
            groups = layout.dp * layout.cp
            reason = reason or unshared_indexer(self.facts, layout.attention, groups, layout.dcp)
        if reason:
            raise UnsupportedConfig(reason)
        stage_borders(self.facts, layout.pp)

    def shape(self, requests: int, new: int, context: int, cohorts: int = 1) -> StepShape:
        """See `divided`."""
        return divided(self.layout, requests, new, context, cohorts, skew=self.load.skew)

    def times(self, work: list[StepPhase], sends: list[Collective]) -> dict[str, float]:
        """Seconds by kind of work."""
        assert self.planning.top is not None, "the rates are known"
        times = by_name(work, self.planning.top)
        if self.planning.hardware is not None and sends:
            times[SENDING] = sum(one.seconds(self.planning.hardware) for one in sends)
        return times

    def step(self, shape: StepShape) -> dict[str, float]:
        """Seconds by kind of work of a step of each attention."""
        if self.is_estimated:
            assert self.planning.top is not None and self.planning.hardware is not None
            return estimated(self.model, shape, self.planning.top, self.planning.hardware)
        return self.times(phases(self.model, shape), collectives(self.facts, shape, self.layout))

    @cached_property
    def likely(self) -> PlannedLayout:
        """The same, estimated."""
        return PlannedLayout(self.planning, self.layout, self.load, is_estimated=True)

    def step_bound(self, requests: int, new: int, context: int) -> StepBound:
        shape = self.shape(requests, new, context)
        times, moe = self.step(shape), self.facts.moe
        seconds = sum(times.values())
        experts = 0.0 if moe is None else expected(moe, shape.tokens * shape.attentions, self.load.skew)
        likely = 0.0 if self.planning.hardware is None else sum(self.likely.step(shape).values())
        return StepBound(requests, new, context, experts, times, seconds, requests * new / seconds, likely)

    @cached_property
    def room(self) -> GpuMemory:
        assert self.planning.memory is not None, "layouts are of GPUs"
        return self.planning.memory(self.layout)

    @cached_property
    def most(self) -> int:
        """Requests of this load that all caches hold at a time."""
        each = -(-(self.load.input + self.load.output) // self.room.page_size) * self.room.page_size
        return min(self.room.tokens // each * self.layout.caches, MAX_REQUESTS)

    @cached_property
    def ttft(self) -> float:
        """Seconds of one prompt on an idle machine."""
        return sum(self.step(self.shape(1, self.load.input, self.load.input)).values())

    @cached_property
    def prompts(self) -> float:
        """Seconds that a prompt takes from others of its copy, when all attentions have one."""
        attentions, load = self.layout.dp, self.load
        shape = self.shape(attentions * self.layout.copies, load.input, load.input)
        return sum(self.step(shape).values()) / (attentions * self.layout.pp)

    def tpot(self, requests: int) -> tuple[float, float]:
        """Seconds between two tokens with so many requests on the whole machine, and those of them for sending. A
        pipeline has its rows in as many cohorts as stages, and its slowest stage counts.
        """
        layout, load = self.layout, self.load
        times = self.step(self.shape(requests, 1, load.input + load.output // 2, layout.pp))
        sent = times.pop(SENDING, 0.0)
        step = sum(times.values())
        slowest = (step - times["head"]) * -(-self.facts.layers // layout.pp) / self.facts.layers
        step = max(slowest * layout.pp, step) + sent
        return step + -(-requests // layout.copies) * self.prompts / load.output, sent

    def finished(self, requests: int) -> float:
        """Requests a second."""
        return requests / (self.ttft + self.load.output * self.tpot(requests)[0])

    def forecast(self) -> LayoutForecast:
        load, tokens = self.load, self.load.input + self.load.output
        if self.most < 1:
            reason = "weights do not fit" if self.room.pages < 1 else f"no request of {tokens:,} tokens fits"
            return LayoutForecast(self.layout, self.room, reason)
        requests, trouble = self._requests()
        tpot, sent = self.tpot(requests)
        for name, seconds, target in (("a token", tpot, load.tpot), ("a first token", self.ttft, load.ttft)):
            if not trouble and target and seconds > target:
                trouble = f"{name} takes {1e3 * seconds:,.3g} ms"
        output = requests / tpot
        total = output * tokens / load.output
        likely = self.likely.tpot(requests)[0]
        estimates = likely, self.likely.ttft, requests / likely
        return LayoutForecast(
            self.layout, self.room, trouble, requests, tpot, self.ttft, output, total, sent, *estimates
        )

    def _requests(self) -> tuple[int, str]:
        """Concurrent requests of this load, and why the layout cannot have as many."""
        load, most = self.load, self.most
        if load.concurrency > most:
            return most, f"memory holds {most:,} requests"
        if load.concurrency:
            return load.concurrency, ""
        if load.rate:
            if self.finished(most) < load.rate:
                return most, f"at most {self.finished(most):.3g} requests/s"
            return _first(most, lambda count: self.finished(count) >= load.rate), ""
        if load.tpot:
            return max(_first(most + 1, lambda count: count > most or self.tpot(count)[0] > load.tpot) - 1, 1), ""
        return most, ""


def outcomes(
    planning: PlanningInput, load: Workload, gpus: int, only: ParallelLayout | None = None
) -> list[LayoutForecast]:
    """Every layout that uses this many GPUs, the best first; or one alone. Layouts that the layers cannot be divided
    into are left out. `only` one raises UnsupportedConfig instead.
    """
    if only is not None:
        return [PlannedLayout(planning, only, load).forecast()]
    forecasts = []
    node = A_NODE if planning.hardware is None else planning.hardware.gpus_of_node
    for layout in layouts(planning.model.facts, gpus, node):
        try:
            forecasts.append(PlannedLayout(planning, layout, load).forecast())
        except UnsupportedConfig:
            continue
    return sorted(forecasts, key=lambda one: _rank(one, load))


def _rank(one: LayoutForecast, load: Workload) -> tuple[bool, bool, float, float]:
    """Sort key of layouts, best first. Those that do not fit come last, those that miss a target before them. With a
    request rate the lowest TPOT wins, else the highest throughput.
    """
    keeps_up = bool(load.rate) and not one.trouble
    return not one.fits, bool(one.trouble), one.tpot if keeps_up else -one.output_throughput, one.ttft


def _first(most: int, holds: Callable[[int], bool]) -> int:
    """The least count from 1 to `most` for which this holds, where it holds for all greater ones."""
    return 1 + bisect_left(range(1, most), True, key=holds)
