"""How long steps take by the number of drafts, measured at the start on made-up requests: what the choice of a width goes by."""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import msgspec
import torch

from thalweg.core.plan import PAGE, Append, Bind, Row, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.engine.settings import EngineSettings
from thalweg.runner.runner import Runner
from thalweg.scheduler.widths import Rung, choices

log = logging.getLogger("thalweg.engine")

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512  # tokens behind each row
REPEATS = 3
SECONDS = 3.0  # after so many, larger numbers of rows are left to the line through the last two
GREEDY = SamplingParams(temperature=0.0)


def measured(settings: EngineSettings, runner: Runner) -> EngineSettings:
    """The settings with the times, where the width is left to the engine, and the report that says so. The slots are nobody's afterwards."""
    if settings.times is not None:
        return settings
    rungs: list[Rung] = []
    now = clock(settings)
    begun = now()
    for rows in ROWS:
        tokens = rows * (1 + settings.width)
        if rows > min(settings.slots, settings.pages) or tokens > settings.budget:
            break
        rungs.append((rows, _times(runner, settings, rows)))
        if len(rungs) > 1 and now() - begun > SECONDS:
            break
    runner.slots.reset()
    if not rungs:  # not even one request can be verified within the budget of a step
        return msgspec.structs.replace(settings, times=(), width=0)
    rungs = list(smoothed(rungs))
    report = json.loads(settings.report)
    first = ", ".join(f"{1e3 * seconds:.2f} ms with {width}" for width, seconds in enumerate(rungs[0][1]))
    why = f"by what is accepted and how long steps take, at the start {first} for one request"
    value = f"0 to {settings.width}"
    report["speculative_adaptive"] = {"name": "speculative_adaptive", "value": value, "source": "auto", "reason": why}
    log.info("drafts: %s, %s", value, why)
    return msgspec.structs.replace(settings, times=tuple(rungs), report=json.dumps(report))


def _times(runner: Runner, settings: EngineSettings, rows: int) -> tuple[float, ...]:
    """Of a step with so many rows, for each width: those that are chosen from are measured, between them times lie on lines. They take turns, so that
    what keeps the machine busy for a while is the same for all, and of each the least counts, since what disturbs a step only adds to it."""
    room = 3 * (1 + settings.tree.room(settings.width))
    tokens = max(min(CONTEXT, settings.context - room), 1)
    reach = min(tokens + room, settings.context)
    _bind(runner, settings, rows, tokens, reach)
    bound = runner.slots.ints_SI.clone()
    least = dict.fromkeys(choices(settings.width), math.inf)
    for turn in range(1 + REPEATS):
        for width in least:
            runner.slots.ints_SI.copy_(bound)
            made = tuple(Row(slot, slot, tokens - 1, 1 + width, width, True) for slot in range(rows))
            plan = StepPlan(1, 0, made, draft=width, reach=reach)
            _run(runner, plan, settings)  # makes the drafts that the next one verifies
            seconds = _run(runner, plan, settings)
            least[width] = min(least[width], seconds if turn else math.inf)
    return _on_lines(least)


def _on_lines(times: Mapping[int, float]) -> tuple[float, ...]:
    """Of every width, from those of some, 0 and the widest among them."""
    found: list[float] = []
    for width, seconds in times.items():
        steps = width + 1 - len(found)
        last = found[-1] if found else seconds
        found += [last + (seconds - last) * i / steps for i in range(1, steps + 1)]
    return tuple(found)


def smoothed(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """No step takes longer than one of more rows or more drafts: where it seemed to, something disturbed it."""
    found: list[Rung] = []
    above = (math.inf,) * len(rungs[0][1])
    for rows, times in reversed(rungs):
        wider = accumulate(reversed([min(pair) for pair in zip(times, above, strict=True)]), min)
        above = tuple(wider)[::-1]
        found.append((rows, above))
    return tuple(reversed(found))


def _bind(runner: Runner, settings: EngineSettings, rows: int, tokens: int, reach: int) -> None:
    """Made-up requests of so many tokens. They share pages where there are too few: what lies in them does not matter."""
    rng, vocab = random.Random(0), runner.model.facts.vocab
    entries = -(-reach // PAGE)
    for slot in range(rows):
        ids = tuple(rng.randrange(vocab) for _ in range(tokens))
        pages = tuple(1 + (slot * entries + entry) % settings.pages for entry in range(entries))
        runner.slots.bind([Bind(slot, ids, tokens, tokens - 1, settings.context, 0, (), GREEDY)])
        runner.slots.append([Append(slot, 0, pages)])


def _run(runner: Runner, plan: StepPlan, settings: EngineSettings) -> float:
    """Seconds of a whole step, A and B."""
    now = clock(settings)
    _wait(runner)
    begun = now()
    runner.sample(runner.forward(plan), width=plan.draft)
    _wait(runner)
    return now() - begun


def clock(settings: EngineSettings) -> Callable[[], float]:
    """What times steps that run in this thread. One thread of a CPU has a clock of its own, which others that want the CPU do not touch."""
    return time.thread_time if settings.device == "cpu" and settings.threads == 1 else time.perf_counter


def _wait(runner: Runner) -> None:
    if runner.planes.device.type == "cuda":
        torch.cuda.synchronize()
