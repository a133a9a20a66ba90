"""Up to how many tokens prompts may fill a step beside decoding rows, and which steps run in pieces: chosen from times
measured at the start.

A decoding request waits for the whole step it is in. So that the time between two of its tokens at most doubles while
others' prompts are computed, a step has as many tokens as keep it well within twice the time of the same rows alone;
the rest is for what varies. But a step has at least as many as make it hardly longer than one with the fewest: what any
prompt costs (launching its attention layer by layer, which a slow host takes longer for; reading all experts) is paid
anyhow. And at least so many that prompts are computed at half of the best rate, beside many rows a quarter: below it
they starve, and more rows wait longer in all.

Steps run in pieces while that is faster than launching them eagerly, which is bound by Python up to some hundred tokens
of a large model, and far more of one with many small layers. Beyond, the device is the slower one, and would compute
the padding.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch

from thalweg.config.engine import EngineConfig
from thalweg.core.plan import PAGE, Bind, PageAppend, Row, StepPlan
from thalweg.core.report import START_UP, Decision
from thalweg.core.sampling import SamplingParams
from thalweg.runner.piecewise import Piecewise
from thalweg.runner.runner import Runner

log = logging.getLogger("thalweg.engine")

# how much longer a step with prompts may take: 2 is the aim, and host and network were seen to add a fifth at the 99th
# percentile
SLOWER = 1.6
FLAT = 1.15  # a step is hardly longer than another
MANY = 32  # decoding rows from which on theirs is the first concern
ROWS = (1, 8, 32, 64, 128, 256)  # decoding rows that are measured
TOTALS = (128, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens of a mixed step, its rows included: buckets of pieces
CONTEXT = 1024  # tokens behind each decoding row
BEHIND = 512  # tokens that a prompt's chunk finds computed
REPEATS = 5  # a slow host hiccups now and then: of two runs one that did would spoil the mean
WHY = "with prompts a step takes well under twice as long as without, or hardly longer than with the fewest of them"
GREEDY = SamplingParams(temperature=0.0)

Beside = tuple[tuple[int, int], ...]


class Timer(Protocol):
    """Measures steps."""

    def time(self, rows: int, tokens: int) -> float:
        """Seconds of a step of so many decoding rows and prompt tokens."""


Time = Callable[[int, int], float]  # (decoding rows, prompt tokens) → seconds of a step


def choose(time: Time, rows: Sequence[int], budget: int) -> Beside:
    """The table of `scheduler.requests.Limits.mixed_step_limits`."""
    totals = [total for total in TOTALS if total <= budget] or [budget]
    rates = [(total - 1) / time(1, total - 1) for total in totals]
    half, quarter = (
        next(total for total, rate in zip(totals, rates, strict=True) if share * rate >= max(rates)) for share in (2, 4)
    )
    return tuple((count, max(half if count < MANY else quarter, _within(time, count, totals))) for count in rows)


def _within(time: Time, rows: int, totals: Sequence[int]) -> int:
    """The most tokens of a step that takes not much longer than the rows alone, or than the least that there are beside
    so many rows.
    """
    some = [total for total in totals if total >= 2 * rows] or [totals[-1]]
    allowed = max(SLOWER * time(rows, 0), FLAT * time(rows, some[0] - rows))
    return some[max(bisect_right(some, allowed, key=lambda total: time(rows, total - rows)) - 1, 0)]


def paced(config: EngineConfig, runner: Runner) -> EngineConfig:
    """The configuration with the table, where it is left to start-up; the runner with the pieces that are worth it.
    Times are of made-up requests, whose pages nobody has yet; the slots are nobody's again afterwards."""
    most = min(config.max_running_requests, config.num_pages, config.chunked_prefill_size)
    rows = [count for count in ROWS if count < most]
    if not rows or not (config.mixed_step_limits is None or config.trim_piecewise_cuda_graphs):
        return config
    clock = Clock(runner, config, max(rows))
    try:
        if config.mixed_step_limits is None:
            config = _with_table(config, choose(clock.time, rows, config.chunked_prefill_size))
        if config.trim_piecewise_cuda_graphs and isinstance(runner.steps, Piecewise):
            log.info("%s", trim(runner, runner.steps, clock))
    finally:
        runner.slots.reset()
    return config


def _with_table(config: EngineConfig, beside: Beside) -> EngineConfig:
    pairs = ", ".join(f"{tokens:,} from {rows} rows" for rows, tokens in beside)
    log.info("tokens of a step beside decoding rows: %s; %s", pairs, WHY)
    return config.started([Decision("mixed_step_limits", pairs, START_UP, WHY)], mixed_step_limits=beside)


def trim(runner: Runner, steps: Piecewise, clock: Timer) -> str:
    """Drops the largest pieces that are not faster than eager steps of as many tokens as fill their bucket on average.
    What it did, in words.
    """
    while steps.recorded:
        largest = steps.recorded[-1].tokens
        smaller = steps.recorded[-2].tokens if len(steps.recorded) > 1 else 0
        tokens = (largest + smaller) // 2
        pieces = clock.time(1, tokens - 1)
        runner.steps = steps.model
        eager = clock.time(1, tokens - 1)
        runner.steps = steps
        if pieces <= eager:
            times = f"{1e3 * pieces:.1f} ms for {tokens:,}, {1e3 * eager:.1f} eagerly"
            return f"steps of up to {largest:,} tokens run in pieces: {times}"
        steps.recorded.pop()
    return "no step is faster in pieces"


class Clock:
    """Measures steps on a runner. The first slots decode, at the end of a context; in the others are prompts, of which
    the first goes on.
    """

    def __init__(self, runner: Runner, config: EngineConfig, most: int) -> None:
        self.runner, self.config, self.rng = runner, config, random.Random(0)
        self.context = min(CONTEXT, config.context_length - 1)
        self.behind = min(BEHIND, self.context // 2)
        self.vocab = runner.model.facts.vocab
        for slot in range(most):
            self._seat(slot, self.context, self.context - 1)
        self.prompt_slot = most

    def time(self, rows: int, tokens: int) -> float:
        """Seconds; the median of a few, the first run not counted."""
        plan = self.plan(rows, tokens)
        return median([self._run(plan) for _ in range(REPEATS + 1)][1:])

    def plan(self, rows: int, tokens: int) -> StepPlan:
        """A step of so many decoding rows and prompt tokens, whose slots are bound."""
        made = [Row(slot, slot, self.context - 1, 1, 0, True) for slot in range(rows)]
        slot, behind = self.prompt_slot, self.behind
        while tokens:
            last = slot + 1 == self.config.max_running_requests
            n = min(tokens, self.config.context_length - 1 - behind if last else self.context - behind)
            self._seat(slot, behind + n, behind)
            made.append(Row(slot, slot, behind, n, 0, True))
            slot, tokens, behind = slot + 1, 0 if last else tokens - n, 0
        return StepPlan(0, 0, tuple(made), max_kv_len=max(row.start + row.n for row in made))

    def _seat(self, slot: int, tokens: int, computed: int) -> None:
        """Slots share pages where there are too few: what lies in them does not matter."""
        ids = tuple(self.rng.randrange(self.vocab) for _ in range(tokens))
        entries = -(-tokens // PAGE)
        pages = tuple(1 + (slot * entries + entry) % self.config.num_pages for entry in range(entries))
        self.runner.slots.bind([Bind(slot, ids, tokens, computed, self.config.context_length, 0, (), GREEDY)])
        self.runner.slots.append([PageAppend(slot, 0, pages)])

    def _run(self, plan: StepPlan) -> float:
        """A alone: B is small, and would move the slots on."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self.runner.forward(plan)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
