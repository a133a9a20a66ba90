"""/metrics as Prometheus reads it, and the numbers behind it."""

from __future__ import annotations

import os

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cpu.fakes import FakeFront, Piece, fake_app, serving
from thalweg.config.server import ServerOptions
from thalweg.core.messages import Stats
from thalweg.core.sampling import SamplingParams
from thalweg.server.accounting import RequestAccounting
from thalweg.server.metrics import BucketHistogram, RequestTimer, ServerMetrics
from thalweg.server.prometheus import MetricsSnapshot, prometheus_text


def families(text: str) -> dict[str, tuple[str, dict[str, float]]]:
    """Family → its type, and its samples by name and the labels that are not the model's."""
    found = {}
    for family in text_string_to_metric_families(text):
        samples = {}
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            samples[sample.name + "".join(f" {value}" for value in labels.values())] = sample.value
        found[family.name] = (family.type, samples)
    return found


def test_a_served_request_is_counted_once() -> None:
    with serving(fake_app(FakeFront())) as url, httpx.Client(base_url=url) as api:
        api.post("/v1/completions", json={"prompt": ["abc", "de"], "max_tokens": 5, "n": 2}).raise_for_status()
        with api.stream("POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 5, "stream": True}) as answer:
            answer.read()
        api.post("/v1/completions", json={"prompt": ""})
        api.get("/nowhere")
        got = families(api.get("/metrics").text)
    assert got["thalweg_requests"][1] == {
        "thalweg_requests_total /v1/completions 200": 2,
        "thalweg_requests_total /v1/completions 400": 1,
        "thalweg_requests_total other 404": 1,
    }
    assert got["thalweg_generation_tokens"][1]["thalweg_generation_tokens_total"] == 25
    assert got["thalweg_prompt_tokens"][1]["thalweg_prompt_tokens_total"] == 2 * 3 + 2 * 2 + 3
    assert got["thalweg_time_to_first_token_seconds"][1]["thalweg_time_to_first_token_seconds_count"] == 5
    assert got["thalweg_inter_token_latency_seconds"][1]["thalweg_inter_token_latency_seconds_count"] == 20
    assert got["thalweg_e2e_request_latency_seconds"][1]["thalweg_e2e_request_latency_seconds_count"] == 5
    assert got["thalweg_emit_seconds"][1]["thalweg_emit_seconds_count"] == 5, "only what is streamed leaves a socket"


def test_the_route_can_be_turned_off() -> None:
    with serving(fake_app(FakeFront(), ServerOptions(metrics=False))) as url:
        assert httpx.get(url + "/metrics").status_code == 404


def test_gauges_come_from_the_engine_and_names_are_escaped() -> None:
    stats = Stats(running=3, waiting=2, pages=50, pages_used=20, pages_cached=5, prompt_tokens=200, cached_tokens=50)
    sight = MetricsSnapshot(ServerMetrics(), stats, True, None, 'odd "name"\\with\nall')
    got = families(prometheus_text(sight, ("sglang",)))
    values = {name: next(iter(samples.values())) for name, (_, samples) in got.items() if samples}
    assert (values["sglang:num_running_reqs"], values["sglang:num_queue_reqs"]) == (3, 2)
    assert (values["sglang:token_usage"], values["sglang:cache_hit_rate"]) == (0.4, 0.25)
    assert values["sglang:kv_available_tokens"] == 25 * 64
    family = next(f for f in text_string_to_metric_families(prometheus_text(sight)) if f.samples)
    assert family.samples[0].labels["model_name"] == 'odd "name"\\with\nall'


def test_histogram_bounds_are_inclusive() -> None:
    histogram = BucketHistogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(1.5, times=3)
    assert (histogram.counts, histogram.sum, histogram.count) == ([2, 5, 1], 18.5, 8)


def test_buckets_are_cumulative() -> None:
    metrics = ServerMetrics()
    for value in (1, 2, 3, 30):
        metrics.choices.observe(value)
    snapshot = MetricsSnapshot(metrics, Stats(), True, None, "x")
    samples = families(prometheus_text(snapshot, ("vllm",)))["vllm:request_params_n"][1]
    assert [samples[f"vllm:request_params_n_bucket 0 {bound}"] for bound in ("1", "2", "5", "+Inf")] == [
        1,
        2,
        3,
        4,
    ]
    assert (samples["vllm:request_params_n_sum 0"], samples["vllm:request_params_n_count 0"]) == (36, 4)


def piece(tokens: int, total: int, finish: str | None = None, index: int = 0, admitted: float = 10.2) -> Piece:
    counts = 7, 3, total, (), 0.0, admitted, 1
    return Piece(index, "x" * tokens, (5,) * tokens, (), finish, None, *counts, is_sibling=index % 2 == 1)


def test_a_piece_of_several_tokens_is_several_gaps() -> None:
    meters, account = ServerMetrics(), RequestAccounting("POST", "/generate", {}, 10.0)
    timer = RequestTimer(meters, account, [[1] * 7], [SamplingParams(max_tokens=9)], 10.1)
    timer.piece(piece(1, 1), 10.5)
    timer.piece(piece(0, 1), 10.6)
    timer.piece(piece(4, 5), 10.9)
    assert (meters.first.count, meters.between.count) == (1, 4)
    assert meters.between.sum == pytest.approx(0.4) and meters.generation_tokens == 5
    assert (meters.queued.sum, meters.prefill.sum) == (pytest.approx(0.1), pytest.approx(0.3))
    timer.piece(piece(0, 5, "length"), 11.0)
    timer.close(1, "error")
    assert (account.admitted, account.first, account.last, account.submitted) == (10.2, 10.5, 10.9, 10.1)
    assert (account.prompt_tokens, account.cached_tokens, account.output_tokens) == (7, 3, 5)
    assert account.finishes == ["length"] and account.preemptions == 1
    assert account.queued == pytest.approx(0.1) and account.ttft == pytest.approx(0.5)
    assert meters.decode.sum == pytest.approx(0.4) and meters.per_token.sum == pytest.approx(0.1)
    assert meters.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_what_did_not_end_by_itself_is_counted_too() -> None:
    meters, account = ServerMetrics(), RequestAccounting("POST", "/generate", {}, 10.0)
    timer = RequestTimer(meters, account, [[1], [2]], [SamplingParams(n=2)] * 2, 10.0)
    timer.piece(piece(2, 2, index=1, admitted=0.0), 11.0)
    timer.piece(piece(0, 2, "stop", 1), 11.0)
    timer.piece(piece(3, 3, index=2, admitted=0.0), 12.0)
    timer.close(4, "abort")
    assert account.finishes == ["stop", "abort", "abort", "abort"] and account.output_tokens == 5
    assert meters.finished == {"stop": 1, "length": 0, "abort": 3, "error": 0}
    assert account.cached_tokens == 0, "its first choice, which stands for the prompt, has not ended"
    assert account.queued is None and meters.queued.count == 0
    assert meters.choices.count == 2 and meters.max_tokens.count == 0


def test_rates_are_those_of_the_last_seconds_and_survive_a_new_engine() -> None:
    meters = ServerMetrics()
    for second in range(20):
        meters.sample(float(second), Stats(steps=second, decode_tokens=100 * second, prefill_tokens=7 * second))
    assert (meters.rates().decode, meters.rates().prefill) == (100, 7)
    meters.sample(20.0, Stats(steps=20, decode_tokens=1900 + 500))
    assert meters.rates(1.0).decode == 500
    meters.sample(21.0, Stats(steps=1, decode_tokens=40))
    assert meters.rates().decode == 0, "a new engine counts from zero"
    meters.sample(22.0, Stats(steps=2, decode_tokens=90))
    assert meters.rates().decode == 50


def test_data_parallel_ranks_have_metrics_of_their_own() -> None:
    of_ranks = {0: Stats(running=1, waiting=2, pages=5), 1: Stats(running=3, decode_tokens=7)}
    snapshot = MetricsSnapshot(ServerMetrics(), Stats(running=4, pages=5), True, None, "x", of_ranks=of_ranks)
    got = families(prometheus_text(snapshot))
    assert got["thalweg_rank_running_requests"] == (
        "gauge",
        {"thalweg_rank_running_requests 0": 1, "thalweg_rank_running_requests 1": 3},
    )
    assert got["thalweg_rank_decode_tokens"][1]["thalweg_rank_decode_tokens_total 1"] == 7
    assert got["thalweg_running_requests"][1] == {"thalweg_running_requests": 4}, "totals have no rank"
    assert not families(prometheus_text(snapshot._replace(of_ranks={})))["thalweg_rank_cache_pages"][1]


def test_the_engines_processes_are_added_up() -> None:
    """One of them has just ended."""
    own = os.getpid()

    def values(*pids: int) -> dict[str, float]:
        text = prometheus_text(MetricsSnapshot(ServerMetrics(), Stats(), True, None, "x", pids=pids))
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if "process_" in line and line[0] != "#")
        return {name: float(value) for name, value in lines}

    assert "thalweg_engine_process_open_fds" not in values()
    found = values(own, own, 1 << 22)
    for name in ("resident_memory_bytes", "open_fds", "cpu_seconds_total"):
        assert found[f"thalweg_engine_process_{name}"] == pytest.approx(2 * found[f"process_{name}"], rel=0.1)
    started = [values(own, os.getppid())[f"{name}process_start_time_seconds"] for name in ("thalweg_engine_", "")]
    assert started[0] < started[1], "the first one's"
