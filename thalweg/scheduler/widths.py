"""How many tokens to draft: the number that brings most tokens a second, by measured times of steps and by what was accepted lately.

A wider verification takes longer, the more so the more rows there are, and brings more tokens, the more so the better the drafts. Both are known:
times from the engine's start, odds from every verification. Odds of wider drafts than are made are learned from single steps that make a few more,
or as many as there may be (where one more is never worth its time, many may be), so seldom that they cost less than a hundredth of the time.

The odds of a draft are its chance to be accepted, those before it with it. So drafts of a chain and nodes of a tree are the same here: the first n of
them bring the sum of their odds."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Protocol, Sequence

from thalweg.core.request import Request

HOPE = 0.8  # odds of a draft of which nothing is known, given the one before: rather tried than not
LEAST = 1e-3  # of odds, so that they can rise again in proportion
FEW = 8  # drafts up to which every number is chosen from
RECENT, USUAL = 0.05, 0.02  # weight of a verification in the odds of its request, and in those of all
FIRST = 4  # verifications that hope counts as
PROBING = 0.006  # of the time
SURELY = 0.2  # of what a try takes longer counts as lost, whatever is hoped for

Rung = tuple[int, tuple[float, ...]]  # rows, and the seconds of a step with so many of each width from 0 on


class WidthPolicy(Protocol):
    """Names the draft width of the next step."""

    @property
    def widest(self) -> int:
        """The largest width that it will ever name."""

    def draft(self, emitting: Sequence[Request]) -> int:
        """The width that B of a step in which these sample is asked to make."""

    def learn(self, r: Request, drafts: int, path: int) -> None:
        """So many drafts of `r` were verified, and accepted were those whose bits are set."""

    def lost(self) -> None:
        """There is no drafter any more: from now on the width is 0."""


class ConstantWidth:
    """Always the same width; 0 is no speculation."""

    def __init__(self, width: int) -> None:
        self.widest = width

    def draft(self, emitting: Sequence[Request]) -> int:
        return self.widest

    def learn(self, r: Request, drafts: int, path: int) -> None:
        return

    def lost(self) -> None:
        self.widest = 0


class MeasuredWidth:
    """The best width up to those that `times` has."""

    def __init__(self, times: Sequence[Rung]) -> None:
        self.times = sorted(times)
        self.widest = len(self.times[0][1]) - 1
        self.choices = choices(self.widest)
        self.odds = [HOPE ** (1 + i) for i in range(self.widest)]
        self.gains = gains(self.odds)
        self.owed = 0.0  # seconds that probing may take by now
        self.tries = self.heard = 0

    def draft(self, emitting: Sequence[Request]) -> int:
        if not emitting or not self.widest:
            return 0
        seconds = self.seconds(len(emitting))
        mine = [r.gains or self.gains for r in emitting]
        tokens = {width: len(mine) + sum(gain[width] for gain in mine) for width in self.choices}
        best = max(self.choices, key=lambda width: tokens[width] / seconds[width])
        self.owed += PROBING * seconds[best]
        if best == self.widest:
            return best
        wider = self.widest if self.tries % 2 else self.choices[self.choices.index(best) + 1]
        # what more drafts take beyond the tokens that they are expected to bring, which may turn out to be wrong
        more = seconds[wider] - seconds[best]
        price = max(seconds[wider] - seconds[best] * tokens[wider] / tokens[best], SURELY * more)
        if self.owed < price:
            return best
        self.owed -= price
        self.tries += 1
        return wider

    def seconds(self, rows: int) -> Sequence[float]:
        """Of a step of so many rows, by width: between two measured numbers of rows on the line through them, beyond the last on the last line."""
        times = self.times
        i = min(max(bisect_left(times, rows, key=lambda rung: rung[0]), 1), len(times) - 1)
        if len(times) == 1 or rows <= times[0][0]:
            return times[0][1]
        (fewer, below), (more, above) = times[i - 1], times[i]
        share = (rows - fewer) / (more - fewer)
        return [max(a + (b - a) * share, a) for a, b in zip(below, above, strict=True)]

    def learn(self, r: Request, drafts: int, path: int) -> None:
        odds = r.odds or self.odds.copy()
        self.heard += 1
        for of, weight in ((odds, RECENT), (self.odds, max(USUAL, 1 / (FIRST + self.heard)))):
            _towards(of, min(drafts, self.widest), path, weight)
        r.odds, r.gains, self.gains = odds, gains(odds), gains(self.odds)

    def lost(self) -> None:
        self.widest = 0


def _towards(odds: list[float], drafts: int, path: int, weight: float) -> None:
    """Moves odds to what was seen. Those of drafts that were not made keep their proportion to the last one that was."""
    if not drafts:
        return
    before = odds[drafts - 1]
    for i in range(drafts):
        odds[i] = max(odds[i] + weight * ((path >> i & 1) - odds[i]), LEAST)
    change = odds[drafts - 1] / before
    for i in range(drafts, len(odds)):
        odds[i] = min(max(odds[i] * change, LEAST), 1.0)


def gains(odds: Sequence[float]) -> tuple[float, ...]:
    """Drafts that are accepted on average, for each width from 0 on."""
    return tuple(accumulate(odds, initial=0.0))


def choices(widest: int) -> tuple[int, ...]:
    """Widths to choose from: all of them where they are few, else those that with the last known token are as many tokens as tiles have rows, and
    the widest."""
    if widest <= FEW:
        return tuple(range(widest + 1))
    tiles = (rows - 1 for rows in (1, 2, 4, 8, 16, 32) if rows <= widest)
    return *tiles, widest
