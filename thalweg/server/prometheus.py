"""Prometheus text of /metrics: our own names, and on request those that the dashboards of SGLang and vLLM read.

A name of theirs is here only if its number is measured, with their type and labels; docs/operations.md lists the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from thalweg import __version__
from thalweg.core.messages import EngineReady, Stats
from thalweg.server.metrics import WINDOW, BucketHistogram, ServerMetrics, hit_rate, token_usage

RANK_STATS = "running", "waiting", "pages", "pages_used", "pages_cached", "prefill_tokens", "decode_tokens"


class MetricsSnapshot(NamedTuple):
    """The source of all metrics."""

    metrics: ServerMetrics
    stats: Stats
    serving: bool  # the engine takes requests
    ready: EngineReady | None
    model: str
    weights_lost: bool = False  # it has its starting weights again, not the replaced ones
    of_ranks: Mapping[int, Stats] = {}  # of each data-parallel rank, if there are several
    pids: Sequence[int] = ()  # of the engine's processes here

    @property
    def derived(self) -> Mapping[str, Any]:
        """Values that are computed from others."""
        stats, rates = self.stats, self.metrics.rates()
        return {
            "serving": int(self.serving),
            "weights_lost": int(self.weights_lost),
            "version": {__version__: 1},
            "slots": 0 if self.ready is None else self.ready.slots,
            "token_usage": token_usage(stats),
            "hit_rate": hit_rate(stats),
            "decode_rate": rates.decode,
            "prefill_rate": rates.prefill,
            "rolled_back": stats.drafted_tokens - stats.accepted_tokens,
            "cache_tokens": stats.pages * stats.page_size,
            "used_tokens": stats.pages_used * stats.page_size,
            "evictable_tokens": stats.pages_cached * stats.page_size,
            "free_tokens": (stats.pages - stats.pages_used - stats.pages_cached) * stats.page_size,
            "cached_by_source": {"device": self.metrics.cached_tokens},
            "ended": sum(self.metrics.finished.values()),
            "aborted": self.metrics.finished["abort"],
            **{
                f"rank_{name}": {rank: getattr(of_rank, name) for rank, of_rank in self.of_ranks.items()}
                for name in RANK_STATS
            },
        }


# Name, help, value: a key of `derived`, or an attribute: a number, a histogram, {label value: number}, or a sequence.
# A name that ends with _total is a counter; a `BucketHistogram` is a histogram; others are gauges.
OWN = (
    ("thalweg_up", "1 while the engine serves", "serving"),
    ("thalweg_build_info", "1, with the version", "version"),
    ("thalweg_weights_lost", "1 after a restart that could not load the replaced weights again", "weights_lost"),
    ("thalweg_requests_total", "answered requests", "metrics.requests"),
    ("thalweg_choices_total", "sequences that ended, by finish reason", "metrics.finished"),
    ("thalweg_running_requests", "sequences that hold a slot", "stats.running"),
    ("thalweg_waiting_requests", "sequences that wait for a slot", "stats.waiting"),
    ("thalweg_rank_running_requests", "sequences that hold a slot of a data-parallel rank", "rank_running"),
    ("thalweg_rank_waiting_requests", "sequences that wait for a slot of a data-parallel rank", "rank_waiting"),
    ("thalweg_rank_cache_pages", "pages of a data-parallel rank's cache", "rank_pages"),
    ("thalweg_rank_cache_pages_used", "pages that requests hold there", "rank_pages_used"),
    ("thalweg_rank_cache_pages_cached", "pages that only the prefix cache holds there", "rank_pages_cached"),
    ("thalweg_rank_prefill_tokens_total", "prompt tokens computed by a data-parallel rank", "rank_prefill_tokens"),
    ("thalweg_rank_decode_tokens_total", "tokens sampled by a data-parallel rank", "rank_decode_tokens"),
    ("thalweg_slots", "sequences that can run at a time", "slots"),
    ("thalweg_cache_pages", "pages of the cache", "stats.pages"),
    ("thalweg_cache_pages_used", "pages that requests hold", "stats.pages_used"),
    ("thalweg_cache_pages_cached", "pages that only the prefix cache holds", "stats.pages_cached"),
    ("thalweg_token_usage", "KV cache usage, 0 to 1: the share of pages that running requests hold", "token_usage"),
    ("thalweg_cache_hit_rate", "share of prompt tokens found in the prefix cache", "hit_rate"),
    ("thalweg_decode_tokens_per_second", f"over the last {WINDOW:g} s", "decode_rate"),
    ("thalweg_prefill_tokens_per_second", f"over the last {WINDOW:g} s", "prefill_rate"),
    ("thalweg_steps_total", "steps of the engine", "stats.steps"),
    ("thalweg_step_seconds_total", "seconds in which steps were in flight", "stats.step_seconds"),
    ("thalweg_prefill_tokens_total", "prompt tokens computed", "stats.prefill_tokens"),
    ("thalweg_decode_tokens_total", "tokens sampled", "stats.decode_tokens"),
    ("thalweg_verifications_total", "verifications: one for each sequence and step with drafts", "stats.verifications"),
    ("thalweg_drafted_tokens_total", "draft tokens that were verified", "stats.drafted_tokens"),
    ("thalweg_accepted_tokens_total", "accepted draft tokens", "stats.accepted_tokens"),
    ("thalweg_rolled_back_tokens_total", "rejected draft tokens", "rolled_back"),
    ("thalweg_wasted_drafts_total", "draft tokens that were never verified", "stats.wasted_drafts"),
    (
        "thalweg_drafted_by_depth_total",
        "verifications with a draft token at this depth",
        "stats.drafted_at",
    ),
    (
        "thalweg_accepted_by_depth_total",
        "verifications that accepted the draft token at this depth",
        "stats.accepted_at",
    ),
    (
        "thalweg_steps_by_num_drafts_total",
        "steps that sampled, by drafts made of each sequence",
        "stats.steps_by_num_drafts",
    ),
    ("thalweg_drafter_failures_total", "drafters switched off for a failure", "stats.drafter_failures"),
    ("thalweg_preemptions_total", "sequences that gave their pages back and waited", "stats.preemptions"),
    ("thalweg_finished_total", "sequences that finished: stop or length", "stats.finished"),
    ("thalweg_aborted_total", "sequences that were aborted", "stats.aborted"),
    ("thalweg_nan_outputs_total", "sequences for which the model computed NaN", "stats.broken"),
    ("thalweg_slow_steps_total", "steps with decode rows that took longer than --max-itl-ms", "stats.slow_steps"),
    ("thalweg_late_first_tokens_total", "first tokens later than --max-ttft-ms", "stats.late_first_tokens"),
    (
        "thalweg_expert_imbalance",
        "largest load of a rank over the mean, of a layer's experts, by the last counts (--enable-eplb)",
        "stats.expert_imbalance",
    ),
    ("thalweg_expert_moves_total", "experts copied to another rank or slot", "stats.expert_moves"),
    ("thalweg_expert_rebalances_total", "times that experts got new places", "stats.expert_rebalances"),
    ("thalweg_disconnects_total", "requests whose client went away", "metrics.disconnects"),
    ("thalweg_prompt_tokens_total", "prompt tokens of ended sequences", "metrics.prompt_tokens"),
    ("thalweg_generation_tokens_total", "tokens generated", "metrics.generation_tokens"),
    (
        "thalweg_cached_tokens_total",
        "prompt tokens of ended sequences found in the prefix cache",
        "metrics.cached_tokens",
    ),
    ("thalweg_time_to_first_token_seconds", "request read to first token", "metrics.first"),
    ("thalweg_inter_token_latency_seconds", "every gap between two tokens of a sequence", "metrics.between"),
    ("thalweg_time_per_output_token_seconds", "mean gap between the tokens of a sequence", "metrics.per_token"),
    ("thalweg_e2e_request_latency_seconds", "request read to last token", "metrics.whole"),
    ("thalweg_queue_time_seconds", "handed to the engine to admitted", "metrics.queued"),
    ("thalweg_prefill_time_seconds", "admitted to first token", "metrics.prefill"),
    ("thalweg_decode_time_seconds", "first token to last token", "metrics.decode"),
    ("thalweg_emit_seconds", "end of an engine step to its token written to the socket", "metrics.emit"),
    ("thalweg_prompt_length_tokens", "tokens of a prompt", "metrics.prompt_lengths"),
    ("thalweg_output_length_tokens", "generated tokens of a sequence", "metrics.output_lengths"),
    ("thalweg_accept_length_tokens", "mean accept length of each sequence with drafts", "metrics.accept_lengths"),
)
# Names of the peers, each with a value of `OWN`. SGLang: `sglang.srt.observability.metrics_collector` 0.5.23.
SGLANG = {
    "sglang:num_running_reqs": "stats.running",
    "sglang:num_queue_reqs": "stats.waiting",
    "sglang:max_total_num_tokens": "cache_tokens",
    "sglang:num_used_tokens": "used_tokens",
    "sglang:kv_used_tokens": "used_tokens",
    "sglang:kv_evictable_tokens": "evictable_tokens",
    "sglang:kv_available_tokens": "free_tokens",
    "sglang:token_usage": "token_usage",
    "sglang:cache_hit_rate": "hit_rate",
    "sglang:spec_accept_length": "stats.acceptance.mean_length",
    "sglang:spec_accept_rate": "stats.acceptance.rate",
    "sglang:gen_throughput": "decode_rate",
    "sglang:prompt_tokens_total": "metrics.prompt_tokens",
    "sglang:generation_tokens_total": "metrics.generation_tokens",
    "sglang:cached_tokens_total": "cached_by_source",
    "sglang:num_requests_total": "ended",
    "sglang:num_aborted_requests_total": "aborted",
    "sglang:time_to_first_token_seconds": "metrics.first",
    "sglang:inter_token_latency_seconds": "metrics.between",
    "sglang:e2e_request_latency_seconds": "metrics.whole",
    "sglang:queue_time_seconds": "metrics.queued",
}
# vLLM's are of `vllm.v1.metrics.loggers` (0.33); renamed ones are here under both names.
VLLM = {
    "vllm:num_requests_running": "stats.running",
    "vllm:num_requests_waiting": "stats.waiting",
    "vllm:kv_cache_usage_perc": "token_usage",
    "vllm:gpu_cache_usage_perc": "token_usage",
    "vllm:prefix_cache_queries_total": "stats.prompt_tokens",
    "vllm:prefix_cache_hits_total": "stats.cached_tokens",
    "vllm:gpu_prefix_cache_queries_total": "stats.prompt_tokens",
    "vllm:gpu_prefix_cache_hits_total": "stats.cached_tokens",
    "vllm:spec_decode_num_drafts_total": "stats.verifications",
    "vllm:spec_decode_num_draft_tokens_total": "stats.drafted_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "stats.accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "stats.accepted_at",
    "vllm:num_preemptions_total": "stats.preemptions",
    "vllm:prompt_tokens_total": "metrics.prompt_tokens",
    "vllm:generation_tokens_total": "metrics.generation_tokens",
    "vllm:request_success_total": "metrics.finished",
    "vllm:time_to_first_token_seconds": "metrics.first",
    "vllm:inter_token_latency_seconds": "metrics.between",
    "vllm:time_per_output_token_seconds": "metrics.between",
    "vllm:request_time_per_output_token_seconds": "metrics.per_token",
    "vllm:e2e_request_latency_seconds": "metrics.whole",
    "vllm:request_queue_time_seconds": "metrics.queued",
    "vllm:request_inference_time_seconds": "metrics.running",
    "vllm:request_prefill_time_seconds": "metrics.prefill",
    "vllm:request_decode_time_seconds": "metrics.decode",
    "vllm:request_prompt_tokens": "metrics.prompt_lengths",
    "vllm:request_generation_tokens": "metrics.output_lengths",
    "vllm:request_max_num_generation_tokens": "metrics.longest_outputs",
    "vllm:request_params_n": "metrics.choices",
    "vllm:request_params_max_tokens": "metrics.max_tokens",
}
LABELS = {  # a depth counts from 1
    "thalweg_build_info": ("version",),
    "thalweg_requests_total": ("route", "status"),
    "thalweg_choices_total": ("finish",),
    "thalweg_drafted_by_depth_total": ("depth",),
    "thalweg_accepted_by_depth_total": ("depth",),
    "thalweg_steps_by_num_drafts_total": ("num_drafts",),
    "thalweg_expert_imbalance": ("layer",),
    "sglang:cached_tokens_total": ("cache_source",),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("position",),
    "vllm:request_success_total": ("finished_reason",),
}
LABELS |= {name: ("rank",) for name, _, value in OWN if value.startswith("rank_")}
PEERS = {"sglang": (SGLANG, {}), "vllm": (VLLM, {"engine": "0"})}  # with the labels of all their samples


def prometheus_text(snapshot: MetricsSnapshot, names: Iterable[str] = ()) -> str:
    """The text of /metrics. names: of `PEERS`. Adds CPU, memory and descriptors of this process and of the engine's."""
    registry = CollectorRegistry()
    registry.register(_SnapshotCollector(snapshot, names))
    ProcessCollector(registry=registry)
    registry.register(_EngineProcesses(snapshot.pids))
    return generate_latest(registry).decode()


class _EngineProcesses(Collector):
    """What `ProcessCollector` has of each process, added up, and the first one's start."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def collect(self) -> Iterator[Metric]:
        each = (ProcessCollector("thalweg_engine", partial(int, pid), registry=None).collect() for pid in self._pids)
        for metrics in zip(*(found for found in each if found), strict=False):
            values, metric = [one.samples[0].value for one in metrics], metrics[0]
            total = min(values) if metric.name.endswith("start_time_seconds") else sum(values)
            metric.samples = [metric.samples[0]._replace(value=total)]
            yield metric

    def describe(self) -> Iterable[Metric]:
        return ()


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: MetricsSnapshot, names: Iterable[str]) -> None:
        self._snapshot, self._names = snapshot, names

    def collect(self) -> Iterator[Metric]:
        derived, helps = self._snapshot.derived, {value: text for _, text, value in OWN}
        rows: list[tuple[str, str, str, Mapping[str, str]]] = [(*row, {}) for row in OWN]
        for peer in self._names:
            table, peer_labels = PEERS[peer]
            rows += [(name, helps.get(path, path.replace("_", " ")), path, peer_labels) for name, path in table.items()]
        for name, text, path, labels in rows:
            value = derived[path] if path in derived else attrgetter(path)(self._snapshot)
            yield _metric(name, text, value, {"model_name": self._snapshot.model, **labels})

    def describe(self) -> Iterable[Metric]:
        return ()


def _metric(name: str, text: str, value: Any, labels: dict[str, str]) -> Metric:
    if isinstance(value, BucketHistogram):
        histogram = HistogramMetricFamily(name, text, labels=list(labels))
        buckets = zip((*map(repr, value.bounds), "+Inf"), accumulate(value.counts), strict=True)
        histogram.add_metric(list(labels.values()), list(buckets), value.sum)
        return histogram
    metric = Metric(name.removesuffix("_total"), text, "counter" if name.endswith("_total") else "gauge")
    own = LABELS.get(name, ())
    if isinstance(value, tuple):
        value = dict(enumerate(value, int(own == ("depth",))))
    for key, number in (value if isinstance(value, Mapping) else {(): value or 0}).items():
        keys = map(str, key if isinstance(key, tuple) else (key,))
        metric.add_sample(name, {**labels, **dict(zip(own, keys, strict=True))}, number)
    return metric
