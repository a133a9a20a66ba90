"""How many tokens to draft: the number that brings most tokens a second, by measured times of steps and by what was accepted lately.

A wider verification takes longer, the more so the more rows there are, and brings more tokens, the more so the better the drafts. Both are known:
times from the engine's start, odds from every verification. Odds of wider drafts than are made are learned from single steps that make one more,
so seldom that they cost at most a hundredth of the time."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol, Sequence

from thalweg.core.request import Request

HOPE = 0.8  # odds of a draft of which nothing is known: rather tried than not
RECENT, USUAL = 0.1, 0.02  # weight of a verification in the odds of its request, and in those of all
PROBING = 0.01  # of the time

Rung = tuple[int, tuple[float, ...]]  # rows, and the seconds of a step with so many of each width from 0 on


class WidthPolicy(Protocol):
    """Names the draft width of the next step."""

    @property
    def widest(self) -> int:
        """The largest width that it will ever name."""

    def draft(self, emitting: Sequence[Request]) -> int:
        """The width that B of a step in which these sample is asked to make."""

    def learn(self, r: Request, drafts: int, accepted: int) -> None:
        """So many drafts of `r` were verified, and so many accepted."""

    def lost(self) -> None:
        """There is no drafter any more: from now on the width is 0."""


class ConstantWidth:
    """Always the same width; 0 is no speculation."""

    def __init__(self, width: int) -> None:
        self.widest = width

    def draft(self, emitting: Sequence[Request]) -> int:
        return self.widest

    def learn(self, r: Request, drafts: int, accepted: int) -> None:
        return

    def lost(self) -> None:
        self.widest = 0


class MeasuredWidth:
    """The best width up to those that `times` has."""

    def __init__(self, times: Sequence[Rung]) -> None:
        self.times = sorted(times)
        self.widest = len(self.times[0][1]) - 1
        self.odds = [HOPE] * self.widest
        self.gains = gains(self.odds)
        self.owed = 0.0  # seconds that probing may take by now

    def draft(self, emitting: Sequence[Request]) -> int:
        if not emitting or not self.widest:
            return 0
        seconds = self.seconds(len(emitting))
        mine = [r.gains or self.gains for r in emitting]
        tokens = [len(mine) + sum(gain[width] for gain in mine) for width in range(self.widest + 1)]
        best = max(range(self.widest + 1), key=lambda width: tokens[width] / seconds[width])
        self.owed += PROBING * seconds[best]
        if best == self.widest:
            return best
        # what one more draft takes beyond the tokens that it is expected to bring
        price = seconds[best + 1] - seconds[best] * tokens[best + 1] / tokens[best]
        if self.owed < price:
            return best
        self.owed -= max(price, 0.0)
        return best + 1

    def seconds(self, rows: int) -> Sequence[float]:
        """Of a step of so many rows, by width: between two measured numbers of rows on the line through them, beyond the last on the last line."""
        times = self.times
        i = min(max(bisect_left(times, rows, key=lambda rung: rung[0]), 1), len(times) - 1)
        if len(times) == 1 or rows <= times[0][0]:
            return times[0][1]
        (fewer, below), (more, above) = times[i - 1], times[i]
        share = (rows - fewer) / (more - fewer)
        return [max(a + (b - a) * share, a) for a, b in zip(below, above, strict=True)]

    def learn(self, r: Request, drafts: int, accepted: int) -> None:
        odds = r.odds or self.odds.copy()
        for i in range(min(accepted + 1, drafts, self.widest)):
            hit = i < accepted
            odds[i] += RECENT * (hit - odds[i])
            self.odds[i] += USUAL * (hit - self.odds[i])
        r.odds, r.gains, self.gains = odds, gains(odds), gains(self.odds)

    def lost(self) -> None:
        self.widest = 0


def gains(odds: Sequence[float]) -> tuple[float, ...]:
    """Drafts that are accepted on average, for each width from 0 on. odds: of each draft, given that those before it were right."""
    found, right, total = [0.0], 1.0, 0.0
    for chance in odds:
        right *= chance
        total += right
        found.append(total)
    return tuple(found)
