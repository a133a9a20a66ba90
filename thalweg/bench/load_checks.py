"""The measurements of `thalweg bench load`, as checks and as numbers of its result."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import msgspec

from thalweg.bench.metrics import Record, failures, measure
from thalweg.bench.server_process import ProcessUsage
from thalweg.core.messages import Stats

MIB = 2**20


class StepRate(msgspec.Struct, frozen=True):
    """The rate of steps in which every sequence decodes."""

    steps_per_second: float  # of wall time
    cpu_us_per_token: float  # of the engine's process
    steps: int


class LoadSample(NamedTuple):
    """One look at a server's processes and its engine's counters."""

    at: float  # time.perf_counter()
    server: ProcessUsage
    engine: ProcessUsage
    stats: Stats

    @property
    def left(self) -> tuple[int, int, int]:
        """Requests running, requests waiting, pages in use."""
        return self.stats.running, self.stats.waiting, self.stats.pages_used


def step_rate(samples: Sequence[LoadSample], running: int) -> StepRate | None:
    """The engine's rate between the first and the last sample in which `running` sequences decode and no prompt is
    computed; None without two of them.
    """
    prefilled = samples[-1].stats.prefill_tokens
    steady = [s for s in samples if s.left[:2] == (running, 0) and s.stats.prefill_tokens == prefilled]
    if not steady or not (steps := steady[-1].stats.steps - steady[0].stats.steps):
        return None
    first, last = steady[0], steady[-1]
    tokens = last.stats.decode_tokens - first.stats.decode_tokens
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

    @property
    def cpu_us(self) -> dict[str, float]:
        """CPU time of each process for each output token; the server's includes connections and requests."""
        first, last = self.samples[0], self.samples[-1]
        seconds = {"server": last.server.cpu - first.server.cpu, "engine": last.engine.cpu - first.engine.cpu}
        seconds["client"] = self.client_cpu
        return {name: 1e6 * value / max(self.tokens, 1) for name, value in seconds.items()}

    @property
    def rate(self) -> StepRate | None:
        return step_rate(self.samples, len(self.records))

    def as_json(self) -> dict[str, object]:
        return {
            **{f"{name}_cpu_us_per_token": us for name, us in self.cpu_us.items()},
            "server_overhead_ms": self.overhead,
            "engine_step_rate": msgspec.to_builtins(self.rate),
            **measure(self.records, self.duration),
            "failures": failures(self.records),
        }


@dataclass(slots=True)
class PairedTexts:
    """Texts of streams against the texts of their pairs: the same requests, answered in one piece."""

    compared: int = 0
    equal: int = 0
    excused: int = 0  # differ at a near-tie
    wrong: list[str] = field(default_factory=list)  # a line for each other pair
    asked_tokens: int = 0  # output tokens of the requests for log-probabilities


def margin_at(choice: Mapping[str, Any], place: int) -> float:
    """The difference, in logits, of the two best tokens where the character `place` of a completion was decided: the
    smallest of the tokens that begin there or are the last to begin before it. inf beyond its text.
    """
    offsets = choice["logprobs"]["text_offset"]
    begins = max((offset for offset in offsets if offset <= place), default=0)
    tops = zip(offsets, choice["logprobs"]["top_logprobs"], strict=True)
    best = [sorted(top.values())[-2:] for offset, top in tops if offset == begins and top]
    margins = [last - second for second, last in best] if place <= len(choice["text"]) else []
    return min(margins, default=math.inf)


class LoadTest(NamedTuple):
    """A whole run."""

    before: LoadSample  # with nothing under way
    rounds: list[LoadRound]
    pairs: LoadRound
    few: LoadRound
    chat: LoadRound
    texts: PairedTexts  # of all rounds against the pairs
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
        return f"{'ok' if self.ok else 'MISSED':<8}{self.name:<58}{self.measured}  (limit: {self.limit})"


def checks(test: LoadTest, alone: tuple[StepRate, StepRate], args: argparse.Namespace) -> Iterator[Check]:
    """alone: of the engine without a server, with all streams and with the few."""
    records = [record for load in test.loads for record in load.records]
    failed, texts = sum(not record.ok for record in records), test.texts
    yield Check("requests that failed", f"{failed} of {len(records)}", "0", not failed)
    sampled = test.after.stats.decode_tokens - test.before.stats.decode_tokens
    received = sum(load.tokens for load in test.loads) + texts.asked_tokens
    yield Check("sampled tokens that the answers have", f"{received} of {sampled}", "all", received == sampled)
    differ = f"{texts.excused} differ at a near-tie of the model, {len(texts.wrong)} wrong"
    equal = f"{texts.equal} of {texts.compared}, {differ}"
    yield Check(
        "streams whose text is that of the unstreamed answer",
        equal,
        "none wrong",
        texts.compared > 0 and not texts.wrong,
    )
    files, left = test.after.server.files - test.before.server.files, test.after.left
    yield Check(
        "requests and pages left at the end", "{} running, {} waiting, {} pages".format(*left), "nothing", not any(left)
    )
    yield Check("open files of the server, after - before", f"{files}", "at most 2", files <= 2)
    for name in ("server", "engine"):  # growth after the first round, which fills caches, pools and the heap
        first, *later = (max(getattr(s, name).rss for s in load.samples) / MIB for load in test.loads)
        grown, limit = max(later) - first, args.memory_limit
        shown = f"{grown:.1f} MiB (peak {max(later):.0f} MiB)"
        yield Check(f"memory of the {name}, growth after round 1", shown, f"{limit:g} MiB", grown <= limit)
    streams, few = f"{args.streams} streams", f"{args.few} streams"
    best = min(test.rounds, key=lambda load: load.cpu_us["server"])
    for name, load in ((streams, best), (few, test.few), (f"{few}, chat", test.chat)):
        us = load.cpu_us["server"]
        yield Check(f"server CPU a token, {name}", f"{us:.1f} us", f"{args.cpu_limit:g} us", us < args.cpu_limit)
    slots = args.max_running_requests or args.streams
    if slots >= args.streams:  # else prompts are computed all the time, and no two steps are alike
        yield _rate(streams, test.rounds, alone[0], args.step_rate_limit)
    if slots >= args.few:
        yield _rate(few, [test.few], alone[1], args.step_rate_limit)


def _rate(name: str, rounds: Sequence[LoadRound], alone: StepRate, limit: float) -> Check:
    label, wanted = f"engine step rate, {name}, of that without a server", f"{limit:.0%}"
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
    return {
        "checks": [check._asdict() for check in checked],
        "ok": all(check.ok for check in checked),
        "alone": dict(zip(("streams", "few"), msgspec.to_builtins(alone), strict=True)),
        "rounds": [load.as_json() for load in test.rounds],
        "not_streamed": test.pairs.as_json(),
        "few": test.few.as_json(),
        "few_chat": test.chat.as_json(),
        "texts": asdict(test.texts),
    }
