"""`/metrics` in Prometheus' text format: our own names, and on wish those that the dashboards of SGLang and vLLM read.
A name of theirs stands here only where its number is measured, with their type and labels; docs/operations.md lists
what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from thalweg import __version__
from thalweg.core.messages import EngineReady, Stats
from thalweg.core.plan import PAGE
from thalweg.server.metrics import WINDOW, BucketHistogram, ServerMetrics, hit_rate, token_usage

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """What is exposed: serving: the engine takes requests. ready: what it said of itself, None while there is none.
    model: its first name.
    """

    metrics: ServerMetrics
    stats: Stats
    serving: bool
    ready: EngineReady | None
    model: str


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """All samples of one name. values: (labels of its own, number) pairs, or a histogram."""

    name: str
    kind: Kind
    help: str
    values: Sequence[tuple[Labels, float]] | BucketHistogram

    def lines(self, labels: Labels) -> Iterator[str]:
        """labels: what all samples carry."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        if isinstance(self.values, BucketHistogram):
            yield from self.values.lines(self.name, _written(labels))
            return
        for own, value in self.values:
            yield f"{self.name}{{{_written(labels + own)}}} {value!r}"


def prometheus_text(snapshot: MetricsSnapshot, names: Iterable[str] = ()) -> str:
    """The text of /metrics. names: of `PEERS`, under whose names it is given too."""
    model: Labels = (("model_name", snapshot.model),)
    lines = [line for family in own(snapshot) for line in family.lines(model)]
    for peer in names:
        families, labels = PEERS[peer]
        lines += [line for family in families(snapshot) for line in family.lines(model + labels)]
    return "\n".join(lines) + "\n" + _processes(snapshot.ready)


def own(snapshot: MetricsSnapshot) -> Iterator[MetricFamily]:
    """Our own names."""
    metrics, stats, rates = snapshot.metrics, snapshot.stats, snapshot.metrics.rates()
    yield _gauge("thalweg_up", "1 while the engine serves", int(snapshot.serving))
    yield MetricFamily("thalweg_build_info", "gauge", "1, with the version", [((("version", __version__),), 1)])
    answers = [
        ((("route", route), ("status", str(status))), count)
        for (route, status), count in sorted(metrics.requests.items())
    ]
    yield MetricFamily("thalweg_requests_total", "counter", "answered requests", answers)
    yield _by_finish("thalweg_choices_total", "finish", "outputs that ended, by how", metrics.finished)
    yield _gauge("thalweg_running_requests", "sequences that hold a slot", stats.running)
    yield _gauge("thalweg_waiting_requests", "sequences that wait for a slot", stats.waiting)
    yield _gauge(
        "thalweg_slots", "sequences that can run at a time", 0 if snapshot.ready is None else snapshot.ready.slots
    )
    yield _gauge("thalweg_cache_pages", "pages of the cache", stats.pages)
    yield _gauge("thalweg_cache_pages_used", "pages that requests hold", stats.pages_used)
    yield _gauge("thalweg_cache_pages_cached", "pages that only the prefix cache holds", stats.pages_cached)
    yield _gauge("thalweg_token_usage", "share of the pages that requests hold", token_usage(stats))
    yield _gauge("thalweg_cache_hit_rate", "share of prompt tokens found in the prefix cache", hit_rate(stats))
    yield _gauge("thalweg_decode_tokens_per_second", f"over the last {WINDOW:g} s", rates.decode)
    yield _gauge("thalweg_prefill_tokens_per_second", f"over the last {WINDOW:g} s", rates.prefill)
    yield _counter("thalweg_steps_total", "steps of the engine", stats.steps)
    yield _counter("thalweg_step_seconds_total", "seconds in which steps were in flight", stats.step_seconds)
    yield _counter("thalweg_prefill_tokens_total", "prompt tokens computed", stats.prefill_tokens)
    yield _counter("thalweg_decode_tokens_total", "tokens sampled", stats.decode_tokens)
    yield from _drafts(stats)
    yield _counter("thalweg_preemptions_total", "sequences that gave their pages back and waited", stats.preemptions)
    yield _counter("thalweg_finished_total", "sequences that ended by themselves", stats.finished)
    yield _counter("thalweg_aborted_total", "sequences that were aborted", stats.aborted)
    yield _counter("thalweg_no_numbers_total", "sequences for which the model computed no numbers", stats.broken)
    yield _counter("thalweg_disconnects_total", "requests whose client went away", metrics.disconnects)
    yield _counter("thalweg_prompt_tokens_total", "prompt tokens of ended choices", metrics.prompt_tokens)
    yield _counter("thalweg_generation_tokens_total", "tokens generated", metrics.generation_tokens)
    yield _counter("thalweg_cached_tokens_total", "of the prompt tokens, from the cache", metrics.cached_tokens)
    yield _timed("thalweg_time_to_first_token_seconds", "request read to first token", metrics.first)
    yield _timed("thalweg_inter_token_latency_seconds", "between tokens of a choice", metrics.between)
    yield _timed("thalweg_time_per_output_token_seconds", "mean gap between the tokens of a choice", metrics.per_token)
    yield _timed("thalweg_e2e_request_latency_seconds", "request read to last token", metrics.whole)
    yield _timed("thalweg_queue_time_seconds", "handed to the engine to admitted", metrics.queued)
    yield _timed("thalweg_prefill_time_seconds", "admitted to first token", metrics.prefill)
    yield _timed("thalweg_decode_time_seconds", "first token to last token", metrics.decode)
    yield _timed("thalweg_emit_seconds", "end of an engine step to its token written to the socket", metrics.emit)
    yield _timed("thalweg_prompt_length_tokens", "tokens of a prompt", metrics.prompt_lengths)
    yield _timed("thalweg_output_length_tokens", "tokens of an output", metrics.output_lengths)
    yield _timed("thalweg_accept_length_tokens", "mean tokens of a verification, of each output", metrics.accepts)


def _drafts(stats: Stats) -> Iterator[MetricFamily]:
    """Of speculation."""
    back = stats.drafted_tokens - stats.accepted_tokens
    yield _counter("thalweg_verifications_total", "drafts of a sequence verified in one step", stats.verifications)
    yield _counter("thalweg_drafted_tokens_total", "drafted tokens that were verified", stats.drafted_tokens)
    yield _counter("thalweg_accepted_tokens_total", "of these, accepted", stats.accepted_tokens)
    yield _counter("thalweg_rolled_back_tokens_total", "of these, computed and thrown away", back)
    yield _counter("thalweg_wasted_drafts_total", "drafted tokens that were never verified", stats.wasted_drafts)
    for name, counts in (("drafted", stats.drafted_at), ("accepted", stats.accepted_at)):
        text = f"verifications with a draft {name} so many places behind the known tokens"
        yield _by_number(f"thalweg_{name}_by_depth_total", text, "depth", counts, 1)
    text = "steps that sampled, by drafts made of each sequence"
    yield _by_number("thalweg_steps_by_width_total", text, "width", stats.steps_by_width, 0)
    yield _counter("thalweg_drafter_failures_total", "drafters switched off for a failure", stats.drafter_failures)


def sglang(snapshot: MetricsSnapshot) -> Iterator[MetricFamily]:
    """SGLang's names (`sglang.srt.observability.metrics_collector` of 0.5.23), as its published dashboard and its
    documentation have them.
    """
    metrics, stats = snapshot.metrics, snapshot.stats
    free = stats.pages - stats.pages_used - stats.pages_cached
    yield _gauge("sglang:num_running_reqs", "running requests", stats.running)
    yield _gauge("sglang:num_queue_reqs", "waiting requests", stats.waiting)
    yield _gauge("sglang:max_total_num_tokens", "tokens that the cache holds", stats.pages * PAGE)
    yield _gauge("sglang:num_used_tokens", "of these, held by requests, in whole pages", stats.pages_used * PAGE)
    yield _gauge("sglang:kv_used_tokens", "the same", stats.pages_used * PAGE)
    yield _gauge("sglang:kv_evictable_tokens", "held by the prefix cache alone", stats.pages_cached * PAGE)
    yield _gauge("sglang:kv_available_tokens", "free", free * PAGE)
    yield _gauge("sglang:token_usage", "share of the cache that requests hold", token_usage(stats))
    yield _gauge("sglang:cache_hit_rate", "share of prompt tokens found in the cache", hit_rate(stats))
    yield _gauge("sglang:spec_accept_length", "mean tokens of a verification", stats.acceptance.mean_length or 0.0)
    yield _gauge("sglang:spec_accept_rate", "share of the drafts accepted", stats.acceptance.rate or 0.0)
    yield _gauge("sglang:gen_throughput", f"tokens a second over the last {WINDOW:g} s", metrics.rates().decode)
    yield _counter("sglang:prompt_tokens_total", "prompt tokens", metrics.prompt_tokens)
    yield _counter("sglang:generation_tokens_total", "tokens generated", metrics.generation_tokens)
    cached: list[tuple[Labels, float]] = [((("cache_source", "device"),), metrics.cached_tokens)]
    yield MetricFamily("sglang:cached_tokens_total", "counter", "prompt tokens from the cache", cached)
    yield _counter("sglang:num_requests_total", "requests that ended", sum(metrics.finished.values()))
    yield _counter("sglang:num_aborted_requests_total", "of these, aborted", metrics.finished["abort"])
    yield _timed("sglang:time_to_first_token_seconds", "time to first token", metrics.first)
    yield _timed("sglang:inter_token_latency_seconds", "between tokens", metrics.between)
    yield _timed("sglang:e2e_request_latency_seconds", "to the last token", metrics.whole)
    yield _timed("sglang:queue_time_seconds", "waited for a slot", metrics.queued)


def vllm(snapshot: MetricsSnapshot) -> Iterator[MetricFamily]:
    """vLLM's names (`vllm.v1.metrics.loggers` of 0.33), as its published dashboards have them; those that it has
    renamed under both.
    """
    metrics, stats = snapshot.metrics, snapshot.stats
    yield _gauge("vllm:num_requests_running", "running requests", stats.running)
    yield _gauge("vllm:num_requests_waiting", "waiting requests", stats.waiting)
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        yield _gauge(name, "share of the cache that requests hold, 1 is all", token_usage(stats))
    for name in ("vllm:prefix_cache", "vllm:gpu_prefix_cache"):
        yield _counter(name + "_queries_total", "prompt tokens looked up in the cache", stats.prompt_tokens)
        yield _counter(name + "_hits_total", "of these, found", stats.cached_tokens)
    yield _counter("vllm:spec_decode_num_drafts_total", "verifications", stats.verifications)
    yield _counter("vllm:spec_decode_num_draft_tokens_total", "drafted tokens verified", stats.drafted_tokens)
    yield _counter("vllm:spec_decode_num_accepted_tokens_total", "of these, accepted", stats.accepted_tokens)
    text = "verifications that accepted a draft there"
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    yield _by_number(name, text, "position", stats.accepted_at, 0)
    yield _counter("vllm:num_preemptions_total", "preemptions", stats.preemptions)
    yield _counter("vllm:prompt_tokens_total", "prompt tokens", metrics.prompt_tokens)
    yield _counter("vllm:generation_tokens_total", "tokens generated", metrics.generation_tokens)
    yield _by_finish("vllm:request_success_total", "finished_reason", "requests that ended, by how", metrics.finished)
    yield _timed("vllm:time_to_first_token_seconds", "time to first token", metrics.first)
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        yield _timed(name, "between tokens", metrics.between)
    yield _timed("vllm:request_time_per_output_token_seconds", "mean gap between tokens", metrics.per_token)
    yield _timed("vllm:e2e_request_latency_seconds", "to the last token", metrics.whole)
    yield _timed("vllm:request_queue_time_seconds", "waited for a slot", metrics.queued)
    yield _timed("vllm:request_inference_time_seconds", "admitted to last token", metrics.running)
    yield _timed("vllm:request_prefill_time_seconds", "admitted to first token", metrics.prefill)
    yield _timed("vllm:request_decode_time_seconds", "first token to last token", metrics.decode)
    yield _timed("vllm:request_prompt_tokens", "tokens of a prompt", metrics.prompt_lengths)
    yield _timed("vllm:request_generation_tokens", "tokens of an output", metrics.output_lengths)
    yield _timed("vllm:request_max_num_generation_tokens", "the longest of n outputs", metrics.longest_outputs)
    yield _timed("vllm:request_params_n", "n of the requests", metrics.widths)
    yield _timed("vllm:request_params_max_tokens", "max_tokens of those that set it", metrics.limits)


PEERS: Mapping[str, tuple[Callable[[MetricsSnapshot], Iterator[MetricFamily]], Labels]] = {
    "sglang": (sglang, ()),
    "vllm": (vllm, (("engine", "0"),)),
}


def _gauge(name: str, text: str, value: float) -> MetricFamily:
    return MetricFamily(name, "gauge", text, [((), value)])


def _counter(name: str, text: str, value: float) -> MetricFamily:
    return MetricFamily(name, "counter", text, [((), value)])


def _timed(name: str, text: str, histogram: BucketHistogram) -> MetricFamily:
    return MetricFamily(name, "histogram", text, histogram)


def _by_finish(name: str, label: str, text: str, counts: Mapping[str, int]) -> MetricFamily:
    return MetricFamily(name, "counter", text, [(((label, finish),), count) for finish, count in counts.items()])


def _by_number(name: str, text: str, label: str, counts: Sequence[int], first: int) -> MetricFamily:
    """first: the label of the first count."""
    return MetricFamily(name, "counter", text, [(((label, str(first + i)),), count) for i, count in enumerate(counts)])


def _written(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _processes(ready: EngineReady | None) -> str:
    """CPU, memory and descriptors of this process (`process_*`) and of the engine's (`thalweg_engine_process_*`), where
    /proc tells.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    if ready is not None:
        pid = ready.pid
        ProcessCollector(namespace="thalweg_engine", pid=lambda: pid, registry=registry)
    return generate_latest(registry).decode()
