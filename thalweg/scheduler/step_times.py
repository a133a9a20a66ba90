"""How long a step takes by its rows, their context and its drafts, between and beyond a few that were measured, and by
those that were made since.

Weights are read once for all rows and experts by few tokens in part, so time is no line in rows: it is measured for
many numbers of them, behind a short context. What a longer one adds is attention, which reads it row by row: two
numbers of rows are enough.

What was measured is of made-up requests, at one moment, and on a machine that others use it is some percent wrong, of
one width more than of another. So real steps are timed, too, and what they took longer or shorter than expected is
expected of the next ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

LEAST = 0.1  # of the time behind the short context that is believed of a shorter one
# plans in a row for the same rows and drafts: between the last two passed the time of such a step, also where steps
# overlap
LAPS = 3
MEMORY = 20  # steps whose times count
ENOUGH = 2  # steps of its own after which a width's time is known
CACHED = 256  # numbers of rows and contexts
ODD = 2.0  # times as long as expected, or as short, a step is thought to have been at most: something else came between


class ProfilePoint(NamedTuple):
    """rows, and the tokens before each; seconds of a step with so many of each width from 0 on."""

    rows: int
    context: int
    seconds: tuple[float, ...]


@dataclass(slots=True)
class ObservedFactor:
    """factor: what steps took, of what was measured for them, on average over the last ones. steps: how many these are,
    `MEMORY` at most.
    """

    factor: float = 1.0
    steps: int = 0

    def add(self, factor: float, steps: int) -> None:
        """Of so many steps the average."""
        self.steps = min(self.steps + steps, MEMORY)
        odd = min(max(factor, self.factor / ODD), self.factor * ODD)
        self.factor += (odd - self.factor) * min(steps / (self.steps + 1), 1.0)  # what was measured counts as a step


class StepTimer:
    """The time that steps take from one plan to the next. clock: in seconds; None times nothing."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self.clock = clock
        self.now = 0.0
        self.pause()

    def pause(self) -> None:
        """In the step that is planned next, or before it, something else takes time."""
        self.kind, self.alike, self.paused = (0, 0), 0, True

    def lap(self, rows: int, drafts: int, steps: int) -> float:
        """A step is planned that verifies so many drafts of each row, so many steps behind the last one that was told;
        those between verify as many. → seconds of such a step; 0.0 where those before were of another kind.
        """
        if self.clock is None:
            return 0.0
        before, self.now = self.now, self.clock()
        if self.paused:
            self.paused = False
            return 0.0
        same = self.kind == (rows, drafts)
        self.kind, self.alike = (rows, drafts), 1 + (self.alike + steps - 1) * same
        return (self.now - before) / steps if self.alike >= LAPS else 0.0


Line = list[tuple[int, Sequence[float]]]  # rows, rising, and seconds by width


class StepTimeModel:
    """Of what was measured: rungs behind a shortest context, and maybe some behind a longest one."""

    def __init__(self, given: Sequence[tuple[int, int, tuple[float, ...]]]) -> None:
        """given: as `ProfilePoint`."""
        measured = [ProfilePoint(*one) for one in given]
        self.short, long = (pick(rung.context for rung in measured) for pick in (min, max))
        self.near: Line = sorted((rung.rows, rung.seconds) for rung in measured if rung.context == self.short)
        self.span = long - self.short
        far = sorted((rung.rows, rung.seconds) for rung in measured if rung.context == long) if self.span else []
        # what the longer context adds, which is none for no rows
        self.more: Line = [(0, (0.0,) * len(self.near[0][1]))] if far else []
        self.more += [(rows, _less(seconds, _on(self.near, rows))) for rows, seconds in far]
        self.measured = lru_cache(CACHED)(self._measured)
        self.lived: dict[int, list[ObservedFactor]] = {}  # by rung, and width

    @property
    def max_drafts(self) -> int:
        return len(self.near[0][1]) - 1

    def seconds(self, rows: int, context: float) -> Sequence[float]:
        """Of a step of so many rows, by width. context: tokens before them, on average."""
        measured, rung = self.expected(rows, context), self._rung(rows)
        lived = self.lived.get(rung)
        return measured if lived is None else [one * lived[width].factor for width, one in enumerate(measured)]

    def took(self, rows: int, context: float, width: int, seconds: float, steps: int = 1) -> None:
        """So many steps did on average, that verified so many drafts of each row and made as many."""
        rung = self._rung(rows)
        if rung not in self.lived:
            self.lived[rung] = [ObservedFactor() for _ in range(1 + self.max_drafts)]
        self.lived[rung][width].add(seconds / self.expected(rows, context)[width], steps)

    def known(self, rows: int, width: int) -> bool:
        """Whether there were enough steps like that to tell how long they take."""
        lived = self.lived.get(self._rung(rows))
        return lived is not None and lived[width].steps >= ENOUGH

    def doubt(self, rows: int, width: int) -> None:
        """What such steps took is long ago: it counts as one of them."""
        if lived := self.lived.get(self._rung(rows)):
            lived[width].steps = min(lived[width].steps, 1)

    def expected(self, rows: int, context: float) -> Sequence[float]:
        """By what was measured alone."""
        return self.measured(rows, context if self.more else 0)

    def _rung(self, rows: int) -> int:
        """Numbers of rows between two that were measured are alike."""
        return bisect_left(self.near, rows, key=lambda rung: rung[0])

    def _measured(self, rows: int, context: float) -> Sequence[float]:
        near = _on(self.near, rows)
        if not self.more:
            return near
        share = (context - self.short) / self.span
        return [max(a + share * b, a * LEAST) for a, b in zip(near, _on(self.more, rows), strict=True)]


def _less(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [max(one - other, 0.0) for one, other in zip(these, those, strict=True)]


def _on(line: Line, rows: int) -> Sequence[float]:
    """Between two numbers of rows on the line through them, beyond the last on the last line, below the first as
    that.
    """
    i = min(max(bisect_left(line, rows, key=lambda rung: rung[0]), 1), len(line) - 1)
    if len(line) == 1 or rows <= line[0][0]:
        return line[0][1]
    (fewer, below), (more, above) = line[i - 1], line[i]
    share = (rows - fewer) / (more - fewer)
    return [max(a + (b - a) * share, a) for a, b in zip(below, above, strict=True)]
