"""The load generator's arithmetic against numpy and counts by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from thalweg.bench.metrics import (
    Record,
    describe,
    failures,
    measure,
    peak_concurrency,
    peak_tokens_per_second,
    render,
)
from thalweg.bench.server_info import Counters, overhead, read_counters
from thalweg.bench.statistics import percentile


def made(start: float, ttft: float, gaps: list[float], **other: int) -> Record:
    record = Record(start=start, due=start, ttft=ttft, latency=ttft + sum(gaps), itl=gaps, done=True)
    record.output_tokens, record.prompt_tokens = len(gaps) + 1, other.get("prompt", 10)
    record.cached_tokens = other.get("cached", 0)
    return record


@pytest.mark.parametrize("size", [1, 2, 3, 10, 997])
def test_percentiles_are_numpys(size: int) -> None:
    rng = random.Random(size)
    values = [rng.lognormvariate(0, 1) for _ in range(size)]
    for q in (0, 12.5, 50, 90, 95, 99, 100):
        assert percentile(sorted(values), q) == pytest.approx(np.percentile(values, q), rel=1e-12)
    got = describe("ttft", values)
    want = {
        "mean": np.mean(values),
        "median": np.median(values),
        "std": np.std(values),
        "p99": np.percentile(values, 99),
    }
    for name, value in want.items():
        assert got[f"{name}_ttft_ms"] == pytest.approx(1000 * value, rel=1e-9, abs=1e-9)


def test_nothing_measured_is_zero_and_not_nan() -> None:
    assert set(describe("tpot", []).values()) == {0.0}
    assert math.isnan(percentile([], 50))
    assert all(math.isfinite(value) for value in measure([], 1.0).values())


def test_measure_counts_successes_only() -> None:
    good = [made(0.0, 0.5, [0.1] * 9, cached=4), made(1.0, 0.5, [0.3] * 4)]
    bad = Record(prompt_tokens=10, start=0.5, latency=9.0, error="HTTP 429 Too Many Requests: busy")
    got = measure([*good, bad], duration=2.0)
    assert (got["completed"], got["failed"], got["total_input_tokens"], got["total_output_tokens"]) == (2, 1, 20, 15)
    assert got["output_throughput"] == 7.5 and got["total_throughput"] == 17.5 and got["request_throughput"] == 1.0
    assert got["total_cached_tokens"] == 4
    assert got["mean_tpot_ms"] == pytest.approx((100 + 300) / 2)
    assert got["mean_itl_ms"] == pytest.approx(1000 * (9 * 0.1 + 4 * 0.3) / 13)
    assert got["max_itl_ms"] == pytest.approx(300)
    assert got["concurrency"] == pytest.approx((1.4 + 1.7) / 2.0)
    assert failures([*good, bad, bad]) == {"HTTP 429 Too Many Requests: busy": 2}


def test_one_token_has_no_time_per_output_token() -> None:
    assert made(0.0, 0.5, []).tpot is None
    assert measure([made(0.0, 0.5, [])], 1.0)["mean_tpot_ms"] == 0.0


def test_peaks() -> None:
    # 0–1, 1–2 do not overlap; 0.5–3 overlaps each
    records = [made(0.0, 0.5, [0.5]), made(1.0, 0.5, [0.5]), made(0.5, 0.5, [1.0, 1.0])]
    assert peak_concurrency(records) == 2
    # arrivals at 0.5, 1.0 | 1.5, 2.0 | 1.0, 2.0, 3.0 → of the seconds (0.5, 1.5] and (1.0, 2.0] each has three
    assert peak_tokens_per_second(records, 3.0) == 3.0
    assert peak_concurrency([]) == 0 and peak_tokens_per_second([], 1.0) == peak_tokens_per_second([], 0.5) == 0.0


def test_the_peak_is_of_any_second_and_never_below_the_mean_of_a_steady_run() -> None:
    steady = [made(0.0, 0.005, [0.005] * 289)]  # 200 tokens a second for 1.45 s: a fixed grid would cut it at 1.0
    assert peak_tokens_per_second(steady, 1.45) == pytest.approx(200, abs=1)
    across = [made(0.6, 0.0, [0.01] * 79)]  # 0.6 to 1.4: no second of a grid has all of it
    assert peak_tokens_per_second(across, 2.0) == 80.0
    for many in (1, 7, 40):
        got = measure([made(0.0, 0.1, [0.1] * many)], duration=0.1 * (many + 1))
        assert got["max_output_tokens_per_s"] >= got["output_throughput"] * 0.999


def test_the_block_has_sglangs_labels_in_order() -> None:
    result: dict[str, object] = {
        "backend": "openai",
        "request_rate": "inf",
        "max_concurrency": None,
        "accept_length": 1.7,
        "server_overhead_ms": {"mean": 1.0, "p50": 0.9, "p99": 2.0, "samples": 5},
        "cache_hit_rate": 0.5,
        **measure([made(0.0, 0.5, [0.1] * 9, cached=5), Record(start=1.0, error="boom")], 2.0),
    }
    block = render(result)
    labels = """Serving Benchmark Result|Backend:|Traffic request rate:|Max request concurrency:|Successful requests:|Failed requests:
Benchmark duration (s):|Total input tokens:|Total generated tokens:|Request throughput (req/s):|Input token throughput (tok/s):
Output token throughput (tok/s):|Peak output token throughput (tok/s):|Peak concurrent requests:|Total token throughput (tok/s):|Concurrency:
Accept length:|End-to-End Latency|Mean E2E Latency (ms):|Median E2E Latency (ms):|P90 E2E Latency (ms):|P99 E2E Latency (ms):
Time to First Token|Mean TTFT (ms):|Median TTFT (ms):|P99 TTFT (ms):|Time per Output Token (excl. 1st token)|Mean TPOT (ms):|Median TPOT (ms):
P99 TPOT (ms):|Inter-Token Latency|Mean ITL (ms):|Median ITL (ms):|P95 ITL (ms):|P99 ITL (ms):|Max ITL (ms):
Cache hit rate (%):|P50 overhead (ms):|P99 overhead (ms):"""
    places = [block.index(label) for line in labels.splitlines() for label in line.split("|")]
    assert places == sorted(places)
    assert "Backend:                                 openai\n" in block
    assert "Cache hit rate (%):                      50.00\n" in block


def test_histograms_of_a_real_prometheus_page() -> None:
    registry = CollectorRegistry()
    histogram = Histogram(
        "thalweg_emit_seconds", "time", ["route"], registry=registry, buckets=(0.001, 0.002, 0.005, 0.01)
    )

    def page() -> Counters:
        return read_counters(generate_latest(registry).decode())

    histogram.labels("a").observe(0.0005)
    before = page()
    for _ in range(100):
        histogram.labels("a").observe(0.0015)
    for _ in range(100):
        histogram.labels("b").observe(0.004)
    after = page()
    measured = overhead(after.since(before))
    assert measured is not None and measured["samples"] == 200 and measured["mean"] == pytest.approx(0.55 / 0.2)
    assert measured["p50"] == pytest.approx(2.0) and measured["p99"] == pytest.approx(2.0 + 3.0 * 0.98)
    assert overhead(before.since(after)) is None, "a restarted server counts anew"
    assert overhead(after.since(after)) is None
    for _ in range(1000):
        histogram.labels("a").observe(5.0)
    beyond = overhead(page().since(after))
    assert beyond is not None and beyond["p99"] == 10.0, "beyond the last finite bound nobody knows"
    assert read_counters("# nothing here\n") == Counters()
