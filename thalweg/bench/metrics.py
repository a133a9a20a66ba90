"""From what the load generator saw to the numbers that it reports: SGLang's names and labels, numpy's percentiles, no
numpy.

A `Record` is what one request was to its client. All times are seconds of `time.perf_counter`; reported times are
milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

PERCENTILES = (90, 95, 99)
LATENCIES = ("e2e_latency", "ttft", "tpot", "itl")
_WIDTH = 50


@dataclass(slots=True)
class Record:
    """One request as its client saw it.

    due: when it should have been sent (open loop), sent: when it was given to the kernel (0: never); start: from when
    on latencies count, which is `sent`, or a little before it where a connection had to be made first; latency: start
    to the end of the stream; ttft: start to the first token, or -1 where none came; itl: the gaps between tokens (a gap
    that brought k tokens counts k times a k-th of it). prompt_tokens and output_tokens as the server counts them where
    it says, else as sent and seen. ids: output tokens where the API tells them. thought: leading characters of text
    that were reasoning. error: "" is success. refused: nobody listened. turn: of its conversation.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    due: float = 0.0
    sent: float = 0.0
    start: float = 0.0
    ttft: float = -1.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    thought: int = 0
    error: str = ""
    done: bool = False
    refused: bool = False
    turn: int = 0

    @property
    def ok(self) -> bool:
        return self.done and not self.error

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where there is no second token."""
        if self.output_tokens < 2 or self.ttft < 0:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of sorted values, linear between neighbours as numpy's default; nan of nothing."""
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """mean, median, std (of the population) and percentiles in ms, under SGLang's keys; 0 where there is nothing to
    measure.
    """
    ordered = sorted(1000 * s for s in seconds) or [0.0]
    mean = math.fsum(ordered) / len(ordered)
    result = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": math.sqrt(math.fsum((x - mean) ** 2 for x in ordered) / len(ordered)),
    }
    return result | {f"p{q}_{name}_ms": percentile(ordered, q) for q in PERCENTILES}


def peak_concurrency(records: Iterable[Record]) -> int:
    """The largest number of requests that were under way at one moment."""
    edges = [edge for r in records for edge in ((r.start, 1), (r.start + r.latency, -1))]
    now = peak = 0
    for _, step in sorted(edges):  # an end sorts before a start at the same moment
        now += step
        peak = max(peak, now)
    return peak


def arrivals(records: Iterable[Record], start: float) -> Iterator[tuple[float, int]]:
    """(seconds after `start`, tokens) of everything that arrived, of requests that failed later too; in the order of
    the requests.
    """
    for record in records:
        if record.ttft < 0:
            continue
        at = record.start + record.ttft - start
        yield at, max(record.output_tokens - len(record.itl), 1)
        for gap in record.itl:
            at += gap
            yield at, 1


def peak_tokens_per_second(records: Iterable[Record], duration: float) -> float:
    """Most tokens that arrived within any second of a run, wherever that second begins. duration: of the run; one of
    less than a second has its mean for a peak.
    """
    ordered = sorted(arrivals(records, 0.0))
    if duration < 1.0:
        return sum(count for _, count in ordered) / duration
    most = within = first = 0
    for at, count in ordered:
        within += count
        while ordered[first][0] <= at - 1.0:
            within -= ordered[first][1]
            first += 1
        most = max(most, within)
    return float(most)


def measure(records: Sequence[Record], duration: float) -> dict[str, float]:
    """The numbers of a run, under SGLang's keys. Latencies and tokens are those of the requests that succeeded."""
    good = [r for r in records if r.ok]
    inputs, outputs = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    duration = max(duration, 1e-9)
    result: dict[str, float] = {
        "duration": duration,
        "completed": len(good),
        "failed": sum(1 for r in records if r.error),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(r.cached_tokens for r in good),
        "request_throughput": len(good) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_throughput": (inputs + outputs) / duration,
        "concurrency": sum(r.latency for r in good) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(good, duration),
        "max_concurrent_requests": peak_concurrency(r for r in records if r.start > 0),
    }
    gaps = [gap for r in good for gap in r.itl]
    result |= describe("e2e_latency", (r.latency for r in good))
    result |= describe("ttft", (r.ttft for r in good if r.ttft >= 0))
    result |= describe("tpot", (t for r in good if (t := r.tpot) is not None))
    result |= describe("itl", gaps)
    result["max_itl_ms"] = 1000 * max(gaps, default=0.0)
    late = sorted(1000 * (r.sent - r.due) for r in records if r.sent > 0)
    return result | {"p99_send_delay_ms": percentile(late, 99) if late else 0.0}


def failures(records: Iterable[Record]) -> dict[str, int]:
    """How many requests failed, by reason, the most frequent first."""
    return dict(Counter(r.error for r in records if r.error).most_common())


# --- the block that is printed
# -----------------------------------------------------------------------------------------

_TITLES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
}


def _line(label: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()


def _head_lines(result: dict[str, object]) -> list[str]:
    lines = [
        _line("Backend:", result["backend"]),
        _line("Traffic request rate:", result["request_rate"]),
        _line("Max request concurrency:", result["max_concurrency"] or "not set"),
        _line("Successful requests:", result["completed"]),
    ]
    if result["failed"]:
        lines.append(_line("Failed requests:", result["failed"]))
    lines += [
        _line("Benchmark duration (s):", result["duration"]),
        _line("Total input tokens:", result["total_input_tokens"]),
        _line("Total generated tokens:", result["total_output_tokens"]),
        _line("Request throughput (req/s):", result["request_throughput"]),
        _line("Input token throughput (tok/s):", result["input_throughput"]),
        _line("Output token throughput (tok/s):", result["output_throughput"]),
        _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        _line("Peak concurrent requests:", result["max_concurrent_requests"]),
        _line("Total token throughput (tok/s):", result["total_throughput"]),
        _line("Concurrency:", result["concurrency"]),
    ]
    if "goodput" in result:
        limits = result["goodput_limits_ms"]
        assert isinstance(limits, dict)
        kept = ", ".join(f"{name} {limit:g} ms" for name, limit in limits.items())
        lines += [
            _line("Request goodput (req/s):", result["goodput"]),
            _line("Share of requests within limits (%):", 100.0 * float(str(result["goodput_share"]))) + f" ({kept})",
        ]
    if result["accept_length"] is not None:
        lines.append(_line("Accept length:", result["accept_length"]))
    return lines


def _latency_lines(result: dict[str, object], name: str) -> list[str]:
    title, short = _TITLES[name]
    lines = [f"{title:-^{_WIDTH}}", _line(f"Mean {short} (ms):", result[f"mean_{name}_ms"])]
    lines.append(_line(f"Median {short} (ms):", result[f"median_{name}_ms"]))
    lines += [_line(f"P{q} {short} (ms):", result[f"p{q}_{name}_ms"]) for q in PERCENTILES]
    return lines


def _turn_lines(turns: Sequence[Mapping[str, float]]) -> list[str]:
    lines = [
        f"{'turn':>4} {'answered':>9} {'input tok':>10} {'cached':>7} {'TTFT p50':>9} {'p99 ms':>8} {'TPOT p50':>9}"
    ]
    for row in turns:
        lines.append(
            f"{row['turn']:>4} {row['completed']:>9} {row['mean_input_tokens']:>10.0f} {row['cache_hit_rate']:>7.1%} "
            f"{row['median_ttft_ms']:>9.2f} {row['p99_ttft_ms']:>8.2f} {row['median_tpot_ms']:>9.2f}"
        )
    return lines


SWEEP = (
    ("rate", "request_rate"),
    ("concurrency", "max_concurrency"),
    ("done", "completed"),
    ("req/s", "request_throughput"),
    ("out tok/s", "output_throughput"),
    ("TTFT p50", "median_ttft_ms"),
    ("p99 ms", "p99_ttft_ms"),
    ("TPOT p50", "median_tpot_ms"),
    ("p99 ms", "p99_tpot_ms"),
    ("E2E p50 ms", "median_e2e_latency_ms"),
    ("goodput", "goodput"),
)


def sweep_table(rows: Sequence[Mapping[str, object]]) -> str:
    """The points of a sweep, one a line."""
    columns = [(head, key) for head, key in SWEEP if any(row.get(key) is not None for row in rows)]
    lines = [" ".join(f"{head:>11}" for head, _ in columns)]
    for row in rows:
        cells = (row.get(key) for _, key in columns)
        shown = (f"{one:.2f}" if isinstance(one, float) else "-" if one is None else str(one) for one in cells)
        lines.append(" ".join(f"{cell:>11}" for cell in shown))
    return "\n".join(lines)


def render(result: dict[str, object]) -> str:
    """SGLang's block, label for label; what only Thalweg knows follows in sections of its own."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}", *_head_lines(result)]
    for name in LATENCIES:
        lines += _latency_lines(result, name)
    lines.append(_line("Max ITL (ms):", result["max_itl_ms"]))
    rate = result["cache_hit_rate"]
    if isinstance(rate, float) and rate:
        lines += [
            f"{'Prefix Cache':-^{_WIDTH}}",
            _line("Total prompt tokens:", result["total_input_tokens"]),
            _line("Total cached tokens:", result["total_cached_tokens"]),
            _line("Cache hit rate (%):", 100.0 * rate),
        ]
        if isinstance(possible := result.get("cache_hit_possible"), float):
            lines.append(_line("Possible with an endless cache (%):", 100.0 * possible))
    turns = result.get("by_turn")
    if isinstance(turns, list):
        lines += [f"{'Turns of a Conversation':-^{_WIDTH}}", *_turn_lines(turns)]
    overhead = result["server_overhead_ms"]
    if isinstance(overhead, dict):
        lines += [f"{'Server Overhead (engine step to socket)':-^{_WIDTH}}"]
        lines += [_line(f"{key.capitalize()} overhead (ms):", overhead[key]) for key in ("mean", "p50", "p99")]
    return "\n".join((*lines, "=" * _WIDTH))
