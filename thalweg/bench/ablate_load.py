"""The load of an ablation's cell: one request alone, then so many at a time, with lengths that are the same in every
cell.

The engine is in this process and HTTP is not measured, so a column shows what it does to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

import msgspec

from thalweg.bench.datasets import Vocabulary
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine

WARM_UP_TOKENS = 4
Tokens = list[int]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of each cell. input_len, output_len: tokens on average. spread: lengths are uniform within ± this
    share of them. shared_prefix: first tokens that all prompts of a run have in common. concurrency: requests at a
    time, a run each. waves: requests of a run for each of them. repeat: runs of each kind, of which the fastest
    counts.
    """

    input_len: int = 760
    output_len: int = 460
    spread: float = 0.5
    shared_prefix: int = 0
    concurrency: tuple[int, ...] = (8, 32)
    waves: int = 2
    repeat: int = 1
    seed: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that it may ask for."""
        return int(self.input_len * (1 + self.spread)) + int(self.output_len * (1 + self.spread))


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: Tokens
    output_len: int


@dataclass(slots=True)
class Seen:
    """One request. start, first, end: seconds of perf_counter: submitted, first token, last token."""

    start: float
    first: float = 0.0
    end: float = 0.0
    tokens: int = 0
    cached: int = 0


def draw(work: Workload, count: int, vocabulary: Vocabulary, name: str) -> list[Ask]:
    """Requests, the same for the same workload, count and name."""
    rng = Random(f"{work.seed}/{name}")
    prefix = vocabulary.draw(rng, work.shared_prefix)

    def length(mean: int) -> int:
        return max(1, round(rng.uniform(mean * (1 - work.spread), mean * (1 + work.spread))))

    asks = []
    for _ in range(count):
        own = max(length(work.input_len) - len(prefix), 1)
        asks.append(Ask(prefix + vocabulary.draw(rng, own), length(work.output_len)))
    return asks


def closed_loop(engine: LocalEngine, asks: Sequence[Ask], concurrency: int) -> list[Seen]:
    """Keeps `concurrency` of them under way until all have written exactly their tokens, greedily. In the order of
    `asks`.
    """
    waiting, seen = list(reversed(list(enumerate(asks)))), [Seen(0.0) for _ in asks]
    running: dict[int, int] = {}

    def send() -> None:
        index, ask = waiting.pop()
        params = SamplingParams(temperature=0.0, max_tokens=ask.output_len, ignore_eos=True)
        seen[index].start = time.perf_counter()
        (uid,) = engine.submit(ask.prompt, params)
        running[uid] = index

    for _ in range(min(concurrency, len(asks))):
        send()
    while running:
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            one = seen[running[delta.uid]]
            one.tokens += len(delta.tokens)
            one.cached = max(one.cached, delta.cached)
            if delta.tokens and not one.first:
                one.first = now
            if delta.finish:
                one.end = now
                del running[delta.uid]
                if waiting:
                    send()
    while not engine.idle:  # steps that were under way when the last request ended
        engine.step()
    return seen


def single(engine: LocalEngine, work: Workload, vocabulary: Vocabulary) -> dict[str, float]:
    """One request of the mean lengths, alone: seconds to its first token, and the rate of those after it (wall and CPU
    time).
    """
    alone = msgspec.structs.replace(work, spread=0.0, shared_prefix=0)
    closed_loop(engine, [_short(ask) for ask in draw(alone, 1, vocabulary, "warm-up")], 1)
    found = []
    for turn in range(work.repeat):
        asks = draw(alone, 1, vocabulary, f"single {turn}")
        begin = time.process_time()
        (one,) = closed_loop(engine, asks, 1)
        cpu = time.process_time() - begin
        found.append((one.end - one.first, one.first - one.start, cpu))
    decode, ttft, cpu = min(found)
    after_first = work.output_len - 1
    return {
        "input_len": work.input_len,
        "output_len": work.output_len,
        "ttft_seconds": ttft,
        "decode_tokens_per_s": after_first / decode if decode else 0.0,
        "decode_seconds": decode,
        "cpu_seconds": cpu,
    }


def batch(engine: LocalEngine, work: Workload, vocabulary: Vocabulary, concurrency: int) -> dict[str, float]:
    """A closed loop. throughput: (prompt + output tokens) / seconds of the run. decode_per_request: mean over the
    requests of output tokens / seconds from sending to the last token.
    """
    count = concurrency * work.waves
    closed_loop(engine, [_short(ask) for ask in draw(work, concurrency, vocabulary, "warm-up")], concurrency)
    found = []
    for turn in range(work.repeat):
        asks = draw(work, count, vocabulary, f"{concurrency} {turn}")
        engine.flush_cache()
        cpu, begin = time.process_time(), time.perf_counter()
        seen = closed_loop(engine, asks, concurrency)
        seconds = max(one.end for one in seen) - begin
        found.append((seconds, time.process_time() - cpu, asks, seen))
    seconds, cpu, asks, seen = min(found, key=lambda run: run[0] / sum(one.tokens for one in run[3]))
    inputs, outputs = sum(len(ask.prompt) for ask in asks), sum(one.tokens for one in seen)
    return {
        "concurrency": concurrency,
        "requests": count,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": sum(one.cached for one in seen),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "throughput": (inputs + outputs) / seconds,
        "output_throughput": outputs / seconds,
        "decode_per_request": fmean(one.tokens / (one.end - one.start) for one in seen),
        "mean_ttft_seconds": fmean(one.first - one.start for one in seen),
    }


def _short(ask: Ask) -> Ask:
    return Ask(ask.prompt, min(ask.output_len, WARM_UP_TOKENS))


def must_fit(work: Workload, context: int) -> None:
    """Raises UnsupportedConfig where the longest sequence is longer than the context."""
    if work.longest > context:
        raise UnsupportedConfig(
            f"--input-len {work.input_len} and --output-len {work.output_len} with --spread {work.spread:g} make up to"
            f" {work.longest} tokens, and a sequence has at most {context} here: ask for less"
        )
