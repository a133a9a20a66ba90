"""From what the load generator saw to the numbers that it reports, under SGLang's names and labels.

Times are seconds of `time.perf_counter`; reported times are milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thalweg.bench.display import block, field_table, fields
from thalweg.bench.statistics import median, percentile

PERCENTILES = (90, 95, 99)


@dataclass(slots=True)
class Record:
    """One request as its client saw it."""

    prompt_tokens: int = 0  # as the server counts them where it does, else as sent
    cached_tokens: int = 0
    output_tokens: int = 0
    due: float = 0.0  # when it should have been sent (open loop)
    sent: float = 0.0  # when it was given to the kernel; 0: never
    start: float = 0.0  # latencies count from here: `sent`, or earlier where a connection had to be made first
    ttft: float = -1.0  # start to the first token; -1: none came
    latency: float = 0.0  # start to the end of the stream
    itl: list[float] = field(default_factory=list)  # gaps between tokens; one with k tokens counts as k equal gaps
    text: str = ""
    ids: list[int] = field(default_factory=list)  # output tokens where the API reports them
    thought: int = 0  # leading characters of text that are reasoning
    logprobs: list[float | None] = field(default_factory=list)  # of tokens, where they were asked for
    error: str = ""  # "" is success
    done: bool = False
    refused: bool = False  # nothing listened
    turn: int = 0  # of its conversation

    @property
    def send_delay(self) -> float:
        """Seconds from its due time to its sending; 0 where it was not sent."""
        return self.sent - self.due if self.sent else 0.0

    @property
    def ok(self) -> bool:
        return self.done and not self.error

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None without a second token."""
        if self.output_tokens < 2 or self.ttft < 0:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


def _latencies(records: Iterable[Record]) -> dict[str, list[float]]:
    """Seconds by SGLang's names."""
    records = list(records)
    return {
        "e2e_latency": [record.latency for record in records],
        "ttft": [record.ttft for record in records if record.ttft >= 0],
        "tpot": [tpot for record in records if (tpot := record.tpot) is not None],
        "itl": [gap for record in records for gap in record.itl],
    }


def describe(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """mean, median, std (of the population) and percentiles in ms, under SGLang's keys; 0 of no values."""
    values = 1000 * np.asarray(seconds or [0.0])
    statistics = {"mean": float(values.mean()), "median": median(values), "std": float(values.std())}
    statistics |= {f"p{q}": percentile(values, q) for q in PERCENTILES}
    return {f"{key}_{name}_ms": value for key, value in statistics.items()}


def peak_concurrency(records: Iterable[Record]) -> int:
    """The largest number of requests under way at one moment."""
    edges = [edge for record in records for edge in ((record.start, 1), (record.start + record.latency, -1))]
    return int(max(np.cumsum([step for _, step in sorted(edges)]), default=0))  # an end sorts before a start


def arrivals(records: Iterable[Record], start: float) -> Iterator[tuple[float, int]]:
    """(seconds after `start`, tokens) of everything that arrived, also of requests that failed later."""
    for record in records:
        if record.ttft >= 0:
            at = record.start + record.ttft - start
            yield at, max(record.output_tokens - len(record.itl), 1)
            yield from ((at + float(gap), 1) for gap in np.cumsum(record.itl))


def peak_tokens_per_second(records: Iterable[Record], duration: float) -> float:
    """Most tokens that arrived within any second; of a run of less than a second the mean."""
    at, tokens = np.array(sorted(arrivals(records, 0.0))).reshape(-1, 2).T
    if duration < 1.0:
        return float(tokens.sum() / duration)
    total = np.cumsum(tokens, dtype=np.float64)
    before = np.concatenate(([0.0], total))[np.searchsorted(at, at - 1.0, side="right")]
    return float(np.max(total - before, initial=0.0))


def measure(records: Sequence[Record], duration: float) -> dict[str, float]:
    """The numbers of a run, under SGLang's keys. Latencies and tokens are those of the successful requests."""
    good, duration = [record for record in records if record.ok], max(duration, 1e-9)
    inputs, outputs = sum(record.prompt_tokens for record in good), sum(record.output_tokens for record in good)
    numbers: dict[str, float] = {
        "duration": duration,
        "completed": len(good),
        "failed": sum(bool(record.error) for record in records),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(record.cached_tokens for record in good),
        "request_throughput": len(good) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_throughput": (inputs + outputs) / duration,
        "concurrency": sum(record.latency for record in good) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(good, duration),
        "max_concurrent_requests": peak_concurrency(record for record in records if record.start > 0),
    }
    latencies = _latencies(good)
    for name, seconds in latencies.items():
        numbers |= describe(name, seconds)
    numbers["max_itl_ms"] = 1000 * max(latencies["itl"], default=0.0)
    delays = [record.send_delay for record in records if record.sent] or [0.0]
    return numbers | {"p99_send_delay_ms": 1000 * percentile(delays, 99)}


def failures(records: Iterable[Record]) -> dict[str, int]:
    """Numbers of failed requests by reason, the most frequent first."""
    return dict(Counter(record.error for record in records if record.error).most_common())


LIMITS: Mapping[str, Callable[[Record], float | None]] = {  # None: the request cannot miss it
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "itl": lambda record: max(record.itl, default=None),
    "e2el": lambda record: record.latency,
}


def within_limits(record: Record, limits: Mapping[str, float]) -> bool:
    """limits: ms by the names in LIMITS, of which a request must keep all."""
    return record.ok and all(1000 * (LIMITS[name](record) or 0.0) <= limit for name, limit in limits.items())


def goodput(records: Sequence[Record], duration: float, limits: Mapping[str, float]) -> dict[str, object]:
    """Requests a second that kept every limit, and their share of all requests; {} without limits."""
    if not limits:
        return {}
    good = sum(within_limits(record, limits) for record in records)
    share = good / max(len(records), 1)
    return {"goodput": good / max(duration, 1e-9), "goodput_share": share, "goodput_limits_ms": dict(limits)}


def samples(records: Iterable[Record]) -> dict[str, list[float]]:
    """Each successful request's latencies in ms, to the microsecond, for `bench compare` and `bench report`."""
    latencies = _latencies(record for record in records if record.ok)
    del latencies["itl"]
    return {f"{name}_ms": [round(1000 * value, 3) for value in values] for name, values in latencies.items()}


def tokens_by_second(records: Iterable[Record], start: float) -> list[int]:
    """Output tokens that arrived in each second after `start`."""
    at, tokens = np.array(list(arrivals(records, start))).reshape(-1, 2).T
    seconds: list[int] = np.bincount(at.astype(int), tokens).astype(int).tolist()
    return seconds


def by_turn(records: Sequence[Record]) -> list[dict[str, object]]:
    """The answers, prompts, cache hits and latencies of each turn of the conversations; [] where all have one turn."""
    turns, rows = sorted({record.turn for record in records}), list[dict[str, object]]()
    for turn in turns if len(turns) > 1 else ():
        good = [record for record in records if record.turn == turn and record.ok]
        numbers = measure(good, 1.0)
        inputs, cached = numbers["total_input_tokens"], numbers["total_cached_tokens"]
        row: dict[str, object] = {
            "turn": turn + 1,
            "completed": len(good),
            "mean_input_tokens": inputs / max(len(good), 1),
        }
        row["cache_hit_rate"] = cached / inputs if inputs else 0.0
        rows.append(row | {key: numbers[key] for key in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")})
    return rows


# as SGLang prints it; sections that only Thalweg has follow
BLOCK = """\
============ Serving Benchmark Result ============
Backend:                                 {backend}
Traffic request rate:                    {request_rate}
Max request concurrency:                 {concurrency_limit}
Successful requests:                     {completed}

Failed requests:                         {failed:d}

Benchmark duration (s):                  {duration:.2f}
Total input tokens:                      {total_input_tokens}
Total generated tokens:                  {total_output_tokens}
Request throughput (req/s):              {request_throughput:.2f}
Input token throughput (tok/s):          {input_throughput:.2f}
Output token throughput (tok/s):         {output_throughput:.2f}
Peak output token throughput (tok/s):    {max_output_tokens_per_s:.2f}
Peak concurrent requests:                {max_concurrent_requests}
Total token throughput (tok/s):          {total_throughput:.2f}
Concurrency:                             {concurrency:.2f}

Request goodput (req/s):                 {goodput:.2f}
Share of requests within limits (%):     {goodput_percent:.2f} ({limits})

Accept length:                           {accept_length:.2f}

Share of the decode floor (%):           {floor_percent:.2f}

----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   {mean_e2e_latency_ms:.2f}
Median E2E Latency (ms):                 {median_e2e_latency_ms:.2f}
P90 E2E Latency (ms):                    {p90_e2e_latency_ms:.2f}
P95 E2E Latency (ms):                    {p95_e2e_latency_ms:.2f}
P99 E2E Latency (ms):                    {p99_e2e_latency_ms:.2f}
---------------Time to First Token----------------
Mean TTFT (ms):                          {mean_ttft_ms:.2f}
Median TTFT (ms):                        {median_ttft_ms:.2f}
P90 TTFT (ms):                           {p90_ttft_ms:.2f}
P95 TTFT (ms):                           {p95_ttft_ms:.2f}
P99 TTFT (ms):                           {p99_ttft_ms:.2f}
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          {mean_tpot_ms:.2f}
Median TPOT (ms):                        {median_tpot_ms:.2f}
P90 TPOT (ms):                           {p90_tpot_ms:.2f}
P95 TPOT (ms):                           {p95_tpot_ms:.2f}
P99 TPOT (ms):                           {p99_tpot_ms:.2f}
---------------Inter-Token Latency----------------
Mean ITL (ms):                           {mean_itl_ms:.2f}
Median ITL (ms):                         {median_itl_ms:.2f}
P90 ITL (ms):                            {p90_itl_ms:.2f}
P95 ITL (ms):                            {p95_itl_ms:.2f}
P99 ITL (ms):                            {p99_itl_ms:.2f}
Max ITL (ms):                            {max_itl_ms:.2f}

-------------------Prefix Cache-------------------
Total prompt tokens:                     {total_input_tokens}
Total cached tokens:                     {total_cached_tokens}
Cache hit rate (%):                      {cache_hit_percent:.2f}

Possible with an endless cache (%):      {possible_percent:.2f}

-------------Turns of a Conversation--------------
{turns:s}

-----Server Overhead (engine step to socket)------
Mean overhead (ms):                      {server_overhead_ms[mean]:.2f}
P50 overhead (ms):                       {server_overhead_ms[p50]:.2f}
P99 overhead (ms):                       {server_overhead_ms[p99]:.2f}"""
TURNS = fields("""
turn           turn
answered       completed
prompt tokens  mean_input_tokens
cache hits     cache_hit_rate
TTFT p50 ms    median_ttft_ms
TTFT p99       p99_ttft_ms
TPOT p50 ms    median_tpot_ms
""")
SERVED = fields("""
rate            request_rate
concurrency     max_concurrency
done            completed
failed          failed
req/s           request_throughput
goodput         goodput
in tok/s        input_throughput
out tok/s       output_throughput
TTFT p50 ms     median_ttft_ms
TTFT p99        p99_ttft_ms
TPOT p50 ms     median_tpot_ms
TPOT p99        p99_tpot_ms
ITL p50 ms      median_itl_ms
ITL p99         p99_itl_ms
cache hits      cache_hit_rate
possible        cache_hit_possible
accept length   accept_length
share of floor  share_of_floor
""")


def render(row: Mapping[str, Any]) -> str:
    """The numbers of a point."""
    limits, hits = row.get("goodput_limits_ms", {}), row["cache_hit_rate"]
    possible, turns, floor = row.get("cache_hit_possible"), row.get("by_turn"), row.get("share_of_floor")
    shown = {
        "concurrency_limit": row["max_concurrency"] or "not set",
        "failed": row["failed"] or None,
        "goodput_percent": 100 * row.get("goodput_share", 0.0),
        "limits": ", ".join(f"{name} {limit:g} ms" for name, limit in limits.items()),
        "cache_hit_percent": 100 * hits if hits else None,
        "possible_percent": 100 * possible if hits and possible is not None else None,
        "floor_percent": 100 * floor if floor else None,
        "turns": "\n".join(field_table(turns, TURNS)) if turns else None,
    }
    return block(BLOCK, dict(row) | shown)
