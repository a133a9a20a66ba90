"""How long steps take by the number of drafts, measured at the start on made-up requests: what the choice of a width goes by."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterator

import msgspec
import torch

from thalweg.core.plan import PAGE, Append, Bind, Row, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.engine.settings import EngineSettings
from thalweg.runner.runner import Runner
from thalweg.scheduler.widths import Rung

log = logging.getLogger("thalweg.engine")

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512  # tokens behind each row
REPEATS = 4
SECONDS = 3.0  # after so many, larger numbers of rows are left to the line through the last two
GREEDY = SamplingParams(temperature=0.0)


def measured(settings: EngineSettings, runner: Runner) -> EngineSettings:
    """The settings with the times, where the width is left to the engine, and the report that says so. The slots are nobody's afterwards."""
    if settings.times is not None:
        return settings
    rungs: list[Rung] = []
    begun = time.perf_counter()
    for rows in ROWS:
        tokens = rows * (1 + settings.width)
        if rows > min(settings.slots, settings.pages) or tokens > settings.budget:
            break
        rungs.append((rows, tuple(_seconds(runner, settings, rows, width) for width in range(settings.width + 1))))
        if time.perf_counter() - begun > SECONDS:
            break
    runner.slots.reset()
    if not rungs:  # not even one request can be verified within the budget of a step
        return msgspec.structs.replace(settings, times=(), width=0)
    report = json.loads(settings.report)
    first = ", ".join(f"{1e3 * seconds:.2f} ms with {width}" for width, seconds in enumerate(rungs[0][1]))
    why = f"by what is accepted and how long steps take, at the start {first} for one request"
    value = f"0 to {settings.width}"
    report["speculative_adaptive"] = {"name": "speculative_adaptive", "value": value, "source": "auto", "reason": why}
    log.info("drafts: %s, %s", value, why)
    return msgspec.structs.replace(settings, times=tuple(rungs), report=json.dumps(report))


def _seconds(runner: Runner, settings: EngineSettings, rows: int, width: int) -> float:
    """Of a whole step, A and B: the least of a few, since what disturbs a step only adds to it; the first is not counted."""
    return min([_run(runner, plan, width) for plan in _steps(runner, settings, rows, width)][1:])


def _steps(runner: Runner, settings: EngineSettings, rows: int, width: int) -> Iterator[StepPlan]:
    """Steps of so many rows, one behind the other. Rows share pages where there are too few: what lies in them does not matter."""
    rng, vocab = random.Random(0), runner.model.facts.vocab
    room = (1 + REPEATS) * (1 + width) + width
    tokens = max(min(CONTEXT, settings.context - room), 1)
    entries = -(-min(tokens + room, settings.context) // PAGE)
    for slot in range(rows):
        ids = tuple(rng.randrange(vocab) for _ in range(tokens))
        pages = tuple(1 + (slot * entries + entry) % settings.pages for entry in range(entries))
        runner.slots.bind([Bind(slot, ids, tokens, tokens - 1, settings.context, 0, (), GREEDY)])
        runner.slots.append([Append(slot, 0, pages)])
    reach = min(tokens + room, settings.context)
    made = tuple(Row(slot, slot, tokens - 1, 1 + width, width, True) for slot in range(rows))
    for step in range(1 + REPEATS):
        yield StepPlan(step, step - 1, made, draft=width, reach=reach)


def _run(runner: Runner, plan: StepPlan, width: int) -> float:
    _wait(runner)
    begun = time.perf_counter()
    runner.sample(runner.forward(plan), width=width)
    _wait(runner)
    return time.perf_counter() - begun


def _wait(runner: Runner) -> None:
    if runner.planes.device.type == "cuda":
        torch.cuda.synchronize()
