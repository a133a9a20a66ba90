"""How many tokens to draft: the number that brings most tokens a second, by measured times of steps and by what was accepted lately.

A wider verification takes longer, the more so the more rows there are, and brings more tokens, the more so the better the drafts. Both are known:
times from the engine's start, odds from every verification. Odds of wider drafts than are made are learned from single steps that make a few more,
or as many as there may be (where one more is never worth its time, many may be), so seldom that they cost less than a hundredth of the time.

The odds of a draft are its chance to be accepted, those before it with it. So drafts of a chain and nodes of a tree are the same here: the first n of
them bring the sum of their odds. Odds are kept of the drafts between two widths that are chosen from, together: a step of many rows and nodes costs a
few numbers of each row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from thalweg.core.request import Request
from thalweg.scheduler.times import StepTimes

HOPE = 0.8  # odds of a draft of which nothing is known, given the one before: rather tried than not
LEAST = 1e-3  # of odds, above what was seen, so that they can rise again in proportion
FEW = 8  # drafts up to which every number is chosen from
RECENT, USUAL = 0.05, 0.02  # weight of a verification in the odds of its request, and in those of all
FIRST = 4  # verifications that hope counts as
PROBING = 0.006  # of the time
SURELY = 0.2  # of what a try takes longer counts as lost, whatever is hoped for


class Verdict(NamedTuple):
    """So many drafts of a request, one at least, were verified, and accepted were those whose bits are set in `path`."""

    request: Request
    drafts: int
    path: int


class WidthPolicy(Protocol):
    """Names the draft width of the next step."""

    @property
    def widest(self) -> int:
        """The largest width that it will ever name."""

    def draft(self, emitting: Sequence[Request], most: int) -> int:
        """The width that B of a step in which these sample is asked to make, up to `most`."""

    def learn(self, verified: Sequence[Verdict]) -> None:
        """What became of the drafts of a step; none of these has none."""

    def lost(self) -> None:
        """There is no drafter any more: from now on the width is 0."""


class ConstantWidth:
    """Always the same width, or where there is no room for it the next one that steps were recorded with; 0 is no speculation."""

    def __init__(self, width: int) -> None:
        self.widest = width

    def draft(self, emitting: Sequence[Request], most: int) -> int:
        return self.widest if self.widest <= most else max(width for width in choices(self.widest) if width <= most)

    def learn(self, verified: Sequence[Verdict]) -> None:
        return

    def lost(self) -> None:
        self.widest = 0


class MeasuredWidth:
    """The best width up to those that `times`, `Rung`s, has. odds: of the drafts between each two choices, how many are accepted on average, of all
    requests; each request has its own."""

    def __init__(self, times: Sequence[tuple[int, int, tuple[float, ...]]]) -> None:
        self.times = StepTimes(times)
        self.widest = self.times.widest
        self.choices = choices(self.widest)
        parts = list(pairwise(self.choices))
        self.masks = [(1 << wider) - (1 << width) for width, wider in parts]
        self.sizes = [wider - width for width, wider in parts]
        self.odds = tuple(sum(HOPE ** (1 + i) for i in range(*part)) for part in parts)
        self.owed = 0.0  # seconds that probing may take by now
        self.tries = self.heard = 0

    def draft(self, emitting: Sequence[Request], most: int) -> int:
        if not emitting or not self.widest:
            return 0
        allowed = self.choices[: bisect_right(self.choices, most)]
        rows = len(emitting)
        seconds = self.times.seconds(rows, sum(r.known for r in emitting) / rows)
        parts = zip(*(r.odds or self.odds for r in emitting), strict=True)
        tokens = dict(zip(self.choices, accumulate(map(sum, parts), initial=float(rows)), strict=True))
        best = max(allowed, key=lambda width: tokens[width] / seconds[width])
        if best == allowed[-1]:
            return best
        wider = allowed[-1] if self.tries % 2 else allowed[allowed.index(best) + 1]
        # what more drafts take beyond the tokens that they are expected to bring, which may turn out to be wrong
        more = seconds[wider] - seconds[best]
        price = max(seconds[wider] - seconds[best] * tokens[wider] / tokens[best], SURELY * more)
        self.owed = min(
            self.owed + PROBING * seconds[best], price
        )  # what is saved up beyond a try would be spent on many at once
        if self.owed < price:
            return best
        self.owed -= price
        self.tries += 1
        return wider

    def learn(self, verified: Sequence[Verdict]) -> None:
        alike: dict[tuple[int, int], list[Request]] = {}  # by drafts and path
        for r, drafts, path in verified:
            alike.setdefault((drafts, path), []).append(r)
        seen = {key: self._accepted(*key) for key in alike}
        sums: dict[int, list[float]] = {}  # by parts that were drafted: how many verifications, and what they accepted
        for key, whose in alike.items():
            total = sums.setdefault(len(seen[key]), [0.0] * (1 + len(seen[key])))
            for i, one in enumerate((1.0, *seen[key])):
                total[i] += len(whose) * one
        for count, *total in sums.values():
            self.heard += int(count)
            weight = max(1 - (1 - USUAL) ** count, count / (FIRST + self.heard))
            self.odds = self._moved(self.odds, [one / count for one in total], weight)
        for key, whose in alike.items():  # a request's first verification begins at what is known of all
            for r in whose:
                r.odds = self._moved(r.odds or self.odds, seen[key], RECENT)

    def _accepted(self, drafts: int, path: int) -> list[float]:
        """Of the parts that were drafted as a whole."""
        whole = bisect_right(self.choices, drafts) - 1
        return [float((path & mask).bit_count()) for mask in self.masks[:whole]]

    def _moved(self, odds: Sequence[float], seen: Sequence[float], weight: float) -> tuple[float, ...]:
        """Towards what was seen. Those of drafts that were not made keep their proportion to the last ones that were."""
        kept = 1 - weight
        moved = [kept * before + weight * (now + LEAST) for before, now in zip(odds, seen, strict=False)]
        made = len(moved)
        if made < len(odds):
            change = moved[-1] / odds[made - 1]
            moved += [
                min(max(before * change, LEAST), size)
                for before, size in zip(odds[made:], self.sizes[made:], strict=True)
            ]
        return tuple(moved)

    def lost(self) -> None:
        self.widest = 0


def choices(widest: int) -> tuple[int, ...]:
    """Widths to choose from: all of them where they are few, else those that with the last known token are as many tokens as tiles have rows, and
    the widest."""
    if widest <= FEW:
        return tuple(range(widest + 1))
    tiles = (rows - 1 for rows in (1, 2, 4, 8, 16, 32) if rows <= widest)
    return *tiles, widest
