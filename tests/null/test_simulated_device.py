"""Scheduler and loop on the simulated device: random mixes equal a sequential decoder, and planted bugs are found."""

from __future__ import annotations

import random

import pytest

from tests.null.sim.bugs import SCHEDULER, planted
from tests.null.sim.clock import Clock
from tests.null.sim.fleet import Rank, Setting, serve
from tests.null.sim.front import Case
from tests.null.sim.mixes import Mix, Result, mix
from thalweg.core.messages import Drain, FlushCache, Submit
from thalweg.core.sampling import SamplingParams

MIXES = 120
CAUGHT = (AssertionError, KeyError, IndexError)
TIGHT = ("scores_twice", "preempted_earns_nothing", "left_behind")  # bugs that only preemption shows


def test_simulated_tokens_equal_a_sequential_decoder():
    total = Result(*map(sum, zip(*map(mix, range(MIXES)), strict=True)))
    assert total.preempted > MIXES // 4 and total.cached > 10 * MIXES and total.aborted > MIXES // 4, total


@pytest.mark.parametrize("bug", SCHEDULER)
def test_a_planted_bug_is_caught(bug: str):
    with planted(bug):
        for seed in range(300):
            try:
                Mix(seed, tight=True if bug in TIGHT else None).run()
            except CAUGHT:
                return
    pytest.fail(f"missed {bug}")


def one_rank(**changes) -> tuple[Rank, Clock, random.Random]:
    clock, rng = Clock(), random.Random(1)
    setting = Setting(**{"slots": 4, "pages": 40, "budget": 64, "stages": 1, "depth": 2, "fail": 1, **changes})
    return Rank(clock, rng, setting), clock, rng


def case(uid: int, prompt: tuple[int, ...] = (1, 2, 3), **changes) -> Case:
    masked = changes.pop("masked", False)
    params = SamplingParams(**{"seed": uid, "max_tokens": 30, "ignore_eos": True, **changes})
    return Case(Submit(uid, prompt, params), context=36, masked=masked)


@pytest.mark.parametrize(
    ("stages", "depth", "masked", "least"),
    [(1, 1, False, 0.65), (1, 2, False, 0.95), (1, 2, True, 0.9), (2, 3, False, 0.8), (4, 5, False, 0.7)],
)
def test_a_saturated_pipeline_keeps_its_stages_busy(stages: int, depth: int, masked: bool, least: float):
    rank, clock, rng = one_rank(slots=16, pages=300, stages=stages, depth=depth)
    for uid in range(48):
        rank.submit(case(uid, (uid % 20 + 1, 2, 3), masked=masked))
    serve([rank], lambda turn: False, clock, rng)
    for c in rank.cases.values():
        c.check()
    rank.check_home()
    assert rank.device.busy / stages / clock.now > least


def test_the_loop_runs_until_it_is_drained():
    """`Loop.run` itself, whose layout is that of one rank."""
    rank, clock, _ = one_rank()
    turns = iter(range(10**6))

    def receive(timeout: float | None):
        clock.spend(2)
        turn = next(turns)
        if timeout is None:
            assert rank.scheduler.is_idle
        if turn == 0:
            cases = [case(uid, tuple(range(1, 2 + uid))) for uid in range(6)]
            rank.cases = {c.submit.uid: c for c in cases}
            return [*(c.submit for c in cases), FlushCache(5)]
        return [Drain()] if turn == 3 else []

    rank.channel.receive = receive
    rank.loop.run()
    rank.hear()
    for c in rank.cases.values():
        c.check()
    assert rank.done == [5] and rank.loop.busy_seconds > 0.0
    rank.check_home()


def test_a_burst_with_one_system_prompt_prefills_it_once():
    rank, clock, rng = one_rank(slots=8, budget=64)
    system = tuple(range(1, 17))
    for uid in range(8):
        rank.submit(case(uid, (*system, uid + 1), max_tokens=1))
    serve([rank], lambda turn: False, clock, rng)
    rank.check_home()
    assert rank.device.computed == 17 + 7 * 1
    assert [c.deltas[0].cached for c in rank.cases.values()] == [0] + [16] * 7


@pytest.mark.parametrize("radix", [True, False])
def test_radix_off_changes_no_token(radix: bool):
    rank, clock, rng = one_rank(radix=radix)
    for uid in range(6):
        rank.submit(case(uid, tuple(range(1, 12)), max_tokens=9))
    serve([rank], lambda turn: False, clock, rng)
    for c in rank.cases.values():
        c.check()
    assert (rank.scheduler.counters.cached_tokens > 0) == radix


def test_ranks_agree_on_steps_while_some_are_idle():
    clock, rng = Clock(), random.Random(3)
    ranks = [Rank(clock, rng, Setting(2, 20, 16, stages=2, depth=3, fail=0)) for _ in range(3)]
    ranks[1].submit(case(0))
    serve(ranks, lambda turn: False, clock, rng)
    ranks[1].cases[0].check()
    assert (
        len({rank.scheduler.step for rank in ranks}) == 1
        and ranks[0].scheduler.last_committed_step == ranks[1].scheduler.last_committed_step
    )
