"""Step times by rows, context and number of drafts: interpolated between measured ones, corrected by real steps.

Weights are read once for all rows, and experts by few tokens in part, so time is not linear in rows: a short context is
measured with many numbers of rows. A longer context adds attention, which reads it row by row: two numbers of rows are
enough. Start-up times come from synthetic requests, so they are a few percent off, and unevenly across draft lengths.
Real steps correct them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

MIN_SHARE = 0.1  # of the time with the short context: the least that is believed of a shorter one
SAME_STEPS = 3  # plans in a row with equal rows and drafts, after which the time between two is that of such a step
WINDOW = 20  # steps whose times count
ENOUGH = 2  # steps after which a time is known
CACHED = 256  # pairs of rows and context
MAX_DEVIATION = 2.0  # a step that took a larger multiple of the expected time, or a smaller part, was disturbed


class ProfilePoint(NamedTuple):
    """Measured step times."""

    rows: int
    context: int  # tokens before each row
    seconds: tuple[float, ...]  # by number of drafts, from 0 on


@dataclass(slots=True)
class ObservedFactor:
    """Average of real over measured time."""

    factor: float = 1.0
    steps: int = 0  # in the average, at most WINDOW

    def add(self, factor: float, steps: int) -> None:
        """Adds the average of some steps."""
        self.steps = min(self.steps + steps, WINDOW)
        bounded = min(max(factor, self.factor / MAX_DEVIATION), self.factor * MAX_DEVIATION)
        self.factor += (bounded - self.factor) * min(steps / (self.steps + 1), 1.0)  # the measured time is one step


class StepTimer:
    """Times steps from one plan to the next."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self.clock = clock  # None: times nothing
        self.now = 0.0
        self.pause()

    def pause(self) -> None:
        """Something other than decoding takes time in the next step, or before it."""
        self.kind, self.alike, self.is_paused = (0, 0), 0, True

    def lap(self, rows: int, drafts: int, steps: int) -> float:
        """A step with so many rows and drafts is planned, `steps` steps after the last call, all with equally many.

        Returns the seconds of such a step; 0.0 if the steps before were of another kind.
        """
        if self.clock is None:
            return 0.0
        before, self.now = self.now, self.clock()
        if self.is_paused:
            self.is_paused = False
            return 0.0
        is_same = self.kind == (rows, drafts)
        self.kind, self.alike = (rows, drafts), 1 + (self.alike + steps - 1) * is_same
        return (self.now - before) / steps if self.alike >= SAME_STEPS else 0.0


Line = list[tuple[int, Sequence[float]]]  # (rows, seconds by number of drafts), rows rising


class StepTimeModel:
    """Expected step times from the measured ones with the shortest context, and those with the longest, if any."""

    def __init__(self, points: Sequence[tuple[int, int, tuple[float, ...]]]) -> None:
        measured = [ProfilePoint(*point) for point in points]
        self.short, long = (pick(point.context for point in measured) for pick in (min, max))
        self.span = long - self.short
        self.near: Line = sorted((point.rows, point.seconds) for point in measured if point.context == self.short)
        self.more: Line = []  # what the longest context adds: nothing for no rows
        if self.span:
            self.more.append((0, (0.0,) * len(self.near[0][1])))
            for rows, _, seconds in sorted(point for point in measured if point.context == long):
                base = _interpolate(self.near, rows)
                self.more.append((rows, [max(a - b, 0.0) for a, b in zip(seconds, base, strict=True)]))
        self.max_drafts = len(self.near[0][1]) - 1
        self.expected = lru_cache(CACHED)(self._expected)
        self.observed: defaultdict[tuple[int, int], ObservedFactor] = defaultdict(ObservedFactor)

    def seconds(self, rows: int, context: int) -> list[float]:
        """By number of drafts. context: average number of tokens before the rows."""
        index, expected = self._index(rows), self.expected(rows, context)
        return [seconds * self.observed[index, drafts].factor for drafts, seconds in enumerate(expected)]

    def observe(self, rows: int, context: int, drafts: int, seconds: float, steps: int = 1) -> None:
        """Adds the average time of real steps that verified and proposed so many drafts."""
        factor = seconds / self.expected(rows, context)[drafts]
        self.observed[self._index(rows), drafts].add(factor, steps)

    def is_known(self, rows: int, drafts: int) -> bool:
        """Whether there were enough real steps of this kind."""
        return self.observed[self._index(rows), drafts].steps >= ENOUGH

    def doubt(self, rows: int, drafts: int) -> None:
        """The last steps of this kind are long ago: they count as one."""
        observed = self.observed[self._index(rows), drafts]
        observed.steps = min(observed.steps, 1)

    def _index(self, rows: int) -> int:
        """Numbers of rows between two measured ones share their corrections."""
        return bisect_left(self.near, rows, key=lambda point: point[0])

    def _expected(self, rows: int, context: int) -> Sequence[float]:
        """By the measured times alone."""
        near = _interpolate(self.near, rows)
        if not self.more:
            return near
        share = (context - self.short) / self.span
        more = _interpolate(self.more, rows)
        return [max(a + share * b, a * MIN_SHARE) for a, b in zip(near, more, strict=True)]


def _interpolate(line: Line, rows: int) -> Sequence[float]:
    """Between two numbers of rows, or beyond the last two; below the first the times of the first."""
    i = min(max(bisect_left(line, rows, key=lambda point: point[0]), 1), len(line) - 1)
    if len(line) == 1 or rows <= line[0][0]:
        return line[0][1]
    (fewer, below), (more, above) = line[i - 1], line[i]
    share = (rows - fewer) / (more - fewer)
    return [max(a + (b - a) * share, a) for a, b in zip(below, above, strict=True)]
