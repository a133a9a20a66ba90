"""Counters, gauges and histograms in Prometheus' text format, on one event loop: no locks, about half a microsecond an observation."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thalweg.core.messages import Stats

LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
INTERVALS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 1.0, 4.0)
EMITS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.05, 0.1, 0.5)
WINDOW = 10.0  # seconds that samples of the engine's counters are kept: rates are taken over at most this


class Histogram:
    """Counts of observations at or below each of `bounds` (seconds, ascending)."""

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

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


@dataclass(slots=True)
class Rates:
    """Tokens a second over a stretch of time."""

    prefill: float = 0.0
    decode: float = 0.0


class Meters:
    """Everything that is counted. One for each app; edited on its event loop only."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}  # by route and status
        self.disconnects = 0
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.first = Histogram(LATENCIES)
        self.between = Histogram(INTERVALS)
        self.whole = Histogram(LATENCIES)
        self.emit = Histogram(EMITS)
        self._samples: deque[tuple[float, Stats]] = deque()

    def answered(self, route: str, status: int) -> None:
        key = (route, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def sample(self, now: float, stats: Stats) -> None:
        """Remembers the engine's counters; called about once a second."""
        if self._samples and stats.steps < self._samples[-1][1].steps:
            self._samples.clear()  # a new engine counts from zero
        self._samples.append((now, stats))
        while self._samples[0][0] < now - WINDOW:
            self._samples.popleft()

    def rates(self, seconds: float = WINDOW) -> Rates:
        """Over the last `seconds` at most."""
        if len(self._samples) < 2:
            return Rates()
        now, new = self._samples[-1]
        then, old = next(s for s in self._samples if s[0] >= now - seconds - 0.5)
        if now <= then:
            return Rates()
        return Rates(
            (new.prefill_tokens - old.prefill_tokens) / (now - then),
            (new.decode_tokens - old.decode_tokens) / (now - then),
        )


class Timer:
    """Times one request: first token, the gaps between tokens, the whole. `piece` is on the path of every token."""

    def __init__(self, meters: Meters, started: float) -> None:
        self._meters, self.started = meters, started
        self._last: dict[int, float] = {}  # by choice: when its last token came

    def piece(self, choice: int, tokens: int, now: float) -> None:
        """`tokens` new tokens of a choice came at `now`. A piece of several tokens counts as that many equal gaps."""
        if not tokens:
            return
        last = self._last.get(choice)
        if last is None:
            self._meters.first.observe(now - self.started)
        else:
            self._meters.between.observe((now - last) / tokens, tokens)
        self._last[choice] = now
        self._meters.generation_tokens += tokens

    def ended(self, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """A choice's last piece came."""
        self._meters.prompt_tokens += prompt_tokens
        self._meters.cached_tokens += cached_tokens
        self._meters.whole.observe(now - self.started)


def token_usage(stats: Stats) -> float:
    """Share of the cache's pages that requests hold; what only the prefix cache holds can be had at once."""
    return stats.pages_used / stats.pages if stats.pages else 0.0


def hit_rate(stats: Stats) -> float:
    """Share of the admitted prompt tokens that the prefix cache had, since the engine's start."""
    return stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0


def exposition(meters: Meters, stats: Stats, serving: bool, model: str, sglang: bool) -> str:
    """The text of /metrics. sglang: repeat what dashboards of SGLang read under its names."""
    label = 'model_name="' + model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    lines: list[str] = []
    _requests(meters, label, lines)
    for name, alias, kind, text, value in _values(meters, stats, serving):
        for shown in ("thalweg_" + name, "sglang:" + alias)[: 2 if sglang and alias else 1]:
            lines += [f"# HELP {shown} {text}", f"# TYPE {shown} {kind}", f"{shown}{{{label}}} {value!r}"]
    for name, alias, text, histogram in _histograms(meters):
        for shown in ("thalweg_" + name, "sglang:" + alias)[: 2 if sglang and alias else 1]:
            lines += [f"# HELP {shown} {text}", f"# TYPE {shown} histogram", *histogram.lines(shown, label)]
    return "\n".join(lines) + "\n"


def _requests(meters: Meters, label: str, lines: list[str]) -> None:
    name = "thalweg_requests_total"
    lines += [f"# HELP {name} answered requests", f"# TYPE {name} counter"]
    for (route, status), count in sorted(meters.requests.items()):
        lines.append(f'{name}{{{label},route="{route}",status="{status}"}} {count}')


def _values(meters: Meters, stats: Stats, serving: bool) -> Iterator[tuple[str, str, str, str, float]]:
    """(our name, SGLang's name or "", type, help, value)"""
    rates = meters.rates()
    gauge, counter = "gauge", "counter"
    yield "up", "", gauge, "1 while the engine serves", int(serving)
    yield "running_requests", "num_running_reqs", gauge, "sequences that hold a slot", stats.running
    yield "waiting_requests", "num_queue_reqs", gauge, "sequences that wait for a slot", stats.waiting
    yield "cache_pages", "", gauge, "pages of the cache", stats.pages
    yield "cache_pages_used", "", gauge, "pages that requests hold", stats.pages_used
    yield "cache_pages_cached", "", gauge, "pages that only the prefix cache holds", stats.pages_cached
    yield "token_usage", "token_usage", gauge, "share of the pages that requests hold", token_usage(stats)
    yield "cache_hit_rate", "cache_hit_rate", gauge, "share of prompt tokens found in the prefix cache", hit_rate(stats)
    yield "decode_tokens_per_second", "gen_throughput", gauge, f"over the last {WINDOW:g} s", rates.decode
    yield "prefill_tokens_per_second", "", gauge, f"over the last {WINDOW:g} s", rates.prefill
    yield "steps_total", "", counter, "steps of the engine", stats.steps
    yield "step_seconds_total", "", counter, "seconds in which steps were in flight", stats.step_seconds
    yield "prefill_tokens_total", "", counter, "prompt tokens computed", stats.prefill_tokens
    yield "decode_tokens_total", "", counter, "tokens sampled", stats.decode_tokens
    yield "preemptions_total", "", counter, "sequences that gave their pages back and waited", stats.preemptions
    yield "finished_total", "", counter, "sequences that ended by themselves", stats.finished
    yield "aborted_total", "", counter, "sequences that were aborted", stats.aborted
    yield "disconnects_total", "", counter, "requests whose client went away", meters.disconnects
    yield "prompt_tokens_total", "prompt_tokens_total", counter, "prompt tokens of ended choices", meters.prompt_tokens
    yield "generation_tokens_total", "generation_tokens_total", counter, "tokens generated", meters.generation_tokens
    yield (
        "cached_tokens_total",
        "cached_tokens_total",
        counter,
        "of the prompt tokens, from the cache",
        meters.cached_tokens,
    )


def _histograms(meters: Meters) -> Iterator[tuple[str, str, str, Histogram]]:
    yield "time_to_first_token_seconds", "time_to_first_token_seconds", "request read to first token", meters.first
    yield "inter_token_latency_seconds", "inter_token_latency_seconds", "between tokens of a choice", meters.between
    yield "e2e_request_latency_seconds", "e2e_request_latency_seconds", "request read to last token", meters.whole
    yield "emit_seconds", "", "end of an engine step to its token written to the socket", meters.emit
