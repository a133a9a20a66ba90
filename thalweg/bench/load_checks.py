"""The measurements of `thalweg bench load`, as checks and as numbers of its result."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from thalweg.bench.metrics import Record, failures, measure
from thalweg.bench.paired_requests import PairedTexts
from thalweg.bench.pinned_engine import StepRate
from thalweg.bench.server_process import ProcessUsage
from thalweg.core.messages import Stats

MIB = 2**20
KEPT = ("duration", "completed", "failed", "total_output_tokens", "output_throughput", "max_concurrent_requests")
KEPT_LATENCIES = ("ttft_ms", "itl_ms", "delay_ms")


class LoadSample(NamedTuple):
    """One look at a server's processes and its engine's counters."""

    at: float  # time.perf_counter()
    server: ProcessUsage
    engine: ProcessUsage
    stats: Stats


def step_rate(samples: Sequence[LoadSample], running: int) -> StepRate | None:
    """The engine's rate between the first and the last sample in which `running` sequences decode and nothing else is
    computed; None without two of them.
    """
    prefilled = max((sample.stats.prefill_tokens for sample in samples), default=0)
    steady = [
        sample
        for sample in samples
        if sample.stats.running == running and not sample.stats.waiting and sample.stats.prefill_tokens == prefilled
    ]
    if len(steady) < 2:
        return None
    first, last = steady[0], steady[-1]
    steps, tokens = last.stats.steps - first.stats.steps, last.stats.decode_tokens - first.stats.decode_tokens
    if not steps or not tokens:
        return None
    return StepRate(steps / (last.at - first.at), 1e6 * (last.engine.cpu - first.engine.cpu) / tokens, steps)


class LoadRound(NamedTuple):
    """One load."""

    records: list[Record]
    duration: float
    samples: list[LoadSample]  # the first before it, the last after it
    client_cpu: float  # seconds of the client's process
    overhead: dict[str, float] | None  # ms from the engine's step to the socket

    @property
    def tokens(self) -> int:
        return sum(record.output_tokens for record in self.records)

    def cpu_us(self, seconds: float) -> float:
        """Microseconds for each output token."""
        return 1e6 * seconds / max(self.tokens, 1)

    @property
    def server_us(self) -> float:
        """CPU time of the server's process for each output token, with connections, requests and everything else."""
        return self.cpu_us(self.samples[-1].server.cpu - self.samples[0].server.cpu)

    @property
    def rate(self) -> StepRate | None:
        return step_rate(self.samples, len(self.records))

    def as_json(self) -> dict[str, object]:
        numbers = measure(self.records, self.duration)
        return {
            "server_cpu_us_per_token": self.server_us,
            "engine_cpu_us_per_token": self.cpu_us(self.samples[-1].engine.cpu - self.samples[0].engine.cpu),
            "client_cpu_us_per_token": self.cpu_us(self.client_cpu),
            "server_overhead_ms": self.overhead,
            "engine_pace": msgspec.to_builtins(self.rate),
            **{name: value for name, value in numbers.items() if name in KEPT or name.endswith(KEPT_LATENCIES)},
            "failures": failures(self.records),
        }


class LoadTest(NamedTuple):
    """A whole run."""

    before: LoadSample  # with nothing under way
    rounds: list[LoadRound]
    pairs: LoadRound
    few: LoadRound
    chat: LoadRound
    texts: list[PairedTexts]  # of each round against the pairs
    after: LoadSample

    @property
    def loads(self) -> tuple[LoadRound, ...]:
        return (*self.rounds, self.pairs, self.few, self.chat)


class Check(NamedTuple):
    """A limit, and whether the measurement keeps it."""

    name: str
    measured: str
    limit: str
    ok: bool

    @property
    def line(self) -> str:
        return f"{'ok' if self.ok else 'MISSED':<8}{self.name:<52}{self.measured}  (limit: {self.limit})"


def checks(test: LoadTest, alone: tuple[StepRate, StepRate], args: argparse.Namespace) -> Iterator[Check]:
    """alone: of the engine without a server, with all streams and with the few."""
    records = [record for load in test.loads for record in load.records]
    failed = sum(not record.ok for record in records)
    yield Check("requests that failed", f"{failed} of {len(records)}", "0", not failed)
    sampled = test.after.stats.decode_tokens - test.before.stats.decode_tokens
    received = sum(load.tokens for load in test.loads) + sum(texts.asked_tokens for texts in test.texts)
    yield Check("sampled tokens that the answers have", f"{received} of {sampled}", "all", received == sampled)
    compared, equal = sum(texts.compared for texts in test.texts), sum(texts.equal for texts in test.texts)
    excused, wrong = sum(texts.excused for texts in test.texts), sum(len(texts.wrong) for texts in test.texts)
    counts = f"{equal} of {compared}, {excused} differ at a near-tie of the model, {wrong} wrong"
    yield Check("streams with the text of their pair", counts, "none wrong", compared > 0 and not wrong)
    stats, files = test.after.stats, test.after.server.files - test.before.server.files
    left = f"{stats.running} running, {stats.waiting} waiting, {stats.pages_used} pages"
    yield Check("left at the end", left, "nothing", not (stats.running or stats.waiting or stats.pages_used))
    yield Check("open files of the server, after - before", f"{files}", "at most 2", files <= 2)
    yield from _memory(test, args.memory_limit)
    streams, few = f"{args.streams} streams", f"{args.few} streams"
    best = min(test.rounds, key=lambda load: load.server_us)
    for name, load in ((streams, best), (few, test.few), (f"{few}, chat", test.chat)):
        us = load.server_us
        yield Check(f"server CPU a token, {name}", f"{us:.1f} us", f"{args.cpu_limit:g} us", us < args.cpu_limit)
    slots = args.max_running_requests or args.streams
    if slots >= args.streams:  # else prompts are computed all the time, and no two steps are alike
        yield _rate(streams, test.rounds, alone[0], args.pace_limit)
    if slots >= args.few:
        yield _rate(few, [test.few], alone[1], args.pace_limit)


def _memory(test: LoadTest, limit: float) -> Iterator[Check]:
    """Growth after the first round, which fills caches, pools and the heap."""
    for name in ("server", "engine"):
        peaks = [max(getattr(sample, name).rss for sample in load.samples) for load in test.loads]
        grown = (max(peaks[1:]) - peaks[0]) / MIB
        shown = f"{grown:.1f} MiB (peak {max(peaks[1:]) / MIB:.0f} MiB)"
        yield Check(f"memory of the {name}, growth after round 1", shown, f"{limit:g} MiB", grown <= limit)


def _rate(name: str, rounds: Sequence[LoadRound], alone: StepRate, limit: float) -> Check:
    label, wanted = f"engine's step rate, {name}, of that alone", f"{limit:.0%}"
    rates = [rate for load in rounds if (rate := load.rate) is not None]
    if not rates:
        return Check(label, "not measured: the load was too short for two samples", wanted, False)
    best = max(rates, key=lambda rate: rate.steps_per_second)
    share = best.steps_per_second / alone.steps_per_second
    steps = f"{best.steps_per_second:.2f} of {alone.steps_per_second:.2f} steps/s"
    cpu = f"{best.cpu_us_per_token:.0f} us of CPU a token, alone {alone.cpu_us_per_token:.0f}"
    return Check(label, f"{share:.1%} ({steps}; {cpu})", wanted, share >= limit)


def as_json(test: LoadTest, alone: tuple[StepRate, StepRate], checked: Sequence[Check]) -> dict[str, object]:
    """The numbers of a run."""
    memory: dict[int, list[float]] = {}  # a row a second
    for sample in (test.before, *(sample for load in test.loads for sample in load.samples), test.after):
        seconds, stats = sample.at - test.before.at, sample.stats
        mib = [round(used.rss / MIB, 1) for used in (sample.server, sample.engine)]
        memory[int(seconds)] = [round(seconds, 2), *mib, stats.running, stats.waiting, stats.pages_used]
    return {
        "checks": [check._asdict() for check in checked],
        "ok": all(check.ok for check in checked),
        "alone": dict(zip(("streams", "few"), msgspec.to_builtins(alone), strict=True)),
        "rounds": [load.as_json() for load in test.rounds],
        "twins": test.pairs.as_json(),
        "few": test.few.as_json(),
        "few_chat": test.chat.as_json(),
        "texts": msgspec.to_builtins(test.texts),
        "memory": {
            "columns": ["seconds", "server_mib", "engine_mib", "running", "waiting", "pages_used"],
            "rows": list(memory.values()),
        },
    }
