"""Start-up calibration: times synthetic steps and chooses what depends on them.

Synthetic steps are `StepPlan`s that go through the calls of real steps, so every rank of a group can run them together.
Three things are measured:

- Step times with and without prompt tokens, by which the scheduler chooses how many a step has beside decode rows
  (`scheduler.prompt_share`).
- Piecewise graphs: the sizes that are faster than eager steps, which are bound by Python up to some hundred tokens.
- Step times by number of drafts, from which the draft length is chosen.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from statistics import median
from typing import NamedTuple

import torch

from thalweg.config.engine import EngineConfig
from thalweg.core.plan import Bind, PageAppend, Row, StepPlan
from thalweg.core.report import START_UP, Decision
from thalweg.core.sampling import SamplingParams
from thalweg.core.step_times import Line, StepTimes
from thalweg.layers.factory import LayerFactory
from thalweg.parallel.axis import gather_number
from thalweg.runner.piecewise import Piecewise
from thalweg.runner.runner import Runner
from thalweg.scheduler.draft_length import draft_length_choices
from thalweg.scheduler.step_times import ProfilePoint, StepTimeModel

log = logging.getLogger("thalweg.engine")

GREEDY = SamplingParams(temperature=0.0)

# steps with prompt tokens
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # alone
MIXED_ROWS = (1, 32, 128, 256)  # beside prompt tokens
PROMPT_TOKENS = (64, 256, 1024, 2048, 4096, 8192)
MIXED_CONTEXT = 1024  # tokens before each decode row, and of a prompt
CONTEXT_ROWS, PAIR_TOKENS = 32, 1024  # decode rows, and tokens of a chunk, that are also measured with a long context
LONG_MIXED_CONTEXT = 8192
AGREEMENT = 1.03  # two times that differ by more are joined by a third
CHANGE = 1.1  # of a step's time since an earlier start, from which on all are measured again
WHY_STEP_TIMES = "prompt tokens beside decode rows are as many as cost least, summed over all requests that wait"

# draft times
SHORT_CONTEXT, LONG_CONTEXT = 512, 32768  # tokens before each row; the longer one as far as it is possible
REPEATS, TURNS = 3, 2  # repetitions with the short context; turns of both contexts when they are compared
SECONDS = 4.0  # to measure the short context; for more rows the model extrapolates
LONG_SHARE = 0.25  # of the time that the short context took, for the long one


class RowLadder(NamedTuple):
    """Numbers of rows to measure: the first `at_least` always, the others while there is time."""

    rows: tuple[int, ...]
    at_least: int


SHORT_ROWS = RowLadder((1, 2, 4, 8, 16, 32, 64, 128, 256), 2)
LONG_ROWS = RowLadder((1, 8, 64), 1)

MixedTime = Callable[[int, int], float]  # (decoding rows, prompt tokens) → seconds of a step


def calibrate(config: EngineConfig, runner: Runner) -> EngineConfig:
    """The configuration with measured limits and times. All slots of the runner are free before and after."""
    calibrator = Calibrator(config, runner)
    calibrator.measure_mixed_steps()
    if config.speculative_adaptive and not config.speculative_step_times:
        calibrator.measure_draft_times()
    return calibrator.config


def step_clock(config: EngineConfig) -> Callable[[], float]:
    """Times steps that run in this thread. A single CPU thread is timed by its own clock, so others do not disturb; of
    several pipeline stages others compute the same step.
    """
    is_alone = config.device == "cpu" and config.threads == config.pp_size == 1
    return time.thread_time if is_alone else time.perf_counter


def shared_clock(clock: Callable[[], float], factory: LayerFactory) -> Callable[[], float]:
    """The clock of the first rank, so that all ranks measure the same times and then run the same steps."""
    world, device = factory.layout.world, factory.device
    return clock if world.size == 1 else lambda: gather_number(world, clock(), device)[0]


def planning_clock(config: EngineConfig) -> Callable[[], float]:
    """Times steps in the thread that plans them."""
    return step_clock(config) if config.max_steps_in_flight == 1 else time.perf_counter


def run_step(runner: Runner, plan: StepPlan, num_drafts: int = 0) -> None:
    """Runs a whole step, on all pipeline stages. Its results stay on the device."""
    forwarded = runner.forward(plan)
    runner.draft(forwarded, runner.sample(forwarded), num_drafts)
    runner.publication.finish()


class Calibrator:
    """Runs and times synthetic steps on one rank."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.config, self.runner = config, runner
        self.clock = shared_clock(step_clock(config), runner.model.factory)
        self.tokens = tuple(Random(0).choices(range(runner.model.facts.vocab), k=4096))
        self.rows: dict[int, Row] = {}  # by slot, rows of mixed steps whose synthetic requests are bound

    # ---- steps

    def bound(self, plan: StepPlan, rows: Iterable[Row], max_len: int) -> StepPlan:
        """The plan with synthetic requests in the slots of these rows, each with pages for `max_len` tokens.

        Slots share pages if there are too few: their contents do not matter.
        """
        binds, appends, entries = [], [], self.runner.slots.num_pages(max_len)
        for row in rows:
            known = row.start + row.n - row.num_drafts
            tokens = (self.tokens * (2 + known // len(self.tokens)))[row.slot : row.slot + known]
            pages = tuple(1 + (row.slot * entries + entry) % self.config.num_pages for entry in range(entries))
            binds.append(Bind(row.slot, tokens, known, row.start, self.config.context_length, 0, (), GREEDY))
            appends.append(PageAppend(row.slot, 0, pages))
        return replace(plan, binds=tuple(binds), appends=tuple(appends))

    def seconds(self, plan: StepPlan) -> float:
        """Time of a whole step."""
        return self._timed(lambda: run_step(self.runner, plan, plan.num_drafts))

    def _timed(self, work: Callable[[], object]) -> float:
        self._wait()
        begun = self.clock()
        work()
        self._wait()
        return self.clock() - begun

    def _wait(self) -> None:
        if self.runner.planes.device.type == "cuda":
            torch.cuda.synchronize()

    # ---- mixed steps

    def measure_mixed_steps(self) -> None:
        """Measures step times, and drops piecewise graphs that are not faster than eager steps. Times that an earlier
        start measured are kept where they still hold.
        """
        config, steps = self.config, self.runner.forward_model
        known = config.step_times
        is_kept = known is not None and self.still_holds(known)
        times = known if is_kept else self.step_times() if config.measures_step_times else None
        if times is not None:
            text = f"{_milliseconds(times.decode)} by decode rows; {_milliseconds(times.mixed[0][1])} by prompt tokens"
            log.info("step times%s: %s", " of an earlier start" * is_kept, text)
            decision = Decision("step_times", text, START_UP, WHY_STEP_TIMES)
            self.config = config.started([decision], step_times=times)
        if config.trim_piecewise_cuda_graphs and isinstance(steps, Piecewise):
            log.info("%s", trim_piecewise(self.runner, steps, self.mixed_seconds))
        self.runner.slots.reset()

    def step_times(self) -> StepTimes | None:
        """Times of steps with and without prompt tokens. None where no step holds a decode row and a prompt."""
        config, mixed, longest = self.config, self.mixed_seconds, self.config.context_length - 1
        most = min(config.max_running_requests - 1, config.num_pages, config.chunked_prefill_size - 1)
        if most < 1 or longest < 2:
            return None
        rows = [count for count in DECODE_ROWS if count <= min(most + 1, config.num_pages)]
        beside = [count for count in MIXED_ROWS if count <= most]
        prompts = config.max_running_requests - beside[-1]
        held = (prompts - 1) * min(MIXED_CONTEXT, longest) + longest
        largest = min(config.chunked_prefill_size - beside[-1], held, PROMPT_TOKENS[-1])
        sizes = [*(tokens for tokens in PROMPT_TOKENS if tokens < largest), largest]
        decode = tuple((count, mixed(count, 0)) for count in rows)
        lines = tuple((count, tuple((tokens, mixed(count, tokens)) for tokens in sizes)) for count in beside)
        short, long = min(MIXED_CONTEXT, longest), min(LONG_MIXED_CONTEXT, longest)
        count, chunk = min(CONTEXT_ROWS, rows[-1]), min(PAIR_TOKENS, largest, longest // 2)
        near, far = (self.forward_seconds([_decode_row(slot, at) for slot in range(count)]) for at in (short, long))
        first, later = (self.forward_seconds([Row(0, 0, at, chunk, 0, True)]) for at in (0, long - chunk))
        for_context = max(far - near, 0.0) / (count * max(long - short, 1))
        for_pair = max(later - first, 0.0) / (chunk * max(long - chunk, 1))
        return StepTimes(decode, lines, short, for_context, for_pair)

    def still_holds(self, times: StepTimes) -> bool:
        """Whether the largest steps, which the GPU bounds, and the smallest with a prompt, which the host may bound,
        take as long as in these times of equal settings.
        """
        (alone, decode), (beside, line), (few, short) = times.decode[-1], times.mixed[-1], times.mixed[0]
        known = (alone, 0, decode), (beside, *line[-1]), (few, *short[0])
        return all(1 / CHANGE < self.mixed_seconds(*step) / seconds < CHANGE for *step, seconds in known)

    def mixed_seconds(self, rows: int, tokens: int) -> float:
        """Time of the forward of a step with so many decode rows and prompt tokens; sampling is short beside it."""
        return self.forward_seconds(self.mixed_rows(rows, tokens))

    def forward_seconds(self, rows: Iterable[Row]) -> float:
        """Median time of the forward of such a step."""
        rows = tuple(rows)
        plan = StepPlan(0, 0, rows, max_kv_len=max(row.start + row.n for row in rows))
        new = {row.slot: row for row in rows if self.rows.get(row.slot) != row}
        self.rows |= new
        self.runner.forward(self.bound(plan, new.values(), plan.max_kv_len))
        times = [self._timed(lambda: self.runner.forward(plan)) for _ in range(2)]
        if max(times) > AGREEMENT * min(times):
            times.append(self._timed(lambda: self.runner.forward(plan)))
        return median(times)

    def mixed_rows(self, rows: int, tokens: int) -> list[Row]:
        """The first slots decode at the end of a context; the next ones have new prompts."""
        longest = self.config.context_length - 1
        context = min(MIXED_CONTEXT, longest)
        rows = min(rows, self.config.max_running_requests - bool(tokens))
        rows_of_step = [_decode_row(slot, context) for slot in range(rows)]
        while tokens:
            is_last = len(rows_of_step) + 1 == self.config.max_running_requests
            n = min(tokens, longest if is_last else context)
            rows_of_step.append(Row(len(rows_of_step), len(rows_of_step), 0, n, 0, True))
            tokens = 0 if is_last else tokens - n
        return rows_of_step

    # ---- draft times

    def measure_draft_times(self) -> None:
        """Measures step times by number of drafts."""
        config = self.config
        begun, longest = self.clock(), config.context_length - self._reserved()
        short = max(min(SHORT_CONTEXT, longest), 1)
        points = smoothed(self._points(short, SHORT_ROWS, SECONDS, lambda rows: self._times(rows, short, REPEATS)))
        if points and longest > 4 * short:  # else the difference says little
            long, near = min(LONG_CONTEXT, longest), points
            share = LONG_SHARE * (self.clock() - begun)
            points += smoothed(self._points(long, LONG_ROWS, share, lambda rows: self._long_times(rows, near, long)))
        self.runner.slots.reset()
        if not points:  # not even one request can be verified within the budget of a step
            off = {"speculative_adaptive": False, "speculative_num_steps": 0, "speculative_eagle_topk": 1}
            self.config = config.started((), **off)
            return
        first = ", ".join(f"{1e3 * seconds:.2f} ms with {drafts}" for drafts, seconds in enumerate(points[0].seconds))
        why = f"by acceptance and step times; at the start {first} for one request"
        value = f"0 to {config.num_drafts}"
        log.info("drafts: %s, %s", value, why)
        decision = Decision("speculative_adaptive", value, START_UP, why)
        self.config = config.started([decision], speculative_step_times=points)

    def _reserved(self) -> int:
        """Tokens that the measured steps compute beyond a context."""
        return 3 * (1 + self.config.tree.reserved_columns(self.config.num_drafts))

    def _points(
        self, context: int, ladder: RowLadder, seconds: float, times: Callable[[int], tuple[float, ...]]
    ) -> list[ProfilePoint]:
        """Measures `times` for the rows of the ladder while the next one is likely to fit into `seconds`."""
        config, points = self.config, list[ProfilePoint]()
        begun = last = self.clock()
        for rows in ladder.rows:
            tokens = rows * (1 + config.num_drafts)
            if rows > min(config.max_running_requests, config.num_pages) or tokens > config.chunked_prefill_size:
                break
            if len(points) >= ladder.at_least:
                expected = (self.clock() - last) * rows / points[-1].rows  # at most: a row of many takes no longer
                if self.clock() - begun + expected > seconds:
                    break
            last = self.clock()
            points.append(ProfilePoint(rows, context, times(rows)))
        return points

    def _long_times(self, rows: int, near: Sequence[ProfilePoint], long: int) -> tuple[float, ...]:
        """Times with a long context. It adds little, compared with how a shared machine varies from moment to moment:
        so both contexts are measured in turns, and the difference is added to the known times.
        """
        short = near[0].context
        turns = [[self._times(rows, context, 1) for context in (short, long)] for _ in range(TURNS)]
        below, above = (map(min, *times) for times in zip(*turns, strict=True))
        known = StepTimeModel(near).seconds(rows, short)
        return tuple(base + max(more - less, 0.0) for base, less, more in zip(known, below, above, strict=True))

    def _times(self, rows: int, context: int, repeats: int) -> tuple[float, ...]:
        """Step time by number of drafts. The numbers take turns, so that a disturbance hits all of them, and the least
        time of each counts. Between the measured numbers times are interpolated.
        """
        max_len = min(context + self._reserved(), self.config.context_length)
        slots, decode = self.runner.slots, _verify_plan(rows, context, 0, max_len)
        self.runner.forward(self.bound(decode, decode.rows, max_len))
        bound = slots.ints_SI.clone()
        least = dict.fromkeys(draft_length_choices(self.config.num_drafts), math.inf)
        for turn in range(1 + repeats):
            for drafts in least:
                slots.ints_SI.copy_(bound)
                plan = _verify_plan(rows, context, drafts, max_len)
                self.seconds(plan)  # proposes the drafts that the next step verifies
                seconds = self.seconds(plan)
                least[drafts] = min(least[drafts], seconds if turn else math.inf)
        slots.ints_SI.copy_(bound)
        least[0] += min(self.catch_up_seconds(decode) for _ in range(2))
        return _interpolated(least)

    @torch.inference_mode()
    def catch_up_seconds(self, plan: StepPlan) -> float:
        """Time for each step without drafts that the drafter takes later, to compute the KV that it has deferred."""
        drafting, rows = self.runner.drafting, len(plan.rows)
        forwarded, steps = self.runner.forward(plan), 0
        if drafting.has_draft_kv and forwarded is not None and forwarded.draft_input is not None:
            drafting.drop_deferred()
            steps = min(drafting.deferred.max_steps(rows), plan.rows[0].start + 1)
            for _ in range(steps):
                drafting.deferred.defer(forwarded.draft_input, rows)
        seconds = self._timed(drafting.write_all_deferred)  # on all ranks, also those without a drafter
        return seconds / steps if steps else 0.0


def _verify_plan(rows: int, context: int, drafts: int, max_len: int) -> StepPlan:
    rows_of_step = tuple(Row(slot, slot, context - 1, 1 + drafts, drafts, True) for slot in range(rows))
    return StepPlan(1, 0, rows_of_step, num_drafts=drafts, max_kv_len=max_len)


def _decode_row(slot: int, context: int) -> Row:
    return Row(slot, slot, context - 1, 1, 0, True)


def _milliseconds(line: Line) -> str:
    return ", ".join(f"{1e3 * seconds:.1f} ms with {count:,}" for count, seconds in line)


def trim_piecewise(runner: Runner, steps: Piecewise, time: MixedTime) -> str:
    """Drops the largest sizes that are not faster than eager steps with as many tokens as fill them on average.

    Returns what is left, in words.
    """
    while steps.recorded:
        largest = steps.recorded[-1].tokens
        smaller = steps.recorded[-2].tokens if len(steps.recorded) > 1 else 0
        tokens = (largest + smaller) // 2
        piecewise = time(1, tokens - 1)
        runner.forward_model = steps.model
        eager = time(1, tokens - 1)
        runner.forward_model = steps
        if piecewise <= eager:
            times = f"{1e3 * piecewise:.1f} ms for {tokens:,}, {1e3 * eager:.1f} eagerly"
            return f"steps of up to {largest:,} tokens run in pieces: {times}"
        steps.recorded.pop()
    return "no step is faster in pieces"


def _interpolated(times: Mapping[int, float]) -> tuple[float, ...]:
    """Times of all numbers of drafts from those of some, 0 and the largest among them."""
    values: list[float] = []
    for drafts, seconds in times.items():
        count = drafts + 1 - len(values)
        last = values[-1] if values else seconds
        values += [last + (seconds - last) * i / count for i in range(1, count + 1)]
    return tuple(values)


def smoothed(points: Sequence[ProfilePoint]) -> tuple[ProfilePoint, ...]:
    """No step takes longer than one with more rows or more drafts; if one seemed to, something disturbed it."""
    result: list[ProfilePoint] = []
    for point in reversed(points):
        above = result[-1].seconds if result else (math.inf,) * len(point.seconds)
        least = [min(pair) for pair in zip(point.seconds, above, strict=True)]
        result.append(point._replace(seconds=tuple(accumulate(reversed(least), min))[::-1]))
    return tuple(reversed(result))
