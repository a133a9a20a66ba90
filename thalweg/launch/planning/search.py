"""Which layout serves a load best: the floors of every layout under it, ranked. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from thalweg.config.machines import Hardware
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.launch.planning.collectives import collectives
from thalweg.launch.planning.gpu_memory import GpuMemory
from thalweg.launch.planning.layouts import ParallelLayout, layouts
from thalweg.launch.planning.roofline import Ceilings, KVBytes, StepShape, phases, seconds
from thalweg.launch.planning.weights import NumberBytes

MOST = 1 << 20  # requests at a time that are looked at


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be served: requests of so many tokens in and out, 0 for usual ones. concurrency: at a time; rate: a
    second; with neither, as many as the targets and the memory allow. tpot, ttft: seconds that a token and a first
    token may take, 0 for any.
    """

    input: int = 0
    output: int = 0
    concurrency: int = 0
    rate: float = 0.0
    tpot: float = 0.0
    ttft: float = 0.0
    skew: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanningTarget:
    """Where: what its GPUs do at best, and how they hold this model. room: of a GPU of a layout."""

    hardware: Hardware
    top: Ceilings
    widths: NumberBytes
    kept: KVBytes
    room: Callable[[ParallelLayout], GpuMemory]


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """A layout under a load, at best. requests: at a time on the whole machine. tpot: seconds between tokens of a
    request, with the prompts of others between them; ttft: of a prompt on an idle machine. output, total: tokens/s of
    the whole machine. holds: tokens that each KV cache holds. trouble: why it does not do, "" where it does.
    """

    layout: ParallelLayout
    room: GpuMemory
    requests: int
    tpot: float
    ttft: float
    output: float
    total: float
    holds: int
    sent: float
    trouble: str

    @property
    def fits(self) -> bool:
        return self.requests > 0


class Served:
    """A layout of a model on a machine."""

    def __init__(self, facts: ModelFacts, site: PlanningTarget, layout: ParallelLayout, load: Workload) -> None:
        self.facts, self.site, self.layout, self.load = facts, site, layout, load
        self.room = site.room(layout)

    @cached_property
    def holds(self) -> int:
        """Tokens of each of its KV caches."""
        return self.room.tokens

    @cached_property
    def most(self) -> int:
        """Requests of this load that all caches hold at a time."""
        each = -(-(self.load.input + self.load.output) // PAGE) * PAGE
        return min(self.holds // each * self.layout.caches, MOST)

    def step(self, requests: int) -> tuple[float, float]:
        """Seconds of a decode step of so many requests on each copy, and those of them for sending. A pipeline has its
        rows in as many cohorts as stages, and its slowest stage counts.
        """
        active = min(requests, self.layout.dp)
        cohort = -(-requests // (self.layout.dp * self.layout.pp))
        context = self.load.input + self.load.output // 2
        return self._all(StepShape(cohort, 1, context, skew=self.load.skew, attentions=active), paced=True)

    @cached_property
    def prompt(self) -> float:
        """Seconds of one prompt on an idle machine."""
        return self._all(
            StepShape(1, self.load.input, self.load.input, skew=self.load.skew, attentions=1), paced=False
        )[0]

    @cached_property
    def prompts(self) -> float:
        """Seconds that a prompt takes from others of its copy, when all attentions have one."""
        shape = StepShape(1, self.load.input, self.load.input, skew=self.load.skew)
        return self._all(shape, paced=False)[0] / (self.layout.dp * self.layout.pp)

    def _all(self, shape: StepShape, paced: bool) -> tuple[float, float]:
        facts, layout = self.facts, self.layout
        parts = phases(facts, shape, layout, self.site.widths, self.site.kept)
        computed = seconds(parts, self.site.top)
        sent = sum(one.seconds(self.site.hardware) for one in collectives(facts, shape, layout))
        if not paced or layout.pp == 1:
            return computed + sent, sent
        head = sum(part.seconds(self.site.top) for part in parts if part.name == "head")
        slowest = (computed - head) * -(-facts.layers // layout.pp) / facts.layers
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
    facts: ModelFacts, site: PlanningTarget, load: Workload, gpus: int, only: ParallelLayout | None = None
) -> list[LayoutForecast]:
    """Every layout that uses so many GPUs, the best first; or one alone."""
    wanted = layouts(facts, gpus) if only is None else [only]
    found = [_outcome(Served(facts, site, layout, load)) for layout in wanted]
    return sorted(found, key=lambda one: _rank(one, load))


def _rank(one: LayoutForecast, load: Workload) -> tuple[bool, bool, float, float]:
    """What does not fit comes last, before it what misses a target. Of those that keep up with a rate, the one whose
    tokens come fastest is the best, else the one that makes most of them.
    """
    keeps_up = bool(load.rate) and not one.trouble
    return not one.fits, bool(one.trouble), one.tpot if keeps_up else -one.output, one.ttft


def _outcome(served: Served) -> LayoutForecast:
    load, layout = served.load, served.layout
    if served.most < 1:
        room = served.room
        why = "weights do not fit" if room.pages < 1 else f"no request of {load.input + load.output:,} tokens fits"
        return LayoutForecast(layout, room, 0, 0.0, 0.0, 0.0, 0.0, served.holds, 0.0, why)
    requests, trouble = _requests(served)
    tpot, sent = served.tpot(requests)
    if not trouble and load.tpot and tpot > load.tpot:
        trouble = f"a token takes {_time(tpot)}"
    if not trouble and load.ttft and served.prompt > load.ttft:
        trouble = f"a first token takes {_time(served.prompt)}"
    output = requests / tpot
    total = output * (load.input + load.output) / load.output
    return LayoutForecast(
        layout, served.room, requests, tpot, served.prompt, output, total, served.holds, sent, trouble
    )


def _time(seconds: float) -> str:
    """With three digits, however short."""
    return (
        f"{1e3 * seconds:.3g} ms"
        if 5e-5 <= seconds < 1
        else f"{seconds:.3g} s"
        if seconds >= 1
        else f"{1e6 * seconds:.3g} us"
    )


def _requests(served: Served) -> tuple[int, str]:
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
