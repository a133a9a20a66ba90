"""What a run's requests say one by one: which met their limits, how turns of a conversation differ, samples for later
comparisons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thalweg.bench.metrics import Record, arrivals, percentile

LIMITS: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "itl": lambda record: max(record.itl, default=None),
    "e2el": lambda record: record.latency,
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in ms that a request has to keep, all of them, to count as good: `ttft`, `tpot`, `itl` (its longest gap),
    `e2el`.
    """

    limits: Mapping[str, float]

    def met(self, record: Record) -> bool:
        """A request without a second token has no TPOT or ITL to be missed."""
        measured = ((LIMITS[name](record), limit) for name, limit in self.limits.items())
        return record.ok and all(value is None or 1000 * value <= limit for value, limit in measured)


def goodput(records: Sequence[Record], duration: float, slo: Slo) -> dict[str, object]:
    """Requests a second that kept every limit, and their share of all that were answered or failed; {} without
    limits.
    """
    if not slo.limits:
        return {}
    good = sum(slo.met(record) for record in records)
    share = good / len(records) if records else 0.0
    return {"goodput": good / max(duration, 1e-9), "goodput_share": share, "goodput_limits_ms": dict(slo.limits)}


def samples(records: Sequence[Record]) -> dict[str, list[float]]:
    """Each successful request's latencies in ms, to the microsecond: what `bench compare` and `bench report` work
    with.
    """
    good = [record for record in records if record.ok]
    tpots = [tpot for record in good if (tpot := record.tpot) is not None]
    each = {"e2e_latency": [r.latency for r in good], "ttft": [r.ttft for r in good if r.ttft >= 0], "tpot": tpots}
    return {f"{name}_ms": [round(1000 * value, 3) for value in values] for name, values in each.items()}


def tokens_by_second(records: Sequence[Record], start: float) -> list[int]:
    """Output tokens that arrived in each second after `start`, of requests that failed later too."""
    seconds: Counter[int] = Counter()
    for at, count in arrivals(records, start):
        seconds[int(at)] += count
    return [seconds[second] for second in range(max(seconds, default=-1) + 1)]


def by_turn(records: Sequence[Record]) -> list[dict[str, object]]:
    """For each turn of the conversations: how many were answered, their prompts, what the cache had of them, their
    latencies; [] where all have one turn.
    """
    turns = sorted({record.turn for record in records})
    if len(turns) < 2:
        return []
    rows: list[dict[str, object]] = []
    for turn in turns:
        good = [record for record in records if record.turn == turn and record.ok]
        inputs, ttfts = sum(r.prompt_tokens for r in good), sorted(1000 * r.ttft for r in good if r.ttft >= 0)
        row: dict[str, object] = {"turn": turn + 1, "completed": len(good)}
        row["mean_input_tokens"] = inputs / max(len(good), 1)
        row["cache_hit_rate"] = sum(r.cached_tokens for r in good) / inputs if inputs else 0.0
        row["median_ttft_ms"] = percentile(ttfts, 50) if ttfts else 0.0
        row["p99_ttft_ms"] = percentile(ttfts, 99) if ttfts else 0.0
        tpots = sorted(1000 * tpot for r in good if (tpot := r.tpot) is not None)
        row["median_tpot_ms"] = percentile(tpots, 50) if tpots else 0.0
        rows.append(row)
    return rows
