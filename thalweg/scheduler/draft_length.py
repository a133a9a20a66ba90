"""How many tokens to draft: the number that brings most tokens a second, by measured times of steps and by what was
accepted lately.

A wider verification takes longer, the more so the more rows there are, and brings more tokens, the more so the better
the drafts. Both are known: times from the engine's start and from the steps since, odds from every verification. Odds
of wider drafts than are made are learned from tries, steps that make a few more, or as many as there may be (where one
more is never worth its time, many may be), so seldom that they cost less than a hundredth of the time. Times of any
width that might be the best are learned so, too, a few steps at once: the first waits for a drafter that lags.

The odds of a draft are its chance to be accepted, those before it with it. So drafts of a chain and nodes of a tree are
the same here: the first n of them bring the sum of their odds. Odds are kept of the drafts between two widths that are
chosen from, together: a step of many rows and nodes costs a few numbers of each row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from thalweg.core.request import Request
from thalweg.scheduler.step_times import StepTimeModel, StepTimer

HOPE = 0.8  # odds of a draft of which nothing is known, given the one before: rather tried than not
LEAST = 1e-3  # of odds, above what was seen, so that they can rise again in proportion
FEW = 8  # drafts up to which every number is chosen from
RECENT, USUAL = 0.05, 0.02  # weight of a verification in the odds of its request, and in those of all
FIRST = 4  # verifications that hope counts as
PROBING = 0.006  # of the time
SURELY = 0.2  # of what a try takes longer counts as lost, whatever is hoped for
REVIEW = 8  # steps for which a choice is good, unless something was learned: it takes a hundredth of a short step
CLOSE = 0.75  # of the best rate: below it a width's time is not worth knowing better
STRIDE = 64  # tokens of context that make no difference
AGAIN = 4  # one try in so many is of fewer drafts, where these are as good or nearly
BURST = 3  # steps of a try, as long as it is not known how long they take
SETTLED = 3  # plans behind its last step, by which it is over, also where steps overlap


class VerifiedDrafts(NamedTuple):
    """So many drafts of a request, one at least, were verified, and accepted were those whose bits are set in
    `path`.
    """

    request: Request
    drafts: int
    path: int


class DraftLengthPolicy(Protocol):
    """Names the draft width of the next step."""

    @property
    def max_drafts(self) -> int:
        """The largest width that it will ever name."""

    def choose(self, emitting: Sequence[Request], most: int) -> int:
        """The width that B of a step in which these sample is asked to make, up to `most`."""

    def observe(self, verified: Sequence[VerifiedDrafts]) -> None:
        """What became of the drafts of a step; none of these has none."""

    def note_prefill(self) -> None:
        """In the step that is planned now prompts are computed, too: its time says nothing of drafts."""

    def disable(self) -> None:
        """There is no drafter any more: from now on the width is 0."""


@dataclass(slots=True)
class Trial:
    """Some steps of another width than the best. begun: when; usual, worth: seconds of a step of the best width, and of
    what a step of this one is expected to bring beyond that; price: seconds that it was thought to lose; planned: steps
    since it began.
    """

    width: int
    steps: int
    begun: float
    usual: float
    worth: float
    price: float = 0.0
    planned: int = 0

    def cost(self, more: float) -> float:
        """What it loses where all its steps take so many seconds more."""
        return max(more - self.steps * self.worth, SURELY * more, 0.0)


class FixedDraftLength:
    """Always the same width, or where there is no room for it the next one that steps were recorded with; 0 is no
    speculation.
    """

    def __init__(self, width: int) -> None:
        self.max_drafts = width

    def choose(self, emitting: Sequence[Request], most: int) -> int:
        return (
            self.max_drafts
            if self.max_drafts <= most
            else max(width for width in draft_length_choices(self.max_drafts) if width <= most)
        )

    def observe(self, verified: Sequence[VerifiedDrafts]) -> None:
        return

    def note_prefill(self) -> None:
        return

    def disable(self) -> None:
        self.max_drafts = 0


class MeasuredDraftLength:
    """The best width up to those that `times`, `ProfilePoint`s, has. odds: of the drafts between each two choices, how many are
    accepted on average, of all requests; each request has its own. clock: by which steps are timed, in seconds; None is
    none.
    """

    def __init__(
        self, times: Sequence[tuple[int, int, tuple[float, ...]]], clock: Callable[[], float] | None = None
    ) -> None:
        self.times, self.laps = StepTimeModel(times), StepTimer(clock)
        self.max_drafts = self.times.max_drafts
        self.choices = draft_length_choices(self.max_drafts)
        parts = list(pairwise(self.choices))
        self.masks = [(1 << wider) - (1 << width) for width, wider in parts]
        self.sizes = [wider - width for width, wider in parts]
        self.odds = tuple(sum(HOPE ** (1 + i) for i in range(*part)) for part in parts)
        self.owed = 0.0  # seconds that tries may take by now; below 0 after one that took longer than it was thought to
        self.trying: Trial | None = None
        self.tries = self.heard = 0
        self.chosen, self.asked = 0, (0, 0)  # last, and for how many requests with room for how many drafts
        self.planned = self.until = 1  # steps since that was chosen, and how many it is good for

    def choose(self, emitting: Sequence[Request], most: int) -> int:
        if self.planned < self.until and (len(emitting), most) == self.asked:
            self.planned += 1
            return self.chosen
        if not emitting or not self.max_drafts:
            self.note_prefill()
            return 0
        passed, self.asked = self.planned, (len(emitting), most)
        self.planned, self.until = 1, REVIEW
        self.chosen = self._chosen(emitting, self.choices[: bisect_right(self.choices, most)], passed)
        return self.chosen

    def _chosen(self, emitting: Sequence[Request], allowed: Sequence[int], passed: int) -> int:
        """passed: steps since the last choice."""
        rows = len(emitting)
        context, made = sum(r.known for r in emitting) // rows // STRIDE * STRIDE, emitting[0].num_drafts
        if lap := self.laps.lap(rows, made, passed):
            self.times.took(rows, context, made, lap, passed)
        seconds = self.times.seconds(rows, context)
        parts = zip(*(r.draft_odds or self.odds for r in emitting), strict=True)
        tokens = dict(zip(self.choices, accumulate(map(sum, parts), initial=float(rows)), strict=True))
        best = max(allowed, key=lambda width: tokens[width] / seconds[width])
        self.owed += PROBING * passed * seconds[best]
        if self.trying is None:
            self._consider(rows, best, allowed, seconds, tokens)
        return best if (tried := self._tried()) is None else min(tried, allowed[-1])

    def _consider(
        self, rows: int, best: int, allowed: Sequence[int], seconds: Sequence[float], tokens: Mapping[int, float]
    ) -> None:
        """A try: of a width that might be as good and whose time is not known yet or no more, else of more drafts."""
        usual, timed = seconds[best], self.laps.clock is not None
        rate = {width: tokens[width] / seconds[width] for width in allowed}
        close = [width for width in allowed if timed and width != best and rate[width] > CLOSE * rate[best]]
        unknown = [width for width in close if not self.times.known(rows, width)]
        fewer = [width for width in allowed if timed and width < best and (not width or width in close)]
        wider = allowed[allowed.index(best) + 1 :]
        if unknown or fewer and (not wider or self.tries % AGAIN == 0):
            # steps with drafts show nothing of those with fewer, and plain decoding is what this is to be no slower
            # than
            other, steps = max(unknown or fewer, key=lambda width: rate[width]), BURST
            self.times.doubt(rows, other)
        elif wider:
            other, steps = wider[-1 if self.tries % 2 else 0], 1
        else:
            return
        worth = usual * (tokens[other] / tokens[best] - 1)  # as is expected, which may turn out to be wrong
        self._try(Trial(other, steps, self.laps.now, usual, worth), steps * (seconds[other] - usual))

    def _try(self, one: Trial, more: float) -> None:
        """Begins it if it may take so many seconds more."""
        one.price = one.cost(more)
        self.owed = min(self.owed, one.price)  # what is saved up beyond a try would be spent on many at once
        if self.owed >= one.price:
            self.owed -= one.price
            self.tries += 1
            self.trying = one
        else:
            self.until = min(1 + int((one.price - self.owed) / (PROBING * one.usual)), REVIEW)

    def _tried(self) -> int | None:
        """The width of a try that is under way, if one is. When it is over, what it took beyond its price is owed."""
        one = self.trying
        if one is None:
            return None
        self.until = 1
        one.planned += 1
        if one.planned <= one.steps:
            return one.width
        if one.planned > one.steps + SETTLED:
            self.trying = None
            if self.laps.clock:
                self.owed += one.price - one.cost(self.laps.now - one.begun - (one.planned - 1) * one.usual)
        return None

    def note_prefill(self) -> None:
        self.laps.pause()
        self.trying, self.until = None, 0

    def observe(self, verified: Sequence[VerifiedDrafts]) -> None:
        self.until = 0
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
                r.draft_odds = self._moved(r.draft_odds or self.odds, seen[key], RECENT)

    def _accepted(self, drafts: int, path: int) -> list[float]:
        """Of the parts that were drafted as a whole."""
        whole = bisect_right(self.choices, drafts) - 1
        return [float((path & mask).bit_count()) for mask in self.masks[:whole]]

    def _moved(self, odds: Sequence[float], seen: Sequence[float], weight: float) -> tuple[float, ...]:
        """Towards what was seen. Those of drafts that were not made keep their proportion to the last ones that
        were.
        """
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

    def disable(self) -> None:
        self.max_drafts = self.until = 0


def draft_length_choices(max_drafts: int) -> tuple[int, ...]:
    """Widths to choose from: all of them where they are few, else those that with the last known token are as many
    tokens as tiles have rows, and the widest.
    """
    if max_drafts <= FEW:
        return tuple(range(max_drafts + 1))
    tiles = (rows - 1 for rows in (1, 2, 4, 8, 16, 32) if rows <= max_drafts)
    return *tiles, max_drafts
