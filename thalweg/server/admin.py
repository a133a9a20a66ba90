"""Routes that do not generate: models, tokens, aborts, cache, health, metrics."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from thalweg import __version__
from thalweg.core.errors import InvalidRequest
from thalweg.core.messages import EngineReady, Stats
from thalweg.server.api_keys import ApiKey
from thalweg.server.chat import MAX_TOKENIZED
from thalweg.server.context import AppContext, reply
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.metrics import hit_rate, token_usage
from thalweg.server.prometheus import MetricsSnapshot, prometheus_text
from thalweg.server.protocol import AbortRequest, DetokenizeRequest

MANY_TOKENS = 8192  # more are decoded on a thread
PREFIXES = ("chatcmpl-", "cmpl-", "msg_")
DRAFTER_FAILED = "it failed and was switched off; the log says how"


async def models(ctx: AppContext, request: Request) -> Response:
    return reply({"object": "list", "data": [_card(ctx, name) for name in ctx.names]})


async def model(ctx: AppContext, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ctx.names:
        message = f"model {name!r} does not exist here"
        raise ApiError(ErrorInfo(404, message, "not_found_error", "model", "model_not_found"))
    return reply(_card(ctx, name))


def _card(ctx: AppContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(ctx.started),
        "owned_by": "thalweg",
        "root": ctx.path,
        "max_model_len": ctx.context_len,
    }


async def detokenize(ctx: AppContext, request: Request, body: DetokenizeRequest) -> Response:
    ctx.model(body.model)
    vocab = ctx.ready.vocab
    if len(body.tokens) > MAX_TOKENIZED:
        raise InvalidRequest("tokens", f"are {len(body.tokens)}: at most {MAX_TOKENIZED} in one request")
    bad = next((i for i, token in enumerate(body.tokens) if not 0 <= token < vocab), None)
    if bad is not None:
        raise InvalidRequest(f"tokens[{bad}]", f"{body.tokens[bad]} is outside the vocabulary of {vocab}")
    decode = partial(ctx.front.tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
    text = await ctx.on_thread(decode) if len(body.tokens) > MANY_TOKENS else decode()
    return reply({"prompt": text, "text": text})


async def abort(ctx: AppContext, request: Request, body: AbortRequest) -> Response:
    api_key: ApiKey = request.scope["quota"].api_key
    if body.abort_all == bool(body.rid):
        raise InvalidRequest("rid", "give the id of a request, or abort_all: true, and not both")
    if body.abort_all:
        if not api_key.admin:
            message = "abort_all ends the requests of others too: it needs the server's --admin-api-key"
            raise ApiError(ErrorInfo(403, message, "permission_error", "abort_all", "admin_only"))
        return reply({"aborted": await ctx.front.abort("")})
    # the id of a response names its request too
    rids = {body.rid, *(body.rid.removeprefix(prefix) for prefix in PREFIXES)} - {""}
    counts = [await ctx.front.abort(rid if api_key.admin else api_key.scoped_rid(rid)) for rid in rids]
    return reply({"aborted": sum(counts)})


async def flush_cache(ctx: AppContext, request: Request) -> Response:
    """Empties the prefix cache. Running requests keep their pages."""
    await ctx.front.flush_cache()
    return reply({"flushed": True})


async def health(ctx: AppContext, request: Request) -> Response:
    """200 while the engine lives, draining included; 503 with the reason while it starts, makes no step although
    requests wait, or is dead.
    """
    return _state(ctx, ctx.front.state in ("ready", "draining"))


async def ready(ctx: AppContext, request: Request) -> Response:
    """200 while new requests are accepted; 503 while the engine starts, drains or is dead."""
    return _state(ctx, ctx.front.state == "ready")


def _state(ctx: AppContext, good: bool) -> Response:
    response = reply({"status": ctx.front.state, "reason": ctx.front.reason}, 200 if good else 503)
    if not good:
        response.headers["Retry-After"] = str(ctx.options.retry_after)
    return response


async def resolved(ctx: AppContext, request: Request) -> Response:
    """Every decision of the resolver, with its reason."""
    return reply(ctx.ready.report.as_tree())


async def metrics(ctx: AppContext, request: Request) -> Response:
    front = ctx.front
    snapshot = MetricsSnapshot(ctx.metrics, front.stats, front.state == "ready", front.ready, ctx.names[0])
    text = prometheus_text(snapshot, ctx.options.metrics_names)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _speculative(ready: EngineReady | None, stats: Stats) -> dict[str, Any]:
    """The drafter, and whether it still drafts."""
    decision = None if ready is None else ready.report.current().get("speculative_algorithm")
    drafter, reason = ("NONE", "") if decision is None else (decision.value, decision.reason)
    failed = drafter != "NONE" and stats.drafter_failures > 0
    active = drafter != "NONE" and not failed
    return {"drafter": drafter, "active": active, "reason": DRAFTER_FAILED if failed else reason}


def _acceptance(ready: EngineReady | None, stats: Stats) -> dict[str, Any] | None:
    """The acceptance rule, and whether it keeps the model's distribution; None where nothing is drafted.

    simulated: tokens of a verification under simulated acceptance.
    """
    if ready is None or stats.drafter_failures:
        return None
    decisions = ready.report.current()
    rule, simulated = (decisions.get(f"speculative_{name}") for name in ("acceptance", "simulate_accept_length"))
    if rule is None:
        return None
    return {
        "rule": rule.value,
        "lossless": rule.value != "relaxed" and simulated is None,
        "reason": rule.reason if simulated is None else simulated.reason,
        "simulated": None if simulated is None else simulated.value,
    }


async def server_info(ctx: AppContext, request: Request) -> Response:
    """The model, the engine and their state. SGLang's tools read `internal_states`."""
    front, stats, last_second, rates = ctx.front, ctx.front.stats, ctx.metrics.rates(1.0), ctx.metrics.rates()
    state = {
        "running": stats.running,
        "waiting": stats.waiting,
        "num_running_reqs": stats.running,
        "num_queue_reqs": stats.waiting,
        "token_usage": token_usage(stats),
        "cache_held": stats.pages_cached / stats.pages if stats.pages else 0.0,
        "cache_hit_rate": hit_rate(stats),
        "prefill_throughput": last_second.prefill,
        "decode_throughput": last_second.decode,
        "last_gen_throughput": rates.decode,
        "avg_spec_accept_length": stats.acceptance.mean_length,
        "spec_accept_rate": stats.acceptance.rate,
        "spec_accept_rate_by_depth": stats.acceptance.rates_at,
        "spec_rolled_back_tokens": stats.drafted_tokens - stats.accepted_tokens,
        "speculative": _speculative(front.ready, stats),
        "stats": stats,
    }
    return reply(
        {
            "version": __version__,
            "status": front.state,
            "reason": front.reason,
            "model_path": ctx.path,
            "served_model_name": ctx.names[0],
            "context_length": ctx.context_len,
            "weight_version": front.weight_version,
            "strip_thinking_cache": ctx.retention.strips,
            "speculative_acceptance": _acceptance(front.ready, stats),
            "slots": None if front.ready is None else front.ready.slots,
            "requests": front.running,
            "uptime_seconds": time.time() - ctx.started,
            "internal_states": [state],
        }
    )
