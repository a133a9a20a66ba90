"""How many prompt tokens a step has beside its decode rows.

Prompt tokens make a step longer. Every decode row waits for the whole step, and every waiting request comes nearer to
its first token. The size of a step is chosen so that a prompt token costs least, summed over all that wait. With p
prompt tokens it costs

    (D * (x + JITTER * x^2 / t) + W * (t + x)) / p

D rows decode. Without prompt tokens the step would take t seconds, with them x more. W requests wait for their first
token, each weighted by how long it has waited. The square is for uneven gaps between tokens: it holds steps short while
few wait. Where prompt tokens first cost little (experts that are read anyway) and then more, the best p is the knee.
With many waiting requests it is the p with the highest rate of prompt tokens.

Without decode rows a step takes the whole budget, but for pipeline stages. There s stages compute as many steps at a
time, and the last step crosses s - 1 more stages when no other follows: N tokens in steps of p take about
(N / p + s - 1) * t(p). The best p is that of the mean context before the tokens that wait. Steps with less context get
more tokens and those with more get fewer, so that all take the same time and no stage waits for a longer one.

The user's latency targets come before that. A step with decode rows stays within the target between tokens, and so does
a step of prompts alone while stages compute the decode rows of another, whose next step follows it. Within it, prompts
have the rate that brings each request its first token in time, if there is one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from thalweg.core.request import ReleaseReason, Request
from thalweg.core.step_times import Line, StepTimes
from thalweg.scheduler.plan_builder import DecodeLoad, LatencyTargets, WaitingPrompt

JITTER = 0.02
PATIENCE = 0.05  # seconds of waiting after which a request counts twice
MARGIN = 0.93  # of the target between tokens: the longest expected step, since real ones vary
NEAR = 1.1  # where no step keeps the target: up to this multiple of the shortest step with prompt tokens
SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)
LEAST_STEP = 256  # prompt tokens of a step for pipeline stages
MAX_WAITING = 256  # requests that are looked at; more count as these
DECAY = 0.98  # weight of a real step after the next one
MAX_FACTOR = 5.0  # by which real steps may correct measured times, up or down
MAX_DEVIATION = 3.0  # a step that took a larger multiple of the expected time was disturbed


class StepCost:
    """Expected seconds of a step: interpolated between measured times, and corrected by one factor from real steps."""

    def __init__(self, times: StepTimes) -> None:
        self.times, self.elapsed, self.expected = times, 0.0, 0.0
        self._mixed = lru_cache(256)(self._mixed_line)

    @property
    def factor(self) -> float:
        """Real over measured time."""
        factor = self.elapsed / self.expected if self.expected else 1.0
        return min(max(factor, 1.0 / MAX_FACTOR), MAX_FACTOR)

    def seconds(self, load: DecodeLoad, tokens: int, pairs: int) -> float:
        """Without the correction."""
        times = self.times
        base = interpolate(times.decode, load.tokens) if load.tokens else 0.0
        if tokens:
            base = max(interpolate(self._mixed(load.tokens), tokens), base)
        longer = times.context_seconds * (load.context - times.context * load.rows) + times.pair_seconds * pairs
        return max(base + longer, base / 2)  # a shorter context saves no more than that

    def observe(self, expected: float, elapsed: float) -> None:
        """A step that was expected to take `expected` seconds took `elapsed`."""
        elapsed = min(elapsed, MAX_DEVIATION * expected * self.factor)
        self.expected, self.elapsed = DECAY * self.expected + expected, DECAY * self.elapsed + elapsed

    def _mixed_line(self, decode_tokens: int) -> Line:
        """Seconds by prompt tokens, beside decode rows with so many tokens. Beyond the measured lines the next one is
        longer by what decode rows alone take more.
        """
        mixed, decode = self.times.mixed, self.times.decode
        i = bisect_left(mixed, decode_tokens, key=lambda entry: entry[0])
        if i in (0, len(mixed)):
            count, line = mixed[min(i, len(mixed) - 1)]
            more = interpolate(decode, decode_tokens) - interpolate(decode, count)
            return tuple((tokens, max(seconds + more, 0.0)) for tokens, seconds in line)
        (few, below), (many, above) = mixed[i - 1], mixed[i]
        share = (decode_tokens - few) / (many - few)
        pairs = zip(below, above, strict=True)
        return tuple((tokens, a + (b - a) * share) for (tokens, a), (_, b) in pairs)


class CostBasedShare:
    """Chooses by the expected cost of steps."""

    def __init__(self, cost: StepCost, targets: LatencyTargets, clock: Callable[[], float], stages: int = 1) -> None:
        """clock: in seconds. stages: of the pipeline."""
        self.cost, self.targets, self.clock, self.stages = cost, targets, clock, stages
        self.planned: dict[int, tuple[float, bool]] = {}  # by step in flight: expected seconds, has decode rows
        self.committed_at = 0.0

    def choose(self, load: DecodeLoad, waiting: Iterable[WaitingPrompt], others: int, most: int) -> int:
        prompts = list(waiting)
        if not load.rows and self.stages > 1 and prompts:
            return self._through_stages(load, prompts, others, most)
        if not load.rows or not prompts:
            return most
        factor, limit = self.cost.factor, MARGIN * self.targets.between_tokens
        jitter, alone = 0.0 if limit else JITTER, factor * self.cost.seconds(load, 0, 0)
        weight = sum(1.0 + prompt.seconds / PATIENCE for prompt in prompts) * (1.0 + others / len(prompts))
        rate, fastest, best, least = self._rate(prompts), 0.0, 0, math.inf
        for tokens, pairs in _sizes(prompts, most):
            seconds = factor * self.cost.seconds(load, tokens, pairs)
            if limit and not best:
                limit = max(limit, NEAR * seconds)
            if limit and seconds > limit:
                break
            more = max(seconds - alone, 0.0)
            cost = (load.rows * (more + jitter * more * more / alone) + weight * seconds) / tokens
            speed = self.stages * tokens / seconds
            if fastest < min(rate, speed) or cost < least and speed >= rate:
                best, least = tokens, cost
            fastest = max(fastest, speed)
        return best

    def _through_stages(self, load: DecodeLoad, prompts: Sequence[WaitingPrompt], others: int, most: int) -> int:
        """The tokens of a step of prompts alone that pipeline stages compute."""
        listed = sum(prompt.tokens for prompt in prompts)
        before = sum(prompt.tokens * (2 * prompt.start + prompt.tokens) for prompt in prompts) // (2 * listed)
        total = listed * (1.0 + others / len(prompts))
        sizes = [size for size in SIZES if LEAST_STEP <= size < most] + [most]
        steps = [(self.cost.seconds(load, size, size * before), size) for size in sizes]
        limit, _ = min(steps, key=lambda step: (max(total / step[1], 1.0) + self.stages - 1) * step[0])

        def takes(tokens: int) -> float:
            return self.cost.seconds(load, tokens, _pairs(prompts, tokens))

        least = rest = min(LEAST_STEP, most)
        target = MARGIN * self.targets.between_tokens / self.cost.factor
        if target and any(has_decode_rows for _, has_decode_rows in self.planned.values()):
            least, rest = min(SIZES[0], most), 0
            limit = min(limit, max(target, NEAR * takes(least)))
        tokens = least + max(bisect_right(range(least, most + 1), limit, key=takes) - 1, 0)
        is_last = not others and listed <= min(tokens + rest, most)  # a small rest would cross all stages by itself
        return listed if is_last else tokens

    def _rate(self, prompts: Sequence[WaitingPrompt]) -> float:
        """Prompt tokens a second that bring each request its first token in time, but for those that are late."""
        ahead, rate = 0, 0.0
        for prompt in prompts:
            ahead += prompt.tokens
            left = self.targets.first_token - prompt.seconds
            if left > 0.0 and prompt.is_first:
                rate = max(rate, ahead / left)
        return rate

    def expect(self, step: int, load: DecodeLoad, tokens: int, pairs: int) -> None:
        self.planned[step] = self.cost.seconds(load, tokens, pairs), load.rows > 0

    def observe(self, step: int, is_busy: bool) -> bool:
        before, self.committed_at = self.committed_at, self.clock()
        expected, has_decode_rows = self.planned.pop(step, (0.0, False))
        if not is_busy or not expected:
            return False
        # Stages compute several steps at a time. A step takes as long as that many commits, and its rows wait so long.
        elapsed = (self.committed_at - before) * min(self.stages, len(self.planned) + 1)
        self.cost.observe(expected, elapsed)
        return has_decode_rows and 0.0 < self.targets.between_tokens < elapsed


def waiting_prompts(
    prefilling: Iterable[Request], queued: Iterable[Request], now: float, hit_tokens: Callable[[Request], int]
) -> Iterator[WaitingPrompt]:
    """In the order in which they are computed. hit_tokens: of a queued request, found in the prefix cache now."""
    for r in prefilling:
        if r.release_reason is not ReleaseReason.NONE:
            continue
        tokens, start = r.prefill_len - r.num_computed_tokens, r.num_computed_tokens
        yield WaitingPrompt(tokens, start, now - r.arrived, not r.output_ids)
    for r in queued:
        if r.ticket is not None or r.sibling is not None:  # blocked: it waits for no prompt tokens of this step
            continue
        start = hit_tokens(r)
        yield WaitingPrompt(r.num_tokens - start, start, now - r.arrived, not r.output_ids)


def interpolate(line: Line, x: int) -> float:
    """Linear between two points and beyond the last two; the first value before the first."""
    if len(line) == 1 or x <= line[0][0]:
        return line[0][1]
    i = min(bisect_left(line, x, key=lambda point: point[0]), len(line) - 1)
    (x0, y0), (x1, y1) = line[i - 1], line[i]
    slope = (y1 - y0) / (x1 - x0)
    return y0 + (max(slope, 0.0) if x > x1 else slope) * (x - x0)


def _pairs(prompts: Sequence[WaitingPrompt], tokens: int) -> int:
    """Of the first tokens that wait, with tokens before their chunks."""
    pairs = 0
    for prompt in prompts:
        pairs += min(tokens, prompt.tokens) * prompt.start
        tokens -= min(tokens, prompt.tokens)
    return pairs


def _sizes(prompts: Sequence[WaitingPrompt], most: int) -> Iterator[tuple[int, int]]:
    """Numbers of prompt tokens to compare, rising, each with its pairs with tokens before the chunks."""
    sizes = iter((*(size for size in SIZES if size < most), most))
    size, total, pairs = next(sizes), 0, 0
    for prompt in prompts:
        while size <= total + prompt.tokens:
            yield size, pairs + (size - total) * prompt.start
            if size == most:
                return
            size = next(sizes)
        total += prompt.tokens
        pairs += prompt.tokens * prompt.start
    yield total, pairs
