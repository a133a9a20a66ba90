"""What a benchmark asks of a server besides the load: its model, its settings, its counters before and after."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from thalweg.bench.errors import BenchError, HttpError
from thalweg.bench.http_client import HttpClient, HttpReply

TIMEOUT_SECONDS = 120.0  # of a page: a profile takes long
EMIT = "thalweg_emit_seconds"
# the same counter of Thalweg, SGLang and vLLM; vLLM's prefix counters are in tokens
COUNTERS = {
    "prompt_tokens": ("thalweg_prompt_tokens_total", "sglang:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    "cached_tokens": ("thalweg_cached_tokens_total", "sglang:cached_tokens_total", "vllm:prefix_cache_hits_total"),
    "drafts": ("thalweg_verifications_total", "vllm:spec_decode_num_drafts_total"),
    "accepted": ("thalweg_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
}


class BucketCounts(NamedTuple):
    """A Prometheus histogram of seconds."""

    bounds: tuple[float, ...]  # upper bounds of the buckets; the last one is inf
    counts: tuple[float, ...]  # samples at or below each bound
    total: float  # sum of the samples

    def since(self, before: BucketCounts) -> BucketCounts:
        """The samples after an earlier reading; all of them where the server restarted in between."""
        if before.bounds != self.bounds or before.counts[-1] > self.counts[-1]:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return BucketCounts(self.bounds, counts, self.total - before.total)

    @property
    def samples(self) -> float:
        return self.counts[-1]

    def quantile(self, q: float) -> float:
        """The q-th quantile (0 to 1), linear within its bucket as in Prometheus; the last finite bound beyond that; nan
        of no samples.
        """
        rank, below, low = q * self.samples, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True) if self.samples else ():
            if count >= rank and count > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            below, low = count, low if math.isinf(bound) else bound
        return low if self.samples else math.nan


class Counters(NamedTuple):
    """One reading of `/metrics`."""

    emit: BucketCounts | None = None  # from an engine's step to the socket (Thalweg only)
    totals: Mapping[str, float] = {}  # by the names in COUNTERS

    def since(self, before: Counters, name: str) -> float | None:
        """The difference of two readings; None where the server does not have it, or restarted."""
        now, then = self.totals.get(name), before.totals.get(name)
        return now - then if now is not None and then is not None and now >= then else None


def read_counters(page: str) -> Counters:
    """Raises ValueError for a page that is not Prometheus text."""
    names = {alias: name for name, aliases in COUNTERS.items() for alias in aliases}
    totals, buckets, total = dict[str, float](), dict[float, float](), 0.0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if (name := names.get(sample.name)) is not None:
                totals[name] = totals.get(name, 0.0) + sample.value
            elif sample.name == f"{EMIT}_sum":
                total += sample.value
            elif sample.name == f"{EMIT}_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
    bounds = tuple(sorted(buckets))
    emit = BucketCounts(bounds, tuple(buckets[bound] for bound in bounds), total) if buckets else None
    return Counters(emit, totals)


class ServerInfo:
    """Pages of any OpenAI-compatible server. What it does not have is left out."""

    def __init__(self, client: HttpClient) -> None:
        self.client = client

    async def _ask(self, method: str, path: str, body: bytes = b"") -> HttpReply:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await self.client.request(method, path, body)
        except TimeoutError as error:
            raise HttpError(f"{self.client.base_url}{path} did not answer within {TIMEOUT_SECONDS:g} s") from error

    async def _page(self, path: str) -> dict[str, object]:
        """{} where there is none. Raises HttpError."""
        reply = await self._ask("GET", path)
        return _object(reply.text) if reply.status == 200 else {}

    async def settings(self) -> dict[str, object]:
        """`/server_info` (SGLang's older `/get_server_info`), with Thalweg's `/resolved` settings."""
        info = await self._page("/server_info") or await self._page("/get_server_info")
        resolved = await self._page("/resolved")
        return info | ({"resolved": resolved} if resolved else {})

    async def model(self) -> str:
        rows = (await self._page("/v1/models")).get("data")
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return str(rows[0].get("id", ""))
        raise BenchError(f"{self.client.base_url}/v1/models names no model: give --model")

    async def counters(self) -> Counters:
        reply = await self._ask("GET", "/metrics")
        try:
            return read_counters(reply.text) if reply.status == 200 else Counters()
        except ValueError:  # another server's own format
            return Counters()

    async def post(self, path: str, flag: str, body: Mapping[str, object] | None = None) -> None:
        """flag: that asked for it. Raises BenchError where the server refuses."""
        reply = await self._ask("POST", path, b"" if body is None else json.dumps(body).encode())
        if reply.status != 200:
            raise BenchError(f"{flag}: {path} answered HTTP {reply.status} {reply.reason}: {reply.text.strip()[:200]}")

    async def stop_profile(self) -> str:
        """The server's message; a refusal too, because the load has been measured by then."""
        reply = await self._ask("POST", "/stop_profile", b"{}")
        return f"profile: {_object(reply.text).get('message', reply.text.strip()[:200])}"


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def accept_length(info: Mapping[str, object], before: Counters, after: Counters) -> float | None:
    """Mean tokens a verification, where the server reports them: by its counters, else since its start."""
    drafts, accepted = after.since(before, "drafts"), after.since(before, "accepted")
    if drafts and accepted is not None:
        return 1 + accepted / drafts
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states else {}
    value = first.get("avg_spec_accept_length") if isinstance(first, dict) else None
    return float(value) if isinstance(value, int | float) else None


def cache_hits(cached: float, prompt: float, before: Counters, after: Counters) -> dict[str, object]:
    """Share of the prompt tokens from the prefix cache: by the answers' `usage` (cached, prompt), else by the server's
    counters, which include other clients.
    """
    counted, asked = after.since(before, "cached_tokens"), after.since(before, "prompt_tokens")
    if not cached and counted and asked:
        return {"cache_hit_rate": counted / asked, "cache_hit_source": "metrics"}
    return {"cache_hit_rate": cached / prompt if prompt else 0.0, "cache_hit_source": "usage"}


def overhead(before: Counters, after: Counters) -> dict[str, float] | None:
    """mean, p50 and p99 in ms from the engine's step to the socket; None where the server does not report them."""
    if before.emit is None or after.emit is None or not (new := after.emit.since(before.emit)).samples:
        return None
    mean = 1000 * new.total / new.samples
    return {"mean": mean, "p50": 1000 * new.quantile(0.5), "p99": 1000 * new.quantile(0.99), "samples": new.samples}
