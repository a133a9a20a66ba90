"""What a benchmark asks of a server besides the load itself: its model, its settings, its counters before and after."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from thalweg.bench.client import Client, Reply
from thalweg.bench.errors import HttpError
from thalweg.bench.prometheus import Histogram, read_histogram

PATIENCE = 120.0  # seconds for a page of the server: a profile takes its time
EMIT = "thalweg_emit_seconds"
# what other servers and this one call the same counter; vLLM's prefix counters are in tokens
COUNTERS = {
    "prompt_tokens": ("thalweg_prompt_tokens_total", "sglang:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    "cached_tokens": ("thalweg_cached_tokens_total", "sglang:cached_tokens_total", "vllm:prefix_cache_hits_total"),
    "drafts": ("thalweg_verifications_total", "vllm:spec_decode_num_drafts_total"),
    "accepted": ("thalweg_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
}


class BenchError(Exception):
    """The run cannot start or cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Counters:
    """One look at `/metrics`. emit: seconds from an engine's step to the socket (Thalweg only). totals: by the names in
    COUNTERS.
    """

    emit: Histogram | None = None
    totals: Mapping[str, float] = field(default_factory=dict)

    def since(self, before: Counters, name: str) -> float | None:
        """What was counted between two looks; None where the server does not tell, or started anew."""
        now, then = self.totals.get(name), before.totals.get(name)
        return now - then if now is not None and then is not None and now >= then else None


def read_counters(page: str) -> Counters:
    """Raises ValueError on what is no Prometheus page."""
    totals: dict[str, float] = {}
    wanted = {alias: name for name, aliases in COUNTERS.items() for alias in aliases}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if (name := wanted.get(sample.name)) is not None:
                totals[name] = totals.get(name, 0.0) + sample.value
    return Counters(read_histogram(page, EMIT), totals)


class Server:
    """Any OpenAI-compatible server. What it does not have is left out."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def get(self, path: str) -> Reply | None:
        """The reply, or None where this server has no such route. Raises HttpError."""
        reply = await self._ask("GET", path)
        return reply if reply.status == 200 else None

    async def _ask(self, method: str, path: str, body: bytes = b"") -> Reply:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self.client.request(method, path, body)
        except TimeoutError as error:
            raise HttpError(f"{self.client.base_url}{path} did not answer within {PATIENCE:g} s") from error

    async def info(self) -> dict[str, object]:
        """What `/server_info` (or SGLang's older `/get_server_info`) says; {} where there is none."""
        for path in ("/server_info", "/get_server_info"):
            if (reply := await self.get(path)) is not None:
                value = _object(reply.text)
                if value:
                    return value
        return {}

    async def settings(self) -> dict[str, object]:
        """`info`, with the full resolved configuration where the server tells it in a page of its own (Thalweg's
        `/resolved`).
        """
        info, reply = await self.info(), await self.get("/resolved")
        resolved = _object(reply.text) if reply is not None else {}
        return info | ({"resolved": resolved} if resolved else {})

    async def model(self) -> str:
        reply = await self.get("/v1/models")
        rows = _object(reply.text).get("data") if reply is not None else None
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return str(rows[0].get("id", ""))
        raise BenchError(f"{self.client.base_url}/v1/models names no model: give --model")

    async def counters(self) -> Counters:
        reply = await self.get("/metrics")
        try:
            return read_counters(reply.text) if reply is not None else Counters()
        except ValueError:  # some other server's page, in a format of its own
            return Counters()

    async def flush_cache(self) -> None:
        await self._post("/flush_cache", b"", "--flush-cache")

    async def start_profile(self, folder: str, steps: int) -> None:
        """folder: where the server writes it, "" is its own choice. steps: after which it ends by itself, 0 is never.
        Raises BenchError.
        """
        wish: dict[str, object] = {"output_dir": folder} if folder else {}
        body = json.dumps(wish | ({"num_steps": steps} if steps else {})).encode()
        await self._post("/start_profile", body, "--profile")

    async def stop_profile(self) -> str:
        """What the server says of it; in words too where it says no, because the load has been measured by then."""
        reply = await self._ask("POST", "/stop_profile", b"{}")
        return f"profile: {_object(reply.text).get('message', reply.text.strip()[:200])}"

    async def _post(self, path: str, body: bytes, flag: str) -> None:
        reply = await self._ask("POST", path, body)
        if reply.status != 200:
            said = f"HTTP {reply.status} {reply.reason}: {reply.text.strip()[:200]}"
            raise BenchError(f"{flag}: {path} answered {said}")


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def accept_length(info: Mapping[str, object], before: Counters, after: Counters) -> float | None:
    """Mean tokens a verification gave, where the server speculates and says so: by its counters, else since its
    start.
    """
    drafts, accepted = after.since(before, "drafts"), after.since(before, "accepted")
    if drafts and accepted is not None:
        return 1 + accepted / drafts
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states else {}
    value = first.get("avg_spec_accept_length") if isinstance(first, dict) else None
    return float(value) if isinstance(value, int | float) else None


def cache_hits(cached: float, prompt: float, before: Counters, after: Counters) -> dict[str, object]:
    """Share of the prompt tokens that the server had in its prefix cache. cached, prompt: as the answers' `usage` says;
    where that has none, the server's own counters tell, which know of all its clients.
    """
    counted, asked = after.since(before, "cached_tokens"), after.since(before, "prompt_tokens")
    if not cached and counted and asked:
        return {"cache_hit_rate": counted / asked, "cache_hit_source": "metrics"}
    return {"cache_hit_rate": cached / prompt if prompt else 0.0, "cache_hit_source": "usage"}


def overhead(before: Histogram | None, after: Histogram | None) -> dict[str, float] | None:
    """mean, p50 and p99 in ms of what the server took from the engine's step to the socket, or None where it does not
    tell.
    """
    if before is None or after is None:
        return None
    new = after.since(before)
    if not new.samples:
        return None
    mean = 1000 * new.total / new.samples
    return {"mean": mean, "p50": 1000 * new.quantile(0.5), "p99": 1000 * new.quantile(0.99), "samples": new.samples}
