"""Where the time of a step goes: by operation, against the floor of each, with the gaps between; and in words where
most of it is lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from thalweg.bench.trace import Span, Step
from thalweg.kernels import names

TOP = 5
GAPS = "gaps"
MERGED = {"index": names.ATTENTION}  # phases of the floors that kernels do not show apart


@dataclass(frozen=True, slots=True)
class Line:
    """One kernel of an operation, of a step: how many, µs together."""

    name: str
    count: float
    us: float


@dataclass(frozen=True, slots=True)
class Part:
    """One operation of a step. us: by how much later it made the step end. floor_us: None where nothing must be read or
    computed. lines: its kernels, the longest first.
    """

    operation: str
    count: float
    us: float
    floor_us: float | None
    lines: tuple[Line, ...]

    @property
    def lost_us(self) -> float:
        return self.us - (self.floor_us or 0.0)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times of a step in which nothing ran. before: what came after them, the longest in all first."""

    count: float
    us: float
    longest_us: float
    before: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Steps of one kind. us: of a step, the mean; median_us. parts: by operation, the longest first; with the gaps they
    are the step.
    """

    rows: int
    tokens: int
    steps: int
    us: float
    median_us: float
    parts: tuple[Part, ...]
    gaps: Gaps

    @property
    def floor_us(self) -> float | None:
        """None where no floor is known."""
        known = [part.floor_us for part in self.parts if part.floor_us is not None]
        return sum(known) if known else None


def additions(step: Step) -> Iterator[tuple[Span, float, float]]:
    """(span, gap before it, by how much it moved the end): all gaps and moves together are the time up to the last end.
    Kernels overlap.
    """
    latest = step.begin
    for span in step.spans:
        yield span, max(0.0, span.begin - latest), max(0.0, span.end - max(span.begin, latest))
        latest = max(latest, span.end)


def kinds(steps: Sequence[Step]) -> dict[tuple[int, int], list[Step]]:
    """Steps by (rows, tokens), the most frequent kind first. Where some are followed at once by another, only those
    count: of the last one it is not known when it ended for the engine.
    """
    found: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in steps:
        found[step.kind].append(step)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return {kind: [s for s in mine if s.followed] or mine for kind, mine in ordered}


def typical(steps: Sequence[Step]) -> list[Step]:
    """Of steps of one kind the middle half by their time, without the first, when caches were cold: what interrupts one
    would stand for all.
    """
    rest = sorted(steps[1:] if len(steps) > 2 else steps, key=lambda step: step.end - step.begin)
    return rest[len(rest) // 4 : len(rest) - len(rest) // 4]


def split(steps: Sequence[Step], floors: Mapping[str, float]) -> Split:
    """Of steps of one kind. floors: seconds by phase; {} where none are known."""
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
        Part(name, many[name] / count, us.get(name, 0.0) / count, floor_us.get(name), _lines(lines, name, count))
        for name in {*us, *floor_us}
    ]
    times = [step.end - step.begin for step in steps]
    gaps = Gaps(
        sum(map(len, waits.values())) / count, sum(map(sum, waits.values())) / count, longest,
        tuple(sorted((Line(n, len(g) / count, sum(g) / count) for n, g in waits.items()), key=lambda one: -one.us)[:TOP]),
    )  # fmt: skip
    ordered = tuple(sorted(parts, key=lambda part: -part.us))
    return Split(*steps[0].kind, count, sum(times) / count, median(times), ordered, gaps)


def _floors(floors: Mapping[str, float], undecided: bool) -> dict[str, float]:
    """µs by operation. undecided: products could not be told apart, so their floors are one."""
    found: dict[str, float] = {}
    for phase, seconds in floors.items():
        operation = MERGED.get(phase, phase)
        if undecided and operation != names.ATTENTION:
            operation = names.PRODUCTS
        found[operation] = found.get(operation, 0.0) + seconds * 1e6
    return found


def _lines(lines: Mapping[tuple[str, str], list[float]], operation: str, count: int) -> tuple[Line, ...]:
    mine = [Line(name, len(us) / count, sum(us) / count) for (what, name), us in lines.items() if what == operation]
    return tuple(sorted(mine, key=lambda line: -line.us))


def words(split: Split) -> list[str]:
    """The five places where most time is lost, in order."""
    told = [(part.lost_us, _of_part(part, split)) for part in split.parts]
    told.append((split.gaps.us, _of_gaps(split)))
    return [text for lost, text in sorted(told, key=lambda one: -one[0])[:TOP] if lost > 0]


def _of_part(part: Part, split: Split) -> str:
    share = part.lost_us / split.us
    most = part.lines[0] if part.lines else Line("", 0, 0.0)
    place = f"{_times(most.count)} `{most.name}` {_us(most.us)}"
    if part.floor_us is None:
        kinds = f", {len(part.lines)} kinds" if len(part.lines) > 1 else ""
        return (
            f"{part.operation}: {_us(part.us)} ({share:.0%} of the step) that no floor asks for,"
            f" {_times(part.count)}{kinds}; most in {place}"
        )
    return (
        f"{part.operation}: {_us(part.lost_us)} ({share:.0%} of the step) above the floor of {_us(part.floor_us)}: it"
        f" takes {_us(part.us)}, {part.us / max(part.floor_us, 1e-9):.1f} times as long; most in {place}"
    )


def _of_gaps(split: Split) -> str:
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
