"""/metrics as Prometheus reads it, and the numbers behind it."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cpu.fakes import FakeFront, fake_app, serving
from thalweg.config.server import ServerOptions
from thalweg.core.messages import Stats
from thalweg.server.metrics import Histogram, Meters, Timer, exposition

DASHBOARD = {
    "sglang:num_running_reqs": "gauge",
    "sglang:num_queue_reqs": "gauge",
    "sglang:token_usage": "gauge",
    "sglang:cache_hit_rate": "gauge",
    "sglang:gen_throughput": "gauge",
    "sglang:time_to_first_token_seconds": "histogram",
    "sglang:inter_token_latency_seconds": "histogram",
    "sglang:e2e_request_latency_seconds": "histogram",
    "sglang:prompt_tokens": "counter",
    "sglang:generation_tokens": "counter",
}


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
    for name, kind in DASHBOARD.items():
        assert got[name][0] == kind, name
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
    assert got["sglang:generation_tokens"][1]["sglang:generation_tokens_total"] == 25


def test_the_aliases_and_the_route_can_be_turned_off() -> None:
    with serving(fake_app(FakeFront(), ServerOptions(sglang_metrics=False))) as url:
        assert "sglang:" not in httpx.get(url + "/metrics").text
    with serving(fake_app(FakeFront(), ServerOptions(metrics=False))) as url:
        assert httpx.get(url + "/metrics").status_code == 404


def test_gauges_come_from_the_engine_and_names_are_escaped() -> None:
    stats = Stats(running=3, waiting=2, pages=50, pages_used=20, pages_cached=5, prompt_tokens=200, cached_tokens=50)
    got = families(exposition(Meters(), stats, True, 'odd "name"\\with\nall', True))
    values = {name: next(iter(samples.values())) for name, (_, samples) in got.items() if samples}
    assert (values["sglang:num_running_reqs"], values["sglang:num_queue_reqs"]) == (3, 2)
    assert (values["sglang:token_usage"], values["sglang:cache_hit_rate"]) == (0.4, 0.25)
    family = next(
        f for f in text_string_to_metric_families(exposition(Meters(), stats, True, 'a"b\\c\nd', False)) if f.samples
    )
    assert family.samples[0].labels["model_name"] == 'a"b\\c\nd'


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(1.5, times=3)
    assert list(histogram.lines("h", 'm="x"')) == [
        'h_bucket{m="x",le="1.0"} 2',
        'h_bucket{m="x",le="2.0"} 7',
        'h_bucket{m="x",le="+Inf"} 8',
        'h_sum{m="x"} 18.5',
        'h_count{m="x"} 8',
    ]


def test_a_piece_of_several_tokens_is_several_gaps() -> None:
    meters = Meters()
    timer = Timer(meters, 10.0)
    timer.piece(0, 1, 10.5)
    timer.piece(0, 0, 10.6)
    timer.piece(0, 4, 10.9)
    assert (meters.first.count, meters.between.count) == (1, 4)
    assert meters.between.sum == pytest.approx(0.4) and meters.generation_tokens == 5


def test_rates_are_those_of_the_last_seconds_and_survive_a_new_engine() -> None:
    meters = Meters()
    for second in range(20):
        meters.sample(float(second), Stats(steps=second, decode_tokens=100 * second, prefill_tokens=7 * second))
    assert (meters.rates().decode, meters.rates().prefill) == (100, 7)
    meters.sample(20.0, Stats(steps=20, decode_tokens=1900 + 500))
    assert meters.rates(1.0).decode == 500
    meters.sample(21.0, Stats(steps=1, decode_tokens=40))
    assert meters.rates().decode == 0, "a new engine counts from zero"
    meters.sample(22.0, Stats(steps=2, decode_tokens=90))
    assert meters.rates().decode == 50
