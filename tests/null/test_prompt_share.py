"""Prompt tokens beside decode rows: chosen by expected cost, within latency targets. `benchmarks/scheduling.py` judges
the choice on traces.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

import msgspec
import pytest

from tests.null.sim.fleet import NoGrammars
from tests.null.test_scheduler import step, submit
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import RadixTree
from thalweg.core.step_times import StepTimes
from thalweg.scheduler.plan_builder import DecodeLoad, LatencyTargets, WaitingPrompt, WholeBudget
from thalweg.scheduler.prompt_share import LEAST_STEP, MARGIN, MAX_DEVIATION, SIZES, CostBasedShare, StepCost
from thalweg.scheduler.requests import Limits
from thalweg.scheduler.scheduler import Scheduler

# A decode step takes 10 ms. Any prompt adds 2 ms, for weights that are read anyway; from 1,000 tokens on, each adds
# 10 us.
KNEE = StepTimes(
    decode=((1, 0.010), (256, 0.010)),
    mixed=((1, ((1, 0.012), (1000, 0.012), (9000, 0.092))),),
    context=1000,
    context_seconds=1e-8,
    pair_seconds=1e-9,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def load(rows: int, context: int = 1000) -> DecodeLoad:
    return DecodeLoad(rows, rows, rows * context)


def prompts(count: int, tokens: int = 8000, seconds: float = 0.0) -> list[WaitingPrompt]:
    return [WaitingPrompt(tokens, 0, seconds, True)] * count


def share(times: StepTimes = KNEE, clock: Clock | None = None, **targets: float) -> CostBasedShare:
    return CostBasedShare(StepCost(times), LatencyTargets(**targets), clock or Clock())


def through_stages(times: StepTimes, stages: int, lengths: list[int], most: int, choice: int = 0) -> list[int]:
    """The steps of these prompts, in turn; choice: of this many tokens each."""
    of, steps = CostBasedShare(StepCost(times), LatencyTargets(), Clock(), stages), []
    for length in lengths:
        start = 0
        while start < length:
            tokens = choice or of.choose(load(0), [WaitingPrompt(length - start, start, 0.0, True)], 0, most)
            steps.append(min(tokens, length - start))
            start += steps[-1]
    return steps


def span(times: StepTimes, stages: int, steps: list[int]) -> float:
    """Seconds until the last of several stages has computed the last step of one prompt."""
    cost, start, free = StepCost(times), 0, [0.0] * stages
    for tokens in steps:
        done = 0.0
        for stage in range(stages):
            done = free[stage] = max(done, free[stage]) + cost.seconds(load(0), tokens, tokens * start)
        start += tokens
    return free[-1]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("length", [3000, 20_000, 120_000])
def test_stages_compute_a_prompt_as_fast_as_in_the_best_equal_steps(stages: int, length: int) -> None:
    times = msgspec.structs.replace(KNEE, pair_seconds=2e-10)
    chosen = through_stages(times, stages, [length], 8192)
    fixed = {size: span(times, stages, through_stages(times, stages, [length], 8192, size)) for size in SIZES[8:17]}
    assert span(times, stages, chosen) <= 1.06 * min(fixed.values()), (chosen[:4], fixed)
    assert sum(chosen) == length and min(chosen) >= LEAST_STEP


def test_steps_through_stages_take_about_the_same_time_however_long_the_context() -> None:
    chosen = through_stages(KNEE, 4, [100_000], 8192)
    cost, starts = StepCost(KNEE), [0, *accumulate(chosen)]
    seconds = [cost.seconds(load(0), n, n * at) for n, at in zip(chosen, starts, strict=False)]
    assert chosen[0] > 2 * chosen[20] and max(seconds[:20]) < 1.4 * seconds[0]
    assert share().choose(load(0), prompts(1), 0, 8192) == 8192, "one stage takes all"
    waiting = CostBasedShare(StepCost(KNEE), LatencyTargets(), Clock(), 4)
    assert waiting.choose(load(0), prompts(1, 100), 0, 8192) == 100 and waiting.choose(load(0), prompts(9), 0, 50) == 50


def test_prompts_alone_keep_the_target_of_decode_rows_that_are_on_their_way_through_stages() -> None:
    clock = Clock()
    cost, of = StepCost(KNEE), CostBasedShare(StepCost(KNEE), LatencyTargets(between_tokens=0.015), clock, 4)
    free = of.choose(load(0), prompts(1), 0, 8192)
    assert cost.seconds(load(0), free, 0) > 0.015, "no request waits for its next token"
    of.expect(0, load(8), 0, 0)
    held = of.choose(load(0), prompts(1), 0, 8192)
    assert 0.95 * MARGIN * 0.015 < cost.seconds(load(0), held, 0) <= MARGIN * 0.015
    assert of.choose(load(0), prompts(1, held + 50), 0, 8192) <= held, "not with a small rest either"
    of.expect(1, load(0), held, 0)
    of.observe(0, False)
    assert of.choose(load(0), prompts(1), 0, 8192) == free, "a step of prompts holds nobody up"


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_rows_wait_no_longer_than_the_target_through_stages(stages: int) -> None:
    """A simulated pipe: each stage takes its part of a step, and a request has a row in every `stages`-th step."""
    clock, cost, target = Clock(), StepCost(KNEE), 0.030
    of = CostBasedShare(cost, LatencyTargets(between_tokens=target), clock, stages)
    free, in_flight, commits, slow = [0.0] * stages, deque[tuple[int, float]](), list[float](), 0
    for number in range(400):
        tokens = of.choose(load(32), prompts(64, seconds=1.0), 0, 8192)
        of.expect(number, load(32), tokens, 0)
        at = clock.now
        for stage in range(stages):
            at = free[stage] = max(at, free[stage]) + cost.seconds(load(32), tokens, 0) / stages
        in_flight.append((number, at))
        if len(in_flight) > stages:
            first, clock.now = in_flight.popleft()
            slow += of.observe(first, True)
            commits.append(clock.now)
    waits = [last - first for first, last in zip(commits[200:], commits[200 + stages :], strict=False)]
    assert 0.7 * target < max(waits) <= target and slow <= stages and cost.factor == pytest.approx(1.0, abs=0.05)


def test_one_request_at_a_time_takes_what_was_measured_through_stages() -> None:
    clock, cost = Clock(), StepCost(KNEE)
    of = CostBasedShare(cost, LatencyTargets(), clock, 4)
    for number in range(200):
        of.expect(number, load(1), 0, 0)
        clock.now += cost.seconds(load(1), 0, 0)
        of.observe(number, True)
    assert cost.factor == pytest.approx(1.0, abs=0.05)


def test_many_decode_rows_hold_a_step_at_the_knee_and_many_waiting_requests_fill_it() -> None:
    assert 768 <= share().choose(load(200), prompts(1), 0, 8192) <= 1536
    assert share().choose(load(1), prompts(100), 0, 8192) == 8192
    assert share().choose(load(16), prompts(1), 999, 8000) == 8000, "requests that are not listed count too"


def test_a_mixed_step_that_seems_shorter_than_decoding_does_not_starve_prompts() -> None:
    """Times are noisy: 64 prompt tokens were measured as taking less than none."""
    noisy = StepTimes(((1, 0.020), (256, 0.020)), ((1, ((64, 0.0197), (256, 0.0205), (1024, 0.030))),), 1000, 0.0, 0.0)
    assert share(noisy).choose(load(250), prompts(1), 0, 8192) >= 128


def test_noise_does_not_grow_beyond_the_measured_rows() -> None:
    lines = ((32, ((64, 0.0220), (1024, 0.0300), (4096, 0.060))), (128, ((64, 0.0225), (1024, 0.0325), (4096, 0.0625))))
    of = share(StepTimes(((32, 0.018), (128, 0.020), (256, 0.022)), lines, 1000, 0.0, 0.0))
    near, far = (of.choose(DecodeLoad(128, tokens, 128_000), prompts(2), 0, 8192) for tokens in (128, 1024))
    assert 0.5 * near <= far <= 2 * near
    assert of.cost.seconds(DecodeLoad(256, 1024, 256_000), 64, 0) >= of.cost.seconds(
        DecodeLoad(256, 1024, 256_000), 0, 0
    )


def test_a_request_that_has_waited_gets_a_larger_share() -> None:
    chosen = [share().choose(load(16), prompts(2, seconds=seconds), 0, 8192) for seconds in (0.0, 0.5, 5.0)]
    assert chosen == sorted(chosen) and chosen[0] < chosen[2] == 8192


def test_a_share_is_no_more_than_what_waits_or_what_the_step_leaves() -> None:
    assert share().choose(load(200), prompts(2, 30), 0, 8192) == 60
    assert share().choose(load(200), prompts(2, 30), 0, 7) == 7
    assert share().choose(load(200), prompts(1, 1), 0, 8192) == 1
    assert share().choose(load(0), prompts(1), 0, 8192) == 8192, "nobody decodes"
    assert WholeBudget().choose(load(200), prompts(1), 0, 8192) == 8192


def test_long_contexts_before_a_chunk_make_it_shorter() -> None:
    fresh, late = (
        share(between_tokens=0.03).choose(load(8), [WaitingPrompt(8000, start, 0.0, True)], 0, 8192)
        for start in (0, 100_000)
    )
    assert late < fresh


def test_a_step_stays_within_the_target_between_tokens() -> None:
    for target in (0.02, 0.04, 0.08):
        tokens = share(between_tokens=target).choose(load(1), prompts(100), 0, 8192)
        assert 0.5 * target < KNEE_COST.seconds(load(1), tokens, 0) <= target
    least = share(between_tokens=0.001).choose(load(1), prompts(100), 0, 8192)
    assert 1 <= least <= 1536, "prompts go on where no step can keep it"


KNEE_COST = StepCost(KNEE)


def test_prompts_are_computed_fast_enough_for_the_target_of_first_tokens() -> None:
    # 256 rows decode and one prompt of 20,000 tokens waits: by cost alone steps have some 1,000 tokens and it takes 20
    # of them, 240 ms
    for target in (0.25, 0.22):
        tokens = share(first_token=target).choose(load(256), prompts(1, 20_000), 0, 8192)
        assert 20_000 / tokens * KNEE_COST.seconds(load(256), tokens, 0) <= target * 1.01
    late = share(first_token=0.1).choose(load(256), prompts(1, 20_000, seconds=0.2), 0, 8192)
    assert late == share().choose(load(256), prompts(1, 20_000, seconds=0.2), 0, 8192), "what is late counts as before"
    impossible = share(first_token=0.05).choose(load(256), prompts(1, 20_000), 0, 8192)
    assert impossible == 8192 or impossible / KNEE_COST.seconds(load(256), impossible, 0) > 50_000, (
        "the fastest there is"
    )


def test_a_preempted_request_has_had_its_first_token() -> None:
    again = [WaitingPrompt(20_000, 0, 0.0, False)]
    assert share(first_token=0.01).choose(load(256), again, 0, 8192) == share().choose(load(256), again, 0, 8192)


def test_real_steps_correct_the_expected_time() -> None:
    clock, times = Clock(), KNEE
    of = share(times, clock, between_tokens=0.04)
    before = of.choose(load(1), prompts(100), 0, 8192)
    for number in range(200):  # all steps take twice as long as measured
        of.expect(number, load(1), 500, 0)
        clock.now += 0.024
        of.observe(number, is_busy=number > 0)
    assert of.cost.factor == pytest.approx(2.0, rel=0.01)
    assert of.choose(load(1), prompts(100), 0, 8192) < before
    clock.now += 1e6  # the machine slept
    of.expect(200, load(1), 500, 0)
    of.observe(200, is_busy=True)
    assert of.cost.factor < 2.0 + MAX_DEVIATION, "one disturbed step changes little"
    clock.now += 1e6
    of.observe(201, is_busy=False)  # after an idle time nothing is learned
    assert of.cost.factor < 2.0 + MAX_DEVIATION


def test_a_step_beyond_the_target_is_reported() -> None:
    clock = Clock()
    of = share(KNEE, clock, between_tokens=0.02)
    missed = []
    for number, (rows, seconds) in enumerate([(1, 0.0), (1, 0.019), (1, 0.021), (0, 0.5)]):
        of.expect(number, load(rows), 10, 0)
        clock.now += seconds
        missed.append(of.observe(number, is_busy=number > 0))
    assert missed == [False, False, True, False], "without decode rows nobody waits for a token"


def scheduler(clock: Clock, **targets: float) -> Scheduler:
    limits = Limits(slots=8, budget=64, context=60, vocab=100, eos_ids=(0,))
    times = StepTimes(((1, 0.01),), ((1, ((1, 0.011), (60, 0.07))),), 10, 0.0, 0.0)
    of = CostBasedShare(StepCost(times), LatencyTargets(**targets), clock)
    return Scheduler(limits, PageAllocator(100, RadixTree(4)), prompt_share=of, grammars=NoGrammars(), clock=clock)


def test_the_scheduler_holds_steps_to_the_chosen_share() -> None:
    clock = Clock()
    b = scheduler(clock, between_tokens=0.02)
    b.handle([submit(1, 30)])
    assert [row.n for row in step(b).rows] == [30], "without decode rows a prompt has the whole budget"
    b.handle([submit(2, 40)])
    sizes = []
    for _ in range(6):
        clock.now += 0.012
        sizes.append([row.n for row in step(b).rows])
    beside = [tokens for first, *rest in sizes for tokens in rest if first == 1 and tokens > 1]
    assert beside and max(beside) <= 24, "17 ms hold 6 prompt tokens; 16 are the least that is tried"


def test_steps_beyond_the_target_are_counted_and_learned_from() -> None:
    clock = Clock()
    b = scheduler(clock, between_tokens=0.05)
    b.handle([submit(1, 4, max_tokens=30)])
    for _ in range(9):
        clock.now += 0.06
        step(b)
    assert b.counters.slow_steps == 8, "the first step is a prompt, which holds nobody up"
    assert b.prompt_share.cost.factor > 2.0  # type: ignore[attr-defined]


def test_late_first_tokens_are_counted() -> None:
    clock = Clock()
    b = scheduler(clock, first_token=0.5)
    b.handle([submit(1, 30)])
    clock.now = 0.4
    step(b)
    b.handle([submit(2, 30)])
    clock.now = 1.0
    step(b)
    step(b)
    assert b.counters.late_first_tokens == 1
