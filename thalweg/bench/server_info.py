"""A server's model, settings, and counters before and after a benchmark."""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from thalweg.bench.errors import BenchError, HttpError
from thalweg.bench.http_client import HttpClient, HttpReply

TIMEOUT_SECONDS = 120.0  # of a page: a profile takes long
EMIT = "thalweg_emit_seconds"  # a histogram of the time from an engine's step to the socket (Thalweg only)
# a counter, and what Thalweg, SGLang and vLLM call it; vLLM's prefix counters are in tokens
COUNTERS = """
prompt_tokens  thalweg_prompt_tokens_total sglang:prompt_tokens_total vllm:prefix_cache_queries_total
cached_tokens  thalweg_cached_tokens_total sglang:cached_tokens_total vllm:prefix_cache_hits_total
drafts         thalweg_verifications_total vllm:spec_decode_num_drafts_total
accepted       thalweg_accepted_tokens_total vllm:spec_decode_num_accepted_tokens_total
emit_seconds   thalweg_emit_seconds_sum
"""
NAMES = {alias: name for name, *aliases in map(str.split, COUNTERS.strip().splitlines()) for alias in aliases}


class Counters(NamedTuple):
    """One reading of `/metrics`, or the difference of two."""

    totals: Mapping[str, float] = {}  # by the names in COUNTERS
    emitted: Mapping[float, float] = {}  # pieces written within these seconds after their step, by ascending seconds

    def since(self, before: Counters) -> Counters:
        """Differences from an earlier reading; empty where the server restarted in between."""
        totals = {name: value - before.totals[name] for name, value in self.totals.items() if name in before.totals}
        emitted = {bound: count - before.emitted.get(bound, 0.0) for bound, count in self.emitted.items()}
        return Counters() if min(totals.values(), default=0.0) < 0 else Counters(totals, emitted)


def read_counters(page: str) -> Counters:
    """Raises ValueError for a page that is not Prometheus text."""
    totals, emitted = defaultdict[str, float](float), defaultdict[float, float](float)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if (name := NAMES.get(sample.name)) is not None:
                totals[name] += sample.value
            elif sample.name == f"{EMIT}_bucket":
                emitted[float(sample.labels["le"])] += sample.value
    return Counters(totals, dict(sorted(emitted.items())))


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

    async def settings(self) -> dict[str, Any]:
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


def accept_length(info: Mapping[str, Any], new: Counters) -> float | None:
    """Mean tokens a verification, where the server reports them: by its new counts, else since its start."""
    if drafts := new.totals.get("drafts"):
        return 1 + new.totals["accepted"] / drafts
    states = info.get("internal_states") or [{}]
    value = states[0].get("avg_spec_accept_length")
    return None if value is None else float(value)


def cache_hits(cached: float, prompt: float, new: Counters) -> dict[str, object]:
    """Share of the prompt tokens from the prefix cache: by the answers' `usage` (cached, prompt), else by the server's
    new counts, which include other clients.
    """
    counted, asked = new.totals.get("cached_tokens"), new.totals.get("prompt_tokens")
    if not cached and counted and asked:
        return {"cache_hit_rate": counted / asked, "cache_hit_source": "metrics"}
    return {"cache_hit_rate": cached / prompt if prompt else 0.0, "cache_hit_source": "usage"}


def overhead(new: Counters) -> dict[str, float] | None:
    """mean, p50 and p99 in ms from the engine's step to the socket; None where the server does not report them.

    Quantiles are linear within their bucket as in Prometheus, and at most its last finite bound.
    """
    if not new.emitted or not (samples := new.emitted[math.inf]):
        return None
    finite = [0.0, *(bound for bound in new.emitted if bound < math.inf)]
    p50, p99 = np.interp([0.5 * samples, 0.99 * samples], [0.0, *new.emitted.values()], [*finite, finite[-1]])
    mean = new.totals["emit_seconds"] / samples
    return {"mean": 1000 * mean, "p50": 1000 * float(p50), "p99": 1000 * float(p99), "samples": samples}
