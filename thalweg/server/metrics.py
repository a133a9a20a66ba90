"""Server metrics and request timing, on one event loop: no locks, about half a microsecond an observation."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from thalweg.core.messages import Stats
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Piece
from thalweg.server.accounting import RequestAccounting

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
INTERVALS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 1.0, 4.0)
EMITS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.05, 0.1, 0.5)
LENGTHS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # tokens
CHOICES = (1, 2, 5, 10, 20)
ACCEPTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)  # tokens of a verification
FINISHES = ("stop", "length", "abort", "error")
WINDOW = 10.0  # seconds: the longest time over which rates are computed


class BucketHistogram:
    """Counts observations at or below each of `bounds` (ascending; seconds or tokens)."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


class TokenRates(NamedTuple):
    """Tokens a second."""

    prefill: float = 0.0
    decode: float = 0.0


class ServerMetrics:
    """All counters of one app, edited on its event loop only."""

    def __init__(self) -> None:
        self.requests = Counter[tuple[str, int]]()  # by route and status
        self.finished = Counter(dict.fromkeys(FINISHES, 0))  # choices
        self.disconnects = 0
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.pending_tokens = 0  # of prompts without a first token
        self.first = BucketHistogram(LATENCIES)
        self.between = BucketHistogram(INTERVALS)
        self.whole = BucketHistogram(LATENCIES)
        self.emit = BucketHistogram(EMITS)
        self.queued = BucketHistogram(LATENCIES)
        self.prefill = BucketHistogram(LATENCIES)
        self.decode = BucketHistogram(LATENCIES)
        self.running = BucketHistogram(LATENCIES)
        self.per_token = BucketHistogram(INTERVALS)
        self.prompt_lengths = BucketHistogram(LENGTHS)
        self.output_lengths = BucketHistogram(LENGTHS)
        self.longest_outputs = BucketHistogram(LENGTHS)
        self.choices = BucketHistogram(CHOICES)
        self.max_tokens = BucketHistogram(LENGTHS)
        self.accept_lengths = BucketHistogram(ACCEPTS)
        self._samples: deque[tuple[float, Stats]] = deque()

    def sample(self, now: float, stats: Stats) -> None:
        """Remembers the engine's counters; called about once a second."""
        if self._samples and stats.steps < self._samples[-1][1].steps:
            self._samples.clear()  # a new engine counts from zero
        self._samples.append((now, stats))
        while self._samples[0][0] < now - WINDOW:
            self._samples.popleft()

    def rates(self, seconds: float = WINDOW) -> TokenRates:
        """Over the last `seconds` at most."""
        if len(self._samples) < 2:
            return TokenRates()
        now, new = self._samples[-1]
        then, old = next(sample for sample in self._samples if sample[0] >= now - seconds - 0.5)
        if now <= then:
            return TokenRates()
        prefill, decode = new.prefill_tokens - old.prefill_tokens, new.decode_tokens - old.decode_tokens
        return TokenRates(prefill / (now - then), decode / (now - then))


class RequestTimer:
    """Times one request. `piece` runs for every token."""

    def __init__(
        self,
        metrics: ServerMetrics,
        accounting: RequestAccounting,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        now: float,
    ) -> None:
        """The prompts go to the engine."""
        self._metrics, self._accounting = metrics, accounting
        self._first: dict[int, float] = {}  # by choice: when its first token came
        self._last: dict[int, float] = {}  # by choice: when its last token came
        self._tokens = self._longest = 0
        accounting.submitted, accounting.prompts, accounting.params = now, tuple(prompts), tuple(params)
        accounting.prompt_tokens = self._pending = sum(map(len, prompts))
        metrics.pending_tokens += self._pending
        for of_prompt in params:
            metrics.choices.observe(of_prompt.n)
            if of_prompt.max_tokens is not None:
                metrics.max_tokens.observe(of_prompt.max_tokens)

    def piece(self, piece: Piece, now: float) -> None:
        """A piece of several tokens counts as that many equal gaps."""
        if tokens := len(piece.ids):
            last = self._last.get(piece.index)
            if last is None:
                self._begin(piece, now)
            else:
                self._metrics.between.observe((now - last) / tokens, tokens)
            self._last[piece.index] = now
            self._metrics.generation_tokens += tokens
            self._tokens += tokens
        if piece.finish is not None:
            self._end(piece, piece.finish, now)

    def _begin(self, piece: Piece, now: float) -> None:
        accounting, metrics = self._accounting, self._metrics
        self._first[piece.index] = now
        self._admit()
        metrics.first.observe(now - accounting.began)
        accounting.first = accounting.first or now
        if piece.admitted:
            accounting.admitted = accounting.admitted or piece.admitted
            metrics.queued.observe(max(piece.admitted - accounting.submitted, 0.0))
            metrics.prefill.observe(max(now - piece.admitted, 0.0))

    def _admit(self) -> None:
        self._metrics.pending_tokens -= self._pending
        self._pending = 0

    def _end(self, piece: Piece, finish: str, now: float) -> None:
        accounting, metrics = self._accounting, self._metrics
        accounting.finishes.append(finish)
        accounting.preemptions += piece.preempted
        if not piece.is_sibling:  # the other choices of a prompt find it in the cache
            accounting.cached_tokens += piece.cached_tokens
        metrics.finished[finish] += 1
        metrics.prompt_tokens += piece.prompt_tokens
        metrics.cached_tokens += piece.cached_tokens
        metrics.whole.observe(now - accounting.began)
        metrics.prompt_lengths.observe(piece.prompt_tokens)
        metrics.output_lengths.observe(piece.completion_tokens)
        self._longest = max(self._longest, piece.completion_tokens)
        drafted = piece.drafted
        if drafted is not None and drafted.mean_length is not None:
            metrics.accept_lengths.observe(drafted.mean_length)
            accounting.drafted_tokens += drafted.drafted
            accounting.accepted_tokens += drafted.accepted
        if piece.index in self._first:
            last = self._last[piece.index]
            decode = last - self._first[piece.index]
            metrics.decode.observe(decode)
            if piece.admitted:
                metrics.running.observe(max(last - piece.admitted, 0.0))
            if piece.completion_tokens > 1:
                metrics.per_token.observe(decode / (piece.completion_tokens - 1))

    def close(self, choices: int, outcome: str) -> None:
        """The request has ended. outcome: of those of `choices` that did not end by themselves: "abort" or "error"."""
        accounting, metrics = self._accounting, self._metrics
        self._admit()
        if unfinished := choices - len(accounting.finishes):
            accounting.finishes += [outcome] * unfinished
            metrics.finished[outcome] += unfinished
        accounting.output_tokens = self._tokens
        accounting.last = max(self._last.values(), default=0.0)
        metrics.longest_outputs.observe(self._longest)


def token_usage(stats: Stats) -> float:
    """Share of the cache's pages that requests hold. Pages that only the prefix cache holds count as free."""
    return stats.pages_used / stats.pages if stats.pages else 0.0


def hit_rate(stats: Stats) -> float:
    """Share of the admitted prompt tokens found in the prefix cache, since the engine's start."""
    return stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
