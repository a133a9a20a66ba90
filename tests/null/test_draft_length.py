"""The draft length policy against the best fixed length, on simulated steps with known times and acceptance."""

from __future__ import annotations

import random
from typing import Any, Callable

import pytest

from tests.null.sim.fleet import NoGrammars
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import NoPrefixCache
from thalweg.core.messages import Submit
from thalweg.core.plan import Output
from thalweg.core.request import Request
from thalweg.core.sampling import SamplingParams
from thalweg.scheduler.draft_length import FixedDraftLength, MeasuredDraftLength, VerifiedDrafts, draft_length_choices
from thalweg.scheduler.requests import Limits
from thalweg.scheduler.scheduler import Scheduler
from thalweg.scheduler.step_times import ProfilePoint, StepTimeModel

WIDEST = 4
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Seconds = Callable[[int], float]
Cost = tuple[Seconds, float]  # of a step that verifies so many tokens; of each draft that is made in it

# weights are read once, and each token adds to that
COSTS: dict[str, Cost] = {
    "bound by memory": (lambda tokens: 1.0 + 0.001 * tokens, 0.03),
    "bound by computing": (lambda tokens: 0.2 + 0.05 * tokens, 0.01),
    "experts": (lambda tokens: float(0.3 + (1 - 0.97**tokens) + 0.002 * tokens), 0.05),
    "dear drafts": (lambda tokens: 1.0 + 0.01 * tokens, 0.4),
}
ODDS = {"never": 0.0, "rarely": 0.2, "half": 0.5, "mostly": 0.85, "always": 1.0}


def times(cost: Cost, rows: tuple[int, ...] = ROWS) -> list[ProfilePoint]:
    verify, draft = cost
    return [
        ProfilePoint(count, 512, tuple(verify(count * (1 + width)) + draft * width for width in range(WIDEST + 1)))
        for count in rows
    ]


def request(uid: int) -> Request:
    return Request(uid, (1,), SamplingParams(), 100)


def rate(policy: Any, cost: Cost, odds: float, rows: int, steps: int, seed: int = 1) -> float:
    """Tokens a second of a batch that goes on and on, each of whose requests lives for some 60 tokens. What is named is
    verified one step later, and heard of two later.
    """
    rng = random.Random(seed)
    batch, uid, made, seconds, tokens = [request(i) for i in range(rows)], rows, 0, 0.0, 0
    heard: list[VerifiedDrafts] = []
    for _ in range(steps):
        width = policy.choose(batch, WIDEST)
        policy.observe(heard)
        heard = []
        seconds += cost[0](rows * (1 + made)) + cost[1] * width
        for i, r in enumerate(batch):
            right = 0
            while right < made and rng.random() < odds:
                right += 1
            tokens += 1 + right
            if made:
                heard.append(VerifiedDrafts(r, made, (1 << right) - 1))
            if rng.random() < (1 + right) / 60:
                batch[i], uid = request(uid), uid + 1
        made = width
    return tokens / seconds


def expected_rate(width: int, cost: Cost, odds: float, rows: int) -> float:
    """Tokens a second with always so many drafts."""
    tokens = rows * sum(odds**depth for depth in range(width + 1))
    return tokens / (cost[0](rows * (1 + width)) + cost[1] * width)


@pytest.mark.parametrize("odds", ODDS)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rows", [1, 3, 32, 256])
def test_it_keeps_up_with_the_best_fixed_width(cost: str, odds: str, rows: int) -> None:
    steps = max(6000 // rows, 100)
    policy = MeasuredDraftLength(times(COSTS[cost]))
    rate(policy, COSTS[cost], ODDS[odds], rows, 100, seed=2)  # an engine that has served a while
    got = rate(policy, COSTS[cost], ODDS[odds], rows, steps)
    fixed = [expected_rate(width, COSTS[cost], ODDS[odds], rows) for width in range(WIDEST + 1)]
    assert got >= 0.98 * fixed[0], f"{got / fixed[0]:.3f} of plain decoding"
    assert got >= 0.95 * max(fixed), f"{got / max(fixed):.3f} of the best width, {fixed.index(max(fixed))}"


def test_it_finds_out_when_drafts_become_good() -> None:
    cost = COSTS["bound by memory"]
    policy = MeasuredDraftLength(times(cost))
    rate(policy, cost, 0.0, 8, 400)
    assert sorted(policy.choose([request(0)] * 8, WIDEST) for _ in range(21))[10] == 0, "but for a try now and then"
    rate(policy, cost, 1.0, 8, 1500)
    assert policy.choose([request(0)] * 8, WIDEST) == WIDEST


def test_what_the_widest_saved_is_not_spent_on_tries() -> None:
    """Hours of drafts that are always right, and then a text of which none is."""
    cost = COSTS["bound by memory"]
    policy = MeasuredDraftLength(times(cost))
    rate(policy, cost, 1.0, 1, 20000)
    rate(policy, cost, 0.0, 1, 300)
    r = request(0)
    policy.observe([VerifiedDrafts(r, WIDEST, 0)] * 100)
    assert sum(policy.choose([r], WIDEST) > 0 for _ in range(200)) < 20


def test_of_widths_that_fit_the_best_is_chosen() -> None:
    """One draft is never worth its time and three are: where only one fits, there is none."""
    policy = MeasuredDraftLength([ProfilePoint(rows, 512, (1.0, 2.5, 2.5, 2.5)) for rows in (1, 8)])
    r = request(0)
    policy.observe([VerifiedDrafts(r, 3, 0b111)] * 200)
    assert policy.choose([r], 3) == 3
    assert sorted(policy.choose([r], 1) for _ in range(21))[10] == 0
    assert policy.choose([r], 0) == 0


def test_acceptance_is_tracked_for_each_request() -> None:
    """With some good drafts and some bad ones in a batch, the width goes by all of them."""
    policy = MeasuredDraftLength(times(COSTS["bound by memory"]))
    good, bad = request(0), request(1)
    for _ in range(100):
        policy.observe([VerifiedDrafts(good, 4, 0b1111), VerifiedDrafts(bad, 4, 0)])
    assert policy.choose([good], WIDEST) == WIDEST
    assert sorted(policy.choose([bad], WIDEST) for _ in range(21))[10] <= 1, "but for a try now and then"
    assert sum(good.acceptance_rates) > 3.5 > 0.1 > sum(bad.acceptance_rates)


def test_times_between_and_beyond_what_was_measured() -> None:
    times = StepTimeModel([ProfilePoint(2, 512, (1.0, 2.0)), ProfilePoint(4, 512, (2.0, 4.0))])
    assert times.seconds(1, 99) == times.seconds(2, 512) == [1.0, 2.0]
    assert times.seconds(3, 512) == [1.5, 3.0] and times.seconds(8, 9999) == [4.0, 8.0]
    assert StepTimeModel([ProfilePoint(2, 512, (1.0, 2.0))]).seconds(50, 512) == [1.0, 2.0]


def test_what_a_longer_context_adds() -> None:
    times = StepTimeModel(
        [ProfilePoint(1, 500, (1.0, 2.0)), ProfilePoint(4, 500, (2.0, 4.0)), ProfilePoint(2, 2500, (2.0, 2.5))]
    )
    for rows in (1, 2, 4, 8):
        near = [*StepTimeModel([ProfilePoint(1, 500, (1.0, 2.0)), ProfilePoint(4, 500, (2.0, 4.0))]).seconds(rows, 500)]
        assert times.seconds(rows, 500) == near
        assert times.seconds(rows, 1500) == pytest.approx([near[0] + rows / 6, near[1]]), "each row adds to it"
        assert times.seconds(rows, 4500) == pytest.approx([near[0] + rows * 2 / 3, near[1]])
    less = times.seconds(4, 0)
    assert less == pytest.approx([2 - 1 / 3, 4]) and times.seconds(64, 0)[0] > 0


def test_tree_acceptance_is_tracked_by_draft_length() -> None:
    """What a width between two of them brought says something of the parts that it had as a whole."""
    policy = MeasuredDraftLength([ProfilePoint(1, 512, (1.0,) * 64)])
    assert policy.choices == draft_length_choices(63) == (0, 1, 3, 7, 15, 31, 63)
    r, before = request(0), policy.acceptance_rates
    for _ in range(300):
        policy.observe([VerifiedDrafts(r, 10, 0b1000101001)])
    assert r.acceptance_rates[:3] == pytest.approx([1, 0, 2], abs=0.01)
    ratio = r.acceptance_rates[2] / before[2]
    assert r.acceptance_rates[3:] == pytest.approx([odds * ratio for odds in before[3:]])
    policy.observe([VerifiedDrafts(r, 63, (1 << 63) - 1)] * 300)
    assert r.acceptance_rates == pytest.approx([1, 2, 4, 8, 16, 32], abs=0.01)
    assert policy.acceptance_rates == pytest.approx([1, 2, 4, 8, 16, 32], rel=0.01)


def test_a_failed_drafter_is_not_called_again() -> None:
    policy = MeasuredDraftLength(times(COSTS["bound by memory"]))
    policy.disable()
    assert policy.max_drafts == 0 and {policy.choose([request(0)], WIDEST) for _ in range(500)} == {0}


def test_drafts_that_do_not_fit_are_as_many_as_were_recorded() -> None:
    scheduler = Scheduler(
        Limits(slots=8, budget=90, context=4096, vocab=100),
        PageAllocator(400, NoPrefixCache(16)),
        draft_length=FixedDraftLength(40),
        grammars=NoGrammars(),
    )
    scheduler.handle([Submit(uid, (1, 2, 3), SamplingParams(max_tokens=1000)) for uid in range(5)])
    width, widths = 0, set()
    for _ in range(6):
        plan = scheduler.plan(width)
        scheduler.mark_launched()
        width = plan.num_drafts
        widths.add(width)
        scheduler.commit(plan, [Output((7,), (1,) * width) for _ in plan.rows])
    assert widths == {15}, "of 17 that fit"


def test_wide_drafts_leave_a_share_of_a_step_to_prompts_that_wait() -> None:
    """Seven requests whose drafts would fill the budget, and a prompt of three chunks."""
    scheduler = Scheduler(
        Limits(slots=8, budget=32, context=4096, vocab=100),
        PageAllocator(400, NoPrefixCache(16)),
        draft_length=FixedDraftLength(7),
        grammars=NoGrammars(),
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    scheduler.handle([Submit(uid, (1, 2, 3), greedy) for uid in range(7)])
    width, first = 0, 0
    for step in range(60):
        if step == 30:
            scheduler.handle([Submit(99, tuple(range(1, 25)), greedy)])
        plan = scheduler.plan(width)
        scheduler.mark_launched()
        width = plan.num_drafts
        scheduler.commit(plan, [Output((7,), (1,) * width) if row.samples else Output() for row in plan.rows])
        scheduler.take_deltas()
        if 10 < step < 30:
            assert width == 32 // 7 - 1 and len(plan.rows) == 7, "nobody is passed by for others' drafts"
        if any(row.uid == 99 and row.samples for row in plan.rows):
            first = first or step
    assert 30 < first < 40
