"""The time of a step by operation, against the floor of each, with the idle gaps; and the largest losses in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from thalweg.bench.trace import DeviceSpan, TracedStep
from thalweg.kernels import names

TOP = 5
GAPS = "gaps"
MERGED = {"index": names.ATTENTION}  # phases of the floors that share kernels with another


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of an operation, in a step."""

    name: str
    count: float
    us: float  # all calls together


@dataclass(frozen=True, slots=True)
class OperationTime:
    """One operation of a step."""

    operation: str
    count: float
    us: float  # by which it delayed the end of the step
    floor_us: float | None  # None where nothing must be read or computed
    lines: tuple[KernelTime, ...]  # its kernels, the longest first

    @property
    def lost_us(self) -> float:
        return self.us - (self.floor_us or 0.0)


@dataclass(frozen=True, slots=True)
class IdleGaps:
    """Times of a step in which nothing ran."""

    count: float
    us: float
    longest_us: float
    before: tuple[KernelTime, ...]  # the kernels after them, the longest gaps first


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Steps of one kind."""

    rows: int
    tokens: int
    steps: int
    us: float  # mean of a step
    median_us: float
    parts: tuple[OperationTime, ...]  # the longest first; with the gaps they add up to the step
    gaps: IdleGaps

    @property
    def floor_us(self) -> float | None:
        """None where no floor is known."""
        known = [part.floor_us for part in self.parts if part.floor_us is not None]
        return sum(known) if known else None


def additions(step: TracedStep) -> Iterator[tuple[DeviceSpan, float, float]]:
    """(span, gap before it, µs by which it delayed the end): gaps and delays add up to the time until the last end,
    also where kernels overlap.
    """
    latest = step.begin
    for span in step.spans:
        yield span, max(0.0, span.begin - latest), max(0.0, span.end - max(span.begin, latest))
        latest = max(latest, span.end)


def steps_by_kind(steps: Sequence[TracedStep]) -> dict[tuple[int, int], list[TracedStep]]:
    """Steps by (rows, tokens), the most frequent kind first. Where some are followed at once by another step, only
    those count, because the end of the others is not known.
    """
    found: dict[tuple[int, int], list[TracedStep]] = defaultdict(list)
    for step in steps:
        found[step.kind].append(step)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return {kind: [s for s in mine if s.followed] or mine for kind, mine in ordered}


def typical_steps(steps: Sequence[TracedStep]) -> list[TracedStep]:
    """The middle half of steps of one kind by their time, without the first one, which has cold caches."""
    rest = sorted(steps[1:] if len(steps) > 2 else steps, key=lambda step: step.end - step.begin)
    return rest[len(rest) // 4 : len(rest) - len(rest) // 4]


def break_down(steps: Sequence[TracedStep], floors: Mapping[str, float]) -> StepBreakdown:
    """The mean of steps of one kind. floors: seconds by phase; {} where none are known."""
    count = len(steps)
    us: dict[str, float] = defaultdict(float)
    many: Counter[str] = Counter()
    lines: dict[tuple[str, str], list[float]] = defaultdict(list)
    waits: dict[str, list[float]] = defaultdict(list)
    longest = 0.0
    for step in steps:
        for span, gap, added in additions(step):
            us[span.operation] += added
            many[span.operation] += 1
            lines[span.operation, span.name].append(added)
            if gap:
                waits[span.name].append(gap)
                longest = max(longest, gap)
        after = step.end - max(span.end for span in step.spans)
        if after > 0:
            waits["the next step"].append(after)
            longest = max(longest, after)
    floor_us = _floors(floors, undecided=names.PRODUCTS in us)
    parts = [
        OperationTime(
            name, many[name] / count, us.get(name, 0.0) / count, floor_us.get(name), _lines(lines, name, count)
        )
        for name in {*us, *floor_us}
    ]
    times = [step.end - step.begin for step in steps]
    gaps = IdleGaps(
        sum(map(len, waits.values())) / count,
        sum(map(sum, waits.values())) / count,
        longest,
        tuple(
            sorted((KernelTime(n, len(g) / count, sum(g) / count) for n, g in waits.items()), key=lambda one: -one.us)[
                :TOP
            ]
        ),
    )
    ordered = tuple(sorted(parts, key=lambda part: -part.us))
    return StepBreakdown(*steps[0].kind, count, sum(times) / count, median(times), ordered, gaps)


def _floors(floors: Mapping[str, float], undecided: bool) -> dict[str, float]:
    """µs by operation. undecided: the roles of products are unknown, so they share one floor."""
    found: dict[str, float] = {}
    for phase, seconds in floors.items():
        operation = MERGED.get(phase, phase)
        if undecided and operation != names.ATTENTION:
            operation = names.PRODUCTS
        found[operation] = found.get(operation, 0.0) + seconds * 1e6
    return found


def _lines(lines: Mapping[tuple[str, str], list[float]], operation: str, count: int) -> tuple[KernelTime, ...]:
    mine = [
        KernelTime(name, len(us) / count, sum(us) / count) for (what, name), us in lines.items() if what == operation
    ]
    return tuple(sorted(mine, key=lambda line: -line.us))


def words(split: StepBreakdown) -> list[str]:
    """The five places where most time is lost, in order."""
    told = [(part.lost_us, _of_part(part, split)) for part in split.parts]
    told.append((split.gaps.us, _of_gaps(split)))
    return [text for lost, text in sorted(told, key=lambda one: -one[0])[:TOP] if lost > 0]


def _of_part(part: OperationTime, split: StepBreakdown) -> str:
    share = part.lost_us / split.us
    most = part.lines[0] if part.lines else KernelTime("", 0, 0.0)
    place = f"{_times(most.count)} `{most.name}` {_us(most.us)}"
    if part.floor_us is None:
        kinds = f", {len(part.lines)} kinds" if len(part.lines) > 1 else ""
        return (
            f"{part.operation}: {_us(part.us)} ({share:.0%} of the step) without a floor,"
            f" {_times(part.count)}{kinds}; most in {place}"
        )
    return (
        f"{part.operation}: {_us(part.lost_us)} ({share:.0%} of the step) above the floor of {_us(part.floor_us)}: it"
        f" takes {_us(part.us)}, {part.us / max(part.floor_us, 1e-9):.1f} times as long; most in {place}"
    )


def _of_gaps(split: StepBreakdown) -> str:
    gaps = split.gaps
    before = ", ".join(f"`{line.name}` {_us(line.us)}" for line in gaps.before[:3])
    return (
        f"gaps: nothing runs for {_us(gaps.us)} ({gaps.us / split.us:.0%} of the step), {_times(gaps.count)}, the"
        f" longest {_us(gaps.longest_us)}; most before {before}"
    )


def _us(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.1f} µs"


def _times(count: float) -> str:
    return f"{count:.0f} x" if count >= 9.5 or count == round(count) else f"{count:.1f} x"
