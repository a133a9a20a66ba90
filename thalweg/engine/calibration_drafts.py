"""How long steps take by the number of drafts, measured at the start on made-up requests: what the choice of a width
goes by.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from thalweg.config.engine import EngineConfig
from thalweg.core.plan import PAGE, Bind, PageAppend, Row, StepPlan
from thalweg.core.report import START_UP, Decision
from thalweg.core.sampling import SamplingParams
from thalweg.runner.runner import Runner
from thalweg.scheduler.draft_length import draft_length_choices
from thalweg.scheduler.step_times import ProfilePoint, StepTimeModel

log = logging.getLogger("thalweg.engine")


class Ladder(NamedTuple):
    """rows of the steps to measure: the first `least`, and of the others as many as there is time for."""

    rows: tuple[int, ...]
    least: int


CONTEXT, FAR = 512, 32768  # tokens behind each row: few, and as many as there may be up to this
NEAR_LADDER = Ladder((1, 2, 4, 8, 16, 32, 64, 128, 256), 2)
FAR_LADDER = Ladder((1, 8, 64), 1)
REPEATS, TURNS = 3, 2  # of each behind the short context; of both, where one is compared with the other
SECONDS = 4.0  # for the short context; larger numbers of rows are left to the line through the last two
SHARE = 0.25  # of what that took: for the long one
GREEDY = SamplingParams(temperature=0.0)


def measured(config: EngineConfig, runner: Runner) -> EngineConfig:
    """The configuration with the times, where the number of drafts is chosen in each step. All slots are free
    afterwards.
    """
    if not config.speculative_adaptive or config.speculative_step_times:
        return config
    now = clock(config)
    begun, most = now(), config.context_length - _room(config)
    near = max(min(CONTEXT, most), 1)
    rungs = smoothed(
        _rungs(config, near, NEAR_LADDER, SECONDS, lambda rows: _times(runner, config, rows, near, REPEATS))
    )
    if rungs and most > 4 * near:  # else the difference says little
        far, short = min(FAR, most), rungs
        share = SHARE * (now() - begun)
        rungs += smoothed(
            _rungs(config, far, FAR_LADDER, share, lambda rows: _longer(runner, config, rows, short, far))
        )
    runner.slots.reset()
    if not rungs:  # not even one request can be verified within the budget of a step
        return config.started((), speculative_adaptive=False, speculative_num_steps=0, speculative_eagle_topk=1)
    first = ", ".join(f"{1e3 * seconds:.2f} ms with {width}" for width, seconds in enumerate(rungs[0].seconds))
    why = f"by what is accepted and how long steps take, at the start {first} for one request"
    value = f"0 to {config.num_drafts}"
    log.info("drafts: %s, %s", value, why)
    return config.started([Decision("speculative_adaptive", value, START_UP, why)], speculative_step_times=rungs)


def _room(config: EngineConfig) -> int:
    """Tokens that the steps which are measured compute behind a context."""
    return 3 * (1 + config.tree.reserved_columns(config.num_drafts))


def _rungs(
    config: EngineConfig, context: int, ladder: Ladder, seconds: float, times: Callable[[int], tuple[float, ...]]
) -> list[ProfilePoint]:
    """times: measures a number of rows behind this context."""
    now, rungs = clock(config), list[ProfilePoint]()
    begun = last = now()
    for rows in ladder.rows:
        tokens = rows * (1 + config.num_drafts)
        if rows > min(config.max_running_requests, config.num_pages) or tokens > config.chunked_prefill_size:
            break
        if len(rungs) >= ladder.least:
            ahead = (now() - last) * rows / rungs[-1].rows  # a row takes no longer than one of fewer
            if now() - begun + ahead > seconds:
                break
        last = now()
        rungs.append(ProfilePoint(rows, context, times(rows)))
    return rungs


def _longer(
    runner: Runner, config: EngineConfig, rows: int, short: Sequence[ProfilePoint], context: int
) -> tuple[float, ...]:
    """Behind a longer context than those. What that adds is little beside what a machine that others use changes its
    pace by from one moment to the next, and many rows multiply it: both are measured in turns, and the difference
    counts.
    """
    near = short[0].context
    turns = [[_times(runner, config, rows, at, 1) for at in (near, context)] for _ in range(TURNS)]
    below, above = (map(min, *times) for times in zip(*turns, strict=True))
    known = StepTimeModel(short).seconds(rows, near)
    return tuple(one + max(more - less, 0.0) for one, less, more in zip(known, below, above, strict=True))


def _times(runner: Runner, config: EngineConfig, rows: int, context: int, repeats: int) -> tuple[float, ...]:
    """Of a step with so many rows, for each width: those that are chosen from are measured, between them times lie on
    lines. They take turns, so that what keeps the machine busy for a while is the same for all, and of each the least
    counts, since what disturbs a step only adds to it.
    """
    reach = min(context + _room(config), config.context_length)
    _bind(runner, config, rows, context, reach)
    bound = runner.slots.ints_SI.clone()
    least = dict.fromkeys(draft_length_choices(config.num_drafts), math.inf)
    for turn in range(1 + repeats):
        for width in least:
            runner.slots.ints_SI.copy_(bound)
            plan = _plan(rows, context, width, reach)
            _run(runner, plan, config)  # makes the drafts that the next one verifies
            seconds = _run(runner, plan, config)
            least[width] = min(least[width], seconds if turn else math.inf)
    runner.slots.ints_SI.copy_(bound)
    least[0] += min(_late(runner, _plan(rows, context, 0, reach), config) for _ in range(2))
    return _on_lines(least)


def _plan(rows: int, context: int, width: int, reach: int) -> StepPlan:
    made = tuple(Row(slot, slot, context - 1, 1 + width, width, True) for slot in range(rows))
    return StepPlan(1, 0, made, num_drafts=width, max_kv_len=reach)


@torch.inference_mode()
def _late(runner: Runner, plan: StepPlan, config: EngineConfig) -> float:
    """Seconds of each step without drafts that its drafter takes later, when it catches up with all that it may lag."""
    drafting, rows, now = runner.drafting, len(plan.rows), clock(config)
    forwarded = runner.forward(plan)
    if not drafting.learns or forwarded is None or forwarded.seen is None:
        return 0.0
    drafting.forget()
    steps = min(drafting.deferred.room(rows), plan.rows[0].start + 1)
    for _ in range(steps):
        drafting.deferred.keep(forwarded.seen, rows)
    _wait(runner)
    begun = now()
    drafting.catch_up()
    _wait(runner)
    return (now() - begun) / steps


def _on_lines(times: Mapping[int, float]) -> tuple[float, ...]:
    """Of every width, from those of some, 0 and the widest among them."""
    found: list[float] = []
    for width, seconds in times.items():
        steps = width + 1 - len(found)
        last = found[-1] if found else seconds
        found += [last + (seconds - last) * i / steps for i in range(1, steps + 1)]
    return tuple(found)


def smoothed(rungs: Sequence[ProfilePoint]) -> tuple[ProfilePoint, ...]:
    """No step takes longer than one of more rows or more drafts: where it seemed to, something disturbed it. All are of
    one context.
    """
    found: list[ProfilePoint] = []
    for rung in reversed(rungs):
        above = found[-1].seconds if found else (math.inf,) * len(rung.seconds)
        least = [min(pair) for pair in zip(rung.seconds, above, strict=True)]
        found.append(rung._replace(seconds=tuple(accumulate(reversed(least), min))[::-1]))
    return tuple(reversed(found))


def _bind(runner: Runner, config: EngineConfig, rows: int, tokens: int, reach: int) -> None:
    """Made-up requests of so many tokens. They share pages where there are too few: what lies in them does not
    matter.
    """
    rng, ids = random.Random(0), range(runner.model.facts.vocab)
    entries = -(-reach // PAGE)
    for slot in range(rows):
        made = tuple(rng.choices(ids, k=tokens))
        pages = tuple(1 + (slot * entries + entry) % config.num_pages for entry in range(entries))
        runner.slots.bind([Bind(slot, made, tokens, tokens - 1, config.context_length, 0, (), GREEDY)])
        runner.slots.append([PageAppend(slot, 0, pages)])


def _run(runner: Runner, plan: StepPlan, config: EngineConfig) -> float:
    """Seconds of a whole step, A and B."""
    now = clock(config)
    _wait(runner)
    begun = now()
    runner.sample(runner.forward(plan), width=plan.num_drafts)
    _wait(runner)
    return now() - begun


def clock(config: EngineConfig) -> Callable[[], float]:
    """What times steps that run in this thread. One thread of a CPU has a clock of its own, which others that want the
    CPU do not touch.
    """
    return time.thread_time if config.device == "cpu" and config.threads == 1 else time.perf_counter


def planning_clock(config: EngineConfig) -> Callable[[], float]:
    """What times steps in the thread that plans them, where others may compute them."""
    return clock(config) if config.max_steps_in_flight == 1 else time.perf_counter


def _wait(runner: Runner) -> None:
    if runner.planes.device.type == "cuda":
        torch.cuda.synchronize()
