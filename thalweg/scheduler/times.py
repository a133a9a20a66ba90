"""How long a step takes by its rows, their context and its drafts, between and beyond a few that were measured.

Weights are read once for all rows and experts by few tokens in part, so time is no line in rows: it is measured for many numbers of them, behind a
short context. What a longer one adds is attention, which reads it row by row: two numbers of rows are enough."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

LEAST = 0.1  # of the time behind the short context that is believed of a shorter one


class Rung(NamedTuple):
    """rows, and the tokens before each; seconds of a step with so many of each width from 0 on."""

    rows: int
    context: int
    seconds: tuple[float, ...]


Line = list[tuple[int, Sequence[float]]]  # rows, rising, and seconds by width


class StepTimes:
    """Of what was measured: rungs behind a shortest context, and maybe some behind a longest one."""

    def __init__(self, given: Sequence[tuple[int, int, tuple[float, ...]]]) -> None:
        """given: as `Rung`."""
        measured = [Rung(*one) for one in given]
        self.short, long = (pick(rung.context for rung in measured) for pick in (min, max))
        self.near: Line = sorted((rung.rows, rung.seconds) for rung in measured if rung.context == self.short)
        self.span = long - self.short
        far = sorted((rung.rows, rung.seconds) for rung in measured if rung.context == long) if self.span else []
        # what the longer context adds, which is none for no rows
        self.more: Line = [(0, (0.0,) * len(self.near[0][1]))] if far else []
        self.more += [(rows, _less(seconds, _on(self.near, rows))) for rows, seconds in far]

    @property
    def widest(self) -> int:
        return len(self.near[0][1]) - 1

    def seconds(self, rows: int, context: float) -> Sequence[float]:
        """Of a step of so many rows, by width. context: tokens before them, on average."""
        near = _on(self.near, rows)
        if not self.more:
            return near
        share = (context - self.short) / self.span
        return [max(a + share * b, a * LEAST) for a, b in zip(near, _on(self.more, rows), strict=True)]


def _less(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [max(one - other, 0.0) for one, other in zip(these, those, strict=True)]


def _on(line: Line, rows: int) -> Sequence[float]:
    """Between two numbers of rows on the line through them, beyond the last on the last line, below the first as that."""
    i = min(max(bisect_left(line, rows, key=lambda rung: rung[0]), 1), len(line) - 1)
    if len(line) == 1 or rows <= line[0][0]:
        return line[0][1]
    (fewer, below), (more, above) = line[i - 1], line[i]
    share = (rows - fewer) / (more - fewer)
    return [max(a + (b - a) * share, a) for a, b in zip(below, above, strict=True)]
