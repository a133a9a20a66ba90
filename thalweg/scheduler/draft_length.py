"""Draft-length policies: how many tokens to draft, so that most tokens a second are produced.

Verifying more drafts takes longer, the more so with many rows, and yields more tokens, the more so with good drafts.
Step times are known from start-up and from real steps, acceptance from every verification. What longer drafts would
yield is learned in trials: rare steps with a few more drafts, or with as many as possible (if one more is never worth
its time, many may be). Trials cost less than a hundredth of the time. The times of draft lengths that might be the best
are learned in the same way, some steps at once, because the first one waits for deferred draft KV.

The acceptance rate of a draft is the probability that it is accepted, which includes the drafts before it. So drafts of
a chain and nodes of a tree are the same here: the expected number of tokens is the sum of the rates. The rates of the
drafts between two selectable lengths are stored as one sum, so a step with many rows needs a few numbers per row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from thalweg.core.request import Request
from thalweg.scheduler.step_times import StepTimeModel, StepTimer

INITIAL_ACCEPTANCE_RATE = 0.8  # of an unknown draft, given the one before
MIN_ACCEPTANCE_RATE = 1e-3  # so that they can rise again in proportion
FEW = 8  # up to so many drafts every number is selectable
REQUEST_WEIGHT, GLOBAL_WEIGHT = 0.05, 0.02  # of a verification in the rates of its request, and in the global rates
INITIAL_WEIGHT = 4  # verifications that the initial rates count as
TRIAL_SHARE = 0.006  # of the time
CERTAIN_LOSS = 0.2  # of the extra time of a trial counts as lost, whatever it may yield
REVIEW = 8  # steps until a choice is reviewed; a review takes a hundredth of a short step
CLOSE = 0.75  # of the best rate: below it the exact time of a length does not matter
STRIDE = 64  # tokens of context that make no difference
EVERY = 4  # one trial in so many is of fewer drafts, if they are nearly as good
BURST = 3  # steps of a trial that measures times
SETTLED = 3  # plans after its last step, when a trial is over even if steps overlap


class VerifiedDrafts(NamedTuple):
    """One verification."""

    request: Request
    num_drafts: int  # at least one
    accepted_mask: int  # bit i is set if draft i was accepted


class DraftLengthPolicy(Protocol):
    """Chooses the number of drafts of each step."""

    @property
    def max_drafts(self) -> int:
        """The most that it will ever choose."""

    def choose(self, sampling: Sequence[Request], most: int) -> int:
        """Drafts that a step proposes for these requests, at most `most`."""

    def observe(self, verified: Sequence[VerifiedDrafts]) -> None:
        """Learns from the verifications of a step."""

    def note_prefill(self) -> None:
        """The step that is planned now computes prompts too, so its time says nothing about drafts."""

    def disable(self) -> None:
        """The drafter has failed: from now on the number is 0."""


class FixedDraftLength:
    """Always the same number, or the largest captured one below `most`. 0: no speculation."""

    def __init__(self, num_drafts: int) -> None:
        self.max_drafts = num_drafts

    def choose(self, sampling: Sequence[Request], most: int) -> int:
        return max(length for length in draft_length_choices(self.max_drafts) if length <= max(most, 0))

    def observe(self, verified: Sequence[VerifiedDrafts]) -> None:
        return

    def note_prefill(self) -> None:
        return

    def disable(self) -> None:
        self.max_drafts = 0


@dataclass(slots=True)
class Trial:
    """Some steps with another number of drafts than the best one."""

    length: int
    steps: int
    begun: float  # seconds, of the clock
    usual: float  # seconds of a step with the best length
    worth: float  # seconds of usual steps that yield what a trial step is expected to yield in addition
    price: float = 0.0  # seconds that it was expected to lose
    planned: int = 0  # steps since it began

    def loss(self, extra: float) -> float:
        """Seconds lost if all its steps together take `extra` seconds more than usual ones."""
        return max(extra - self.steps * self.worth, CERTAIN_LOSS * extra, 0.0)


class MeasuredDraftLength:
    """The best length by measured step times and observed acceptance."""

    def __init__(
        self, points: Sequence[tuple[int, int, tuple[float, ...]]], clock: Callable[[], float] | None = None
    ) -> None:
        """points: as `ProfilePoint`. clock: times real steps, in seconds; None: no correction of the points."""
        self.times, self.timer = StepTimeModel(points), StepTimer(clock)
        self.max_drafts = self.times.max_drafts
        self.choices = draft_length_choices(self.max_drafts)
        parts = list(pairwise(self.choices))  # the drafts between two choices
        self.masks = [(1 << longer) - (1 << length) for length, longer in parts]
        self.sizes = [longer - length for length, longer in parts]
        # by part: accepted drafts of a verification on average over all requests; each request has its own, too
        self.acceptance_rates = tuple(sum(INITIAL_ACCEPTANCE_RATE ** (1 + i) for i in range(*part)) for part in parts)
        self.verifications = 0
        self.budget = 0.0  # seconds that trials may take now; negative after an expensive one
        self.trial: Trial | None = None
        self.num_trials = 0
        self.chosen, self.chosen_for = 0, (0, 0)  # last choice, and its (requests, most)
        self.planned, self.review_at = 1, 1  # steps since the choice, and how many it is good for

    def choose(self, sampling: Sequence[Request], most: int) -> int:
        if self.planned < self.review_at and (len(sampling), most) == self.chosen_for:
            self.planned += 1
            return self.chosen
        if not sampling or not self.max_drafts:
            self.note_prefill()
            return 0
        passed, self.chosen_for = self.planned, (len(sampling), most)
        self.planned, self.review_at = 1, REVIEW
        self.chosen = self._best(sampling, self.choices[: bisect_right(self.choices, most)], passed)
        return self.chosen

    def _best(self, sampling: Sequence[Request], allowed: Sequence[int], passed: int) -> int:
        """passed: steps since the last choice."""
        rows, verified = len(sampling), sampling[0].num_drafts
        context = sum(r.num_tokens for r in sampling) // rows // STRIDE * STRIDE
        if lap := self.timer.lap(rows, verified, passed):
            self.times.observe(rows, context, verified, lap, passed)
        seconds = self.times.seconds(rows, context)
        parts = zip(*(r.acceptance_rates or self.acceptance_rates for r in sampling), strict=True)
        tokens = dict(zip(self.choices, accumulate(map(sum, parts), initial=float(rows)), strict=True))
        best = max(allowed, key=lambda length: tokens[length] / seconds[length])
        self.budget += TRIAL_SHARE * passed * seconds[best]
        if self.trial is None:
            self._consider_trial(rows, best, allowed, seconds, tokens)
        length = self._trial_length()
        return best if length is None else min(length, allowed[-1])

    def _consider_trial(
        self, rows: int, best: int, allowed: Sequence[int], seconds: Sequence[float], tokens: Mapping[int, float]
    ) -> None:
        """Tries a length that might be as good and whose time is not known, else a longer one."""
        close, fewer, longer = [], [], allowed[allowed.index(best) + 1 :]
        rate = {length: tokens[length] / seconds[length] for length in allowed}
        if self.timer.clock is not None:
            close = [length for length in allowed if length != best and rate[length] > CLOSE * rate[best]]
            # steps with drafts say nothing about steps without, and speculation must not be slower than those
            fewer = [length for length in allowed if length < best and (not length or length in close)]
        unknown = [length for length in close if not self.times.is_known(rows, length)]
        if unknown or fewer and (not longer or self.num_trials % EVERY == 0):
            other, steps = max(unknown or fewer, key=lambda length: rate[length]), BURST
            self.times.doubt(rows, other)
        elif longer:
            other, steps = longer[-1 if self.num_trials % 2 else 0], 1
        else:
            return
        usual = seconds[best]
        worth = usual * (tokens[other] / tokens[best] - 1)  # as expected, which may be wrong
        trial = Trial(other, steps, self.timer.now, usual, worth)
        trial.price = trial.loss(steps * (seconds[other] - usual))
        self.budget = min(self.budget, trial.price)  # savings beyond one trial would be spent on many at once
        if self.budget >= trial.price:
            self.budget -= trial.price
            self.num_trials += 1
            self.trial = trial
        else:
            self.review_at = min(1 + int((trial.price - self.budget) / (TRIAL_SHARE * usual)), REVIEW)

    def _trial_length(self) -> int | None:
        """The length of the trial under way. When a trial is over, the budget pays what it took beyond its price."""
        trial = self.trial
        if trial is None:
            return None
        self.review_at = 1
        trial.planned += 1
        if trial.planned <= trial.steps:
            return trial.length
        if trial.planned > trial.steps + SETTLED:
            self.trial = None
            if self.timer.clock:
                extra = self.timer.now - trial.begun - (trial.planned - 1) * trial.usual
                self.budget += trial.price - trial.loss(extra)
        return None

    def note_prefill(self) -> None:
        self.timer.pause()
        self.trial, self.review_at = None, 0

    def observe(self, verified: Sequence[VerifiedDrafts]) -> None:
        self.review_at = 0
        requests: dict[tuple[int, int], list[Request]] = {}  # by (number of drafts, accepted mask)
        for r, num_drafts, accepted_mask in verified:
            requests.setdefault((num_drafts, accepted_mask), []).append(r)
        accepted = {key: self._accepted(*key) for key in requests}  # by part
        sums: dict[int, list[float]] = {}  # by number of drafted parts: verifications, then accepted drafts by part
        for key, group in requests.items():
            total = sums.setdefault(len(accepted[key]), [0.0] * (1 + len(accepted[key])))
            for i, count in enumerate((1.0, *accepted[key])):
                total[i] += len(group) * count
        for count, *total in sums.values():
            self.verifications += int(count)
            weight = max(1 - (1 - GLOBAL_WEIGHT) ** count, count / (INITIAL_WEIGHT + self.verifications))
            self.acceptance_rates = self._updated(self.acceptance_rates, [part / count for part in total], weight)
        for key, group in requests.items():  # a request begins with the global rates
            for r in group:
                r.acceptance_rates = self._updated(
                    r.acceptance_rates or self.acceptance_rates, accepted[key], REQUEST_WEIGHT
                )

    def _accepted(self, num_drafts: int, accepted_mask: int) -> list[float]:
        """Accepted drafts of each part that was drafted as a whole."""
        whole = bisect_right(self.choices, num_drafts) - 1
        return [float((accepted_mask & mask).bit_count()) for mask in self.masks[:whole]]

    def _updated(
        self, acceptance_rates: Sequence[float], accepted: Sequence[float], weight: float
    ) -> tuple[float, ...]:
        """Moves the rates towards `accepted`. Parts that were not drafted keep their ratio to the last one that was."""
        updated = [
            (1 - weight) * a + weight * (b + MIN_ACCEPTANCE_RATE)
            for a, b in zip(acceptance_rates, accepted, strict=False)
        ]
        drafted = len(updated)
        if drafted < len(acceptance_rates):
            change = updated[-1] / acceptance_rates[drafted - 1]
            rest = zip(acceptance_rates[drafted:], self.sizes[drafted:], strict=True)
            updated += [min(max(value * change, MIN_ACCEPTANCE_RATE), size) for value, size in rest]
        return tuple(updated)

    def disable(self) -> None:
        self.max_drafts = self.review_at = 0


def draft_length_choices(max_drafts: int) -> tuple[int, ...]:
    """Selectable numbers of drafts: all if they are few, else those that fill a tile of rows together with the last
    known token, and the largest.
    """
    if max_drafts <= FEW:
        return tuple(range(max_drafts + 1))
    return *(rows - 1 for rows in (1, 2, 4, 8, 16, 32) if rows <= max_drafts), max_drafts
