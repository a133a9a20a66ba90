"""The draft length on simulated machines: never much slower than plain decoding or the best fixed length, with the cost
of trials, deferred draft KV, and slightly wrong times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Protocol, Sequence

import pytest

from thalweg.core.request import Request
from thalweg.core.sampling import SamplingParams
from thalweg.scheduler.draft_length import MeasuredDraftLength, VerifiedDrafts
from thalweg.scheduler.step_times import ProfilePoint, StepTimeModel, StepTimer

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FAR_ROWS = (1, 8, 64)  # that are measured behind a long context
SHORT, LONG = 512, 32768  # tokens before a step's
LATE = 0.008  # of the time of a step without drafts: what a drafter catches up with
SLOWER, BEHIND = 0.98, 0.95  # of plain decoding, of the best fixed width

Odds = Sequence[float]  # of a draft at each depth to be right, given those before it


class Machine(Protocol):
    max_drafts: int

    def step(self, rows: int, verified: int, drafted: int, context: int = SHORT) -> float:
        """Seconds of a step that verifies so many drafts of each row behind so much context, and makes so many."""


@dataclass(frozen=True)
class Made:
    """fixed: weights are read once; token: each adds to that; experts: read by few tokens in part, by many all; draft:
    each, and of each row. Of 1,024 tokens of context, which are read: in each row once, pair: by each token that is
    verified, drafting: in each row by each draft.
    """

    max_drafts: int
    token: float
    experts: float
    part: float
    draft: float
    draft_row: float
    fixed: float = 1.0
    row: float = 0.0
    pair: float = 0.0
    drafting: float = 0.0

    def step(self, rows: int, verified: int, drafted: int, context: int = SHORT) -> float:
        tokens, far = rows * (1 + verified), context / 1024
        seconds = self.fixed + self.token * tokens + self.experts * (1 - (1 - self.part) ** tokens)
        seconds += far * (rows * self.row + tokens * self.pair + rows * drafted * self.drafting)
        return seconds + drafted * (self.draft + self.draft_row * rows) + LATE * self.fixed * (not drafted)


@dataclass(frozen=True)
class Table:
    """Times that were measured: of a step with so many rows, that verifies as many drafts as it makes."""

    seconds: dict[int, tuple[float, ...]]
    max_drafts: int = 3

    def step(self, rows: int, verified: int, drafted: int, context: int = SHORT) -> float:
        times = self.seconds[rows]
        return (times[verified] + times[drafted]) / 2 + LATE * times[0] * (not drafted)


# the bundled model on an EPYC core, ms: a draft costs half a step, so that only many right ones are worth it
TINY = Table({1: (1.94, 4.76, 5.79, 6.91), 4: (4.02, 8.67, 10.76, 13.02), 8: (6.4, 11.4, 15.2, 18.5)})


@dataclass(frozen=True)
class Lagging:
    """One whose drafter has to catch up before its first drafts: that takes so long."""

    machine: Table
    catching_up: float

    @property
    def widest(self) -> int:
        return self.machine.max_drafts

    def step(self, rows: int, verified: int, drafted: int, context: int = SHORT) -> float:
        return self.machine.step(rows, verified, drafted) + self.catching_up * (drafted > 0 == verified)


def any_machine(rng: random.Random) -> Made:
    token = 10 ** rng.uniform(-4, -0.5)
    experts, part = rng.choice((0.0, rng.uniform(0, 1))), 10 ** rng.uniform(-2.5, -0.7)
    return Made(
        rng.choice((1, 2, 3, 4, 7)), token, experts, part, 10 ** rng.uniform(-2.5, -0.3), token * rng.uniform(0.02, 0.4)
    )


def measured(machine: Machine, rng: random.Random, rows: Sequence[int] = ROWS, far: bool = False) -> list[ProfilePoint]:
    """As the engine measures: up to a fiftieth too long. far: behind a long context too."""
    widths = range(machine.max_drafts + 1)
    points = [(n, SHORT) for n in rows] + [(n, LONG) for n in FAR_ROWS if far]
    return [
        ProfilePoint(n, at, tuple(machine.step(n, w, w, at) * rng.uniform(1, 1.02) for w in widths)) for n, at in points
    ]


def fixed(machine: Machine, rows: int, phases: Sequence[Odds], context: int = SHORT) -> list[float]:
    """Tokens a second of each width, on average over phases of equally many tokens; width 0 without any drafter is
    plain decoding.
    """
    found = []
    for width in range(machine.max_drafts + 1):
        late = LATE * machine.step(rows, 0, 0) / (1 + LATE) * (not width)
        seconds = machine.step(rows, width, width, context) - late
        spent = 0.0
        for odds in phases:
            tokens, right = 1.0, 1.0
            for chance in odds[:width]:
                right *= chance
                tokens += right
            spent += seconds / (rows * tokens)
        found.append(len(phases) / spent)
    return found


def chosen(
    machine: Machine,
    rows: int,
    phases: Sequence[Odds],
    each: int,
    seed: int,
    warm: bool = True,
    context: int = SHORT,
    seen: Machine | None = None,
) -> float:
    """Tokens a second of the policy's choice, over phases of `each` tokens, behind a round of all of them where it is
    warm. Requests are some 150 tokens long. What is named is verified a step later, and heard of two later. seen: what
    the machine was taken for at the start.
    """
    rng = random.Random(seed)
    seen = seen or machine
    numbers = tuple(seen.seconds) if isinstance(seen, Table) else ROWS
    heard: list[VerifiedDrafts] = []
    made, seconds, tokens, passed = 0, 0.0, 0, 0.0
    policy = MeasuredDraftLength(measured(seen, rng, numbers, far=context != SHORT), lambda: passed)
    prompt = (1,) * context
    batch, uid = [Request(i, prompt, SamplingParams(), 1 << 20) for i in range(rows)], rows
    for _ in range(1 + warm):
        seconds = tokens = 0
        for odds in phases:
            until = tokens + each
            while tokens < until:
                width = policy.choose(batch, policy.max_drafts)
                policy.observe(heard)
                heard = []
                took = machine.step(rows, made, width, context)
                seconds, passed = seconds + took, passed + took
                for i, r in enumerate(batch):
                    right = 0
                    while right < made and rng.random() < odds[right]:
                        right += 1
                    tokens += 1 + right
                    if made:
                        heard.append(VerifiedDrafts(r, made, (1 << right) - 1))
                    if rng.random() < (1 + right) / 150:
                        batch[i], uid = Request(uid, prompt, SamplingParams(), 1 << 20), uid + 1
                made = width
                for r in batch:
                    r.num_drafts = width
    return tokens / seconds


def check(
    machine: Machine, rows: int, phases: Sequence[Odds], each: int, seed: int, warm: bool = True, context: int = SHORT
) -> None:
    got, best = chosen(machine, rows, phases, each, seed, warm, context), fixed(machine, rows, phases, context)
    where = f"{machine}, {rows} rows behind {context}, {phases}"
    assert got >= SLOWER * best[0], f"{got / best[0]:.3f} of plain decoding: {where}"
    assert got >= BEHIND * max(best), f"{got / max(best):.3f} of the best, {best.index(max(best))} drafts: {where}"


@pytest.mark.parametrize("seed", range(8))
def test_any_machine_batch_and_acceptance(seed: int) -> None:
    rng = random.Random(seed)
    machine, rows = any_machine(rng), rng.choice((1, 2, 3, 5, 8, 16, 32, 64, 100, 256))
    first, fading = rng.choice((0.0, 0.2, 0.5, 0.7, 0.85, 0.95, 1.0)), rng.choice((1.0, 0.95, 0.8))
    check(machine, rows, [[first * fading**depth for depth in range(machine.max_drafts)]], max(15000, 250 * rows), seed)


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("odds", [(1.0, 1.0, 1.0), (0.99, 0.67, 0.65), (0.6, 0.5, 0.5), (0.0, 0.0, 0.0)], ids=str)
def test_a_machine_where_one_draft_is_never_worth_its_time(rows: int, odds: Odds) -> None:
    """And three are, where all are right: trying one more than the best so far would never find out."""
    check(TINY, rows, [odds], 6000, seed=1)


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_from_the_first_token_on_it_is_no_slower_than_plain_decoding(rows: int) -> None:
    for machine in (Made(4, 0.02, 0.0, 0.01, 0.3, 0.001), TINY):
        if rows in ROWS and (machine is not TINY or rows in TINY.seconds):
            odds = [0.05] * machine.max_drafts
            got = chosen(machine, rows, [odds], 12000 + 300 * rows, 3, warm=False)
            assert got >= SLOWER * fixed(machine, rows, [odds])[0]


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("seed", range(1))
def test_acceptance_that_drifts(rows: int, seed: int) -> None:
    """From text that is foreseen to text that is not, and back."""
    rng = random.Random(seed)
    machine = Made(3, 10 ** rng.uniform(-4, -2), 0.0, 0.01, rng.uniform(0.02, 0.2), 0.0)
    check(machine, rows, [(0.95, 0.9, 0.85), (0.1, 0.1, 0.1), (0.6, 0.5, 0.4)], 4000 + 60 * rows, seed)


@pytest.mark.parametrize("context", [60, 4096, 32768, 65536])
@pytest.mark.parametrize("seed", range(2))
def test_times_that_change_with_the_context(seed: int, context: int) -> None:
    """Attention to a long context is as long as the weights take, or much longer: where it only reads, verification is
    nearly free; where each token computes as much again, it never pays.
    """
    rng = random.Random(seed)
    machine, rows = any_machine(rng), rng.choice((1, 3, 8, 32, 100, 256))
    most = rng.choice((0.03, 0.3, 3.0)) / rows  # for 1,024 tokens, of the weights' time
    row, pair = rng.choice(((most, 0.0), (0.0, most), (most / 2, most / 4)))
    far = replace(machine, row=row, pair=pair, drafting=most * rng.choice((0.0, 0.02)))
    odds = [0.8 * 0.9**depth for depth in range(machine.max_drafts)]
    check(far, rows, [odds], max(4000, 200 * rows), seed, context=context)


def test_one_context_says_nothing_of_another() -> None:
    """Where verification is nearly free behind 32k tokens, and dear behind few; and the other way round."""
    odds = [0.75, 0.6, 0.5]
    reading = Made(3, 5.0, 0.0, 0.01, 0.1, 0.0, row=0.5)
    computing = Made(3, 0.001, 0.0, 0.01, 0.02, 0.0, pair=0.2)
    for machine, best in ((reading, (0, 2)), (computing, (3, 0))):
        for context, width in zip((SHORT, LONG), best, strict=True):
            rates = fixed(machine, 1, [odds], context)
            assert rates.index(max(rates)) == width
            check(machine, 1, [odds], 4000, seed=1, context=context)


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize(
    ("rows", "taken_for", "is_", "odds"),
    [
        (32, (9.17, 19.41, 30.47, 32.71), (11.85, 23.12, 31.19, 40.41), (1.0, 1.0, 0.0)),
        (8, (5.91, 12.29, 13.74, 17.45), (6.74, 11.04, 13.92, 17.89), (0.95, 0.67, 0.6)),
        (1, (2.6, 4.0, 5.0, 6.0), (1.95, 4.55, 5.87, 6.81), (0.86, 0.5, 0.4)),
        (1, (1.0, 1.5, 2.0, 2.5), (1.3, 1.5, 1.7, 1.9), (0.7, 0.6, 0.5)),
        (64, (2.0, 3.0, 4.0, 5.0), (1.5, 3.0, 4.4, 5.6), (0.6, 0.4, 0.3)),
    ],
    ids=str,
)
def test_times_that_were_measured_wrong(
    rows: int, taken_for: tuple[float, ...], is_: tuple[float, ...], odds: Odds, seed: int
) -> None:
    """On a machine that others use, or of made-up requests: what steps take is learned from them. The first are what
    the bundled model showed.
    """
    real, seen = Table({rows: is_}), Table({rows: taken_for})
    best = fixed(real, rows, [odds])
    got = chosen(real, rows, [odds], max(6000, 2000 * rows), seed, seen=seen)
    assert got >= SLOWER * best[0], f"{got / best[0]:.3f} of plain decoding"
    assert got >= BEHIND * max(best), f"{got / max(best):.3f} of the best, {best.index(max(best))} drafts"


@pytest.mark.parametrize("rows", [1, 8])
def test_tries_that_take_longer_than_they_were_thought_to_become_fewer(rows: int) -> None:
    """A drafter that lags catches up before the first draft, of which the times of its steps know nothing."""
    machine, odds = Lagging(TINY, 1.5 * TINY.step(rows, 0, 0)), (0.6, 0.5, 0.4)
    got, plain = chosen(machine, rows, [odds], 8000 * rows, 1, seen=TINY), fixed(TINY, rows, [odds])[0]
    assert got >= SLOWER * plain, f"{got / plain:.3f} of plain decoding"


def test_a_choice_is_good_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making it takes a hundredth of a short step. What was learned is considered at once, and others who sample,
    too.
    """
    policy, asked = MeasuredDraftLength([ProfilePoint(n, SHORT, (1.0, 2.2, 3.4)) for n in (1, 2)]), list[int]()
    seconds = policy.times.seconds
    monkeypatch.setattr(policy.times, "seconds", lambda rows, context: asked.append(rows) or seconds(rows, context))
    r, other = (Request(uid, (1,), SamplingParams(), 1 << 20) for uid in range(2))
    policy.observe([VerifiedDrafts(r, 2, 0)] * 200)
    assert policy.choose([r], 2) == 0
    asked.clear()
    widths = [policy.choose([r], 2) for _ in range(400)]
    assert widths.count(0) > 390 and 40 <= len(asked) <= 100
    policy.choose([r, other], 2)
    assert asked[-1] == 2
    policy.observe([VerifiedDrafts(r, 2, 3)] * 200)
    assert policy.choose([r], 2) == 2 and policy.choose([r], 1) <= 1


def test_only_steps_like_those_around_them_are_timed() -> None:
    """Where steps overlap, the time between two plans is that of an earlier step."""
    now = 0.0
    laps, found = StepTimer(lambda: now), list[float]()
    assert laps.lap(2, 0, 1) == 0, "what is planned beside prompts takes as long as these"
    for seconds, rows, drafts, steps in (
        (9, 2, 0, 1), (1, 2, 0, 1), (1, 2, 0, 1), (8, 2, 0, 8), (1, 2, 3, 1), (4, 2, 3, 1), (5, 2, 3, 1), (5, 3, 3, 1),
    ):  # fmt: skip
        now += seconds
        found.append(laps.lap(rows, drafts, steps))
    assert found == [0, 0, 1, 1, 0, 0, 5, 0]
    laps.pause()
    found = [laps.lap(3, 3, 1)]
    for steps in (8, 8):
        now += 40.0
        found.append(laps.lap(3, 3, steps))
    assert found == [0, 0, 5] and StepTimer(None).lap(3, 3, 1) == 0


def test_an_outlier_step_time_is_ignored() -> None:
    times = StepTimeModel([ProfilePoint(1, SHORT, (1.0, 2.0))])
    for _ in range(100):
        times.observe(1, SHORT, 0, 1.2)
    assert times.seconds(1, SHORT) == pytest.approx([1.2, 2.0], rel=0.02), "of another width nothing is known"
    times.observe(1, SHORT, 0, 500.0)
    assert times.seconds(1, SHORT)[0] < 1.3
    times.observe(1, SHORT, 0, 1.2, steps=100)
    times.observe(1, SHORT, 1, 1.7, steps=3)
    assert times.is_known(1, 1) and not times.is_known(2, 0)
    assert times.seconds(1, SHORT) == pytest.approx([1.2, 1.775], rel=0.05), "what was measured counts as a step"
    assert times.seconds(2, SHORT) == [1.0, 2.0], "nor of other numbers of rows"


class Recovering:
    """A machine whose steps without drafts took much longer at first."""

    widest = TINY.max_drafts

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def step(self, rows: int, verified: int, drafted: int, context: int = SHORT) -> float:
        self.steps -= 1
        return TINY.step(rows, verified, drafted) * (1.8 if self.steps > 0 == verified == drafted else 1.0)


def test_plain_decoding_is_timed_again_where_it_may_be_the_best() -> None:
    """Steps with drafts show nothing of it, and one that something disturbed for a while would be thought slow for
    ever.
    """
    odds, seen = (0.86, 0.6, 0.5), list[float]()
    for seed in range(3):
        seen.append(chosen(Recovering(400), 1, [odds], 8000, seed, seen=TINY) / fixed(TINY, 1, [odds])[0])
    assert min(seen) >= SLOWER, f"{min(seen):.3f} of plain decoding"
