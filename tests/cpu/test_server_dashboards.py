"""The Grafana dashboard and the alerts query metrics that a running server exposes; so do other engines' dashboards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.cpu.operations import APIS, talk
from thalweg.config.server import ServerOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.server.prometheus import PEERS

DEPLOY = Path(__file__).parents[2] / "deploy" / "grafana"


Types = dict[str, tuple[str, frozenset[str]]]

SGLANG = """num_running_reqs num_queue_reqs token_usage cache_hit_rate gen_throughput prompt_tokens_total generation_tokens_total
time_to_first_token_seconds_bucket time_to_first_token_seconds_sum inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
e2e_request_latency_seconds_count cached_tokens_total num_requests_total num_aborted_requests_total queue_time_seconds_bucket"""
VLLM = """e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum prompt_tokens_total generation_tokens_total
time_per_output_token_seconds_bucket inter_token_latency_seconds_bucket num_requests_running num_requests_waiting
time_to_first_token_seconds_bucket gpu_cache_usage_perc kv_cache_usage_perc request_prompt_tokens_bucket
request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_max_num_generation_tokens_sum prefix_cache_queries_total prefix_cache_hits_total
num_preemptions_total"""


@pytest.fixture(scope="module")
def scraped() -> Types:
    """Every sample of a running server that has served something: its family's type, and its labels."""
    with talk(metrics_names=("sglang", "vllm")) as api:
        for path, body in APIS.items():
            api.post(path, json=body).raise_for_status()
        text = api.get("/metrics").text
    found: Types = {}
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family stands twice"
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = family.type, frozenset(sample.labels)
            assert sample.value == sample.value and sample.value >= 0, sample
    return found


def test_names_that_dashboards_of_others_read(scraped: Types) -> None:
    for prefix, names in (("sglang:", SGLANG), ("vllm:", VLLM)):
        for name in names.split():
            kind, labels = scraped[prefix + name]
            assert "model_name" in labels
            wanted = (
                "counter"
                if name.endswith("_total")
                else "histogram"
                if name.endswith(("_bucket", "_sum", "_count"))
                else "gauge"
            )
            assert kind == wanted, name
    assert scraped["vllm:request_success_total"][1] == {"model_name", "engine", "finished_reason"}
    with talk() as api:
        assert not any(peer + ":" in api.get("/metrics").text for peer in PEERS), "only where they are asked for"
    with pytest.raises(UnsupportedConfig, match="metrics_names"):
        ServerOptions(metrics_names=("tgi",))


def test_other_names_have_the_same_numbers(scraped: Types) -> None:
    with talk(metrics_names=("sglang", "vllm")) as api:
        api.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2}).raise_for_status()
        page = api.get("/metrics").text
    values = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples if "le" not in s.labels}
    for ours, others in {
        "generation_tokens_total": ("sglang:generation_tokens_total", "vllm:generation_tokens_total"),
        "e2e_request_latency_seconds_sum": (
            "sglang:e2e_request_latency_seconds_sum",
            "vllm:e2e_request_latency_seconds_sum",
        ),
        "output_length_tokens_sum": ("vllm:request_generation_tokens_sum",),
    }.items():
        assert values["thalweg_" + ours] > 0 and all(values[name] == values["thalweg_" + ours] for name in others), ours
    assert values["vllm:request_params_n_sum"] == 2 and values["vllm:request_max_num_generation_tokens_sum"] == 5


NAME = re.compile(r"\b(?:thalweg_|process_)[a-z0-9_]+")
COUNTED = re.compile(r"\b(?:rate|increase|resets)\(\s*([a-z0-9_]+)(?:\{[^}]*\})?\[")


def check_promql(expr: str, scraped: Types) -> None:
    """Names exist; what only grows is read through its growth, and nothing else is; quantiles are of buckets, kept
    apart by `le`.
    """
    used, grown = NAME.findall(expr), COUNTED.findall(expr)
    assert used, f"reads nothing of ours: {expr}"
    for name in used:
        assert name in scraped, f"no such metric: {name} in {expr}"
        kind, labels = scraped[name]
        assert (name in grown) == (kind != "gauge"), f"{name} is a {kind}: {expr}"
        for label in re.findall(rf"{name}\{{([^}}]*)\}}", expr):
            assert set(re.findall(r"(\w+)!?=", label)) <= labels | {"instance"}, expr
    for inner in re.findall(r"histogram_quantile\(\s*[\d.]+,\s*(.*)", expr, re.S):
        assert re.match(r"sum by \([^)]*\ble\b[^)]*\) \(rate\(\w+_bucket", inner), f"not a quantile of buckets: {expr}"
    for by in re.findall(r"by \(([^)]*)\)", expr):
        assert set(by.replace(" ", "").split(",")) <= set().union(*(scraped[name][1] for name in used)) | {
            "instance"
        }, expr
    assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")


def test_the_dashboard_reads_what_there_is(scraped: Types) -> None:
    step_records = json.loads((DEPLOY / "thalweg.json").read_text(encoding="utf-8"))
    panels = [panel for panel in step_records["panels"] if panel["type"] != "row"]
    ids = [panel["id"] for panel in step_records["panels"]]
    assert len(ids) == len(set(ids)) and len(panels) > 20
    for panel in panels:
        assert panel["title"] and panel["description"], panel["title"]
        for target in panel["targets"]:
            check_promql(target["expr"], scraped)
            assert "__rate_interval" in target["expr"] or "[" not in target["expr"], target["expr"]
            labels = set().union(*(scraped[name][1] for name in NAME.findall(target["expr"])))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels | {"instance"}
    variables = {entry["name"]: entry for entry in step_records["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", json.dumps(panels))) <= {*variables, "__rate_interval"}
    for entry in variables.values():
        for name in NAME.findall(str(entry["query"])):
            assert name in scraped
    cells = [
        (x, y)
        for panel in step_records["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels lie over each other"


def test_alerts_read_what_there_is(scraped: Types) -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    assert len(group["rules"]) >= 6
    for rule in group["rules"]:
        check_promql(rule["expr"], scraped)
        assert set(rule["annotations"]) == {"summary", "action"} and rule["labels"]["severity"] in (
            "warning",
            "critical",
        )
        flags = re.findall(r"--([a-z-]+)", rule["annotations"]["action"])
        known = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
        assert all(f"`--{flag}`" in known for flag in flags), flags


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(thalweg_running_requests[5m])",
        "thalweg_requests_total",
        "sum(rate(thalweg_gone_total[5m]))",
        "histogram_quantile(0.9, sum(rate(thalweg_emit_seconds_bucket[5m])))",
        "histogram_quantile(0.9, sum by (le) (rate(thalweg_emit_seconds_sum[5m])))",
        "sum by (route) (rate(thalweg_emit_seconds_count[5m]))",
        'thalweg_up{route="x"}',
    ],
)
def test_wrong_queries_are_found(wrong: str, scraped: Types) -> None:
    with pytest.raises(AssertionError):
        check_promql(wrong, scraped)


def test_the_page_names_every_metric(scraped: Types) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    for name in scraped:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert f"`{family}" in page or name.endswith("_created") or name.startswith(("process_", "thalweg_engine_")), (
            family
        )
