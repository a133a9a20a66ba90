"""Everything that is not generation: models, tokens, aborts, cache, health, metrics."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from thalweg import __version__
from thalweg.core.errors import InvalidRequest, engine_unavailable
from thalweg.core.messages import EngineReady, Stats
from thalweg.server.chat import MAX_TOKENIZED
from thalweg.server.context import AppContext, quota_of, reply
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.metrics import hit_rate, token_usage
from thalweg.server.parsing import read
from thalweg.server.prometheus import MetricsSnapshot, prometheus_text
from thalweg.server.protocol import AbortRequest, DetokenizeRequest

_abort = msgspec.json.Decoder(AbortRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)
MANY_TOKENS = 8192  # from which they are decoded on a thread
PREFIXES = ("chatcmpl-", "cmpl-", "msg_")


async def models(ctx: AppContext, request: Request) -> Response:
    return reply({"object": "list", "data": [_card(ctx, name) for name in ctx.names]})


async def model(ctx: AppContext, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ctx.names:
        raise ApiError(
            ErrorInfo(404, f"model {name!r} does not exist here", "not_found_error", "model", "model_not_found")
        )
    return reply(_card(ctx, name))


def _card(ctx: AppContext, name: str) -> dict[str, Any]:
    ready = ctx.front.ready
    return {
        "id": name,
        "object": "model",
        "created": int(ctx.started),
        "owned_by": "thalweg",
        "root": ctx.path,
        "max_model_len": None if ready is None else ready.context,
    }


async def detokenize(ctx: AppContext, request: Request) -> Response:
    body = read(await request.body(), _detokenize)
    ctx.model(body.model)
    vocab = _ready(ctx).vocab
    if len(body.tokens) > MAX_TOKENIZED:
        raise InvalidRequest("tokens", f"are {len(body.tokens)}: at most {MAX_TOKENIZED} in one request")
    bad = next((i for i, token in enumerate(body.tokens) if not 0 <= token < vocab), None)
    if bad is not None:
        raise InvalidRequest(f"tokens[{bad}]", f"{body.tokens[bad]} is outside the vocabulary of {vocab}")
    decode = partial(ctx.front.tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
    text = await ctx.aside(decode) if len(body.tokens) > MANY_TOKENS else decode()
    return reply({"prompt": text, "text": text})


async def abort(ctx: AppContext, request: Request) -> Response:
    body = read(await request.body(), _abort)
    api_key = quota_of(request).api_key
    if body.abort_all == bool(body.rid):
        raise InvalidRequest("rid", "give the id of a request, or abort_all: true, and not both")
    if body.abort_all:
        if not api_key.admin:
            message = "abort_all ends the requests of others too: it needs the server's --admin-api-key"
            raise ApiError(ErrorInfo(403, message, "permission_error", "abort_all", "admin_only"))
        return reply({"aborted": await ctx.front.abort("")})
    # the id of an answer names its request too
    rids = {body.rid, *(body.rid.removeprefix(prefix) for prefix in PREFIXES)} - {""}
    told = [await ctx.front.abort(rid if api_key.admin else api_key.mark(rid)) for rid in rids]
    return reply({"aborted": sum(told)})


async def flush_cache(ctx: AppContext, request: Request) -> Response:
    """Empties the prefix cache; what running requests hold stays with them."""
    await ctx.front.flush_cache()
    return reply({"flushed": True})


def _ready(ctx: AppContext) -> EngineReady:
    if ctx.front.ready is None:
        raise engine_unavailable(ctx.front.state, ctx.front.reason)
    return ctx.front.ready


async def health(ctx: AppContext, request: Request) -> Response:
    """200 while the engine lives, draining included; 503 with the reason while it starts, makes no step although
    requests wait, or is dead.
    """
    return _state(ctx, ctx.front.state in ("ready", "draining"))


async def ready(ctx: AppContext, request: Request) -> Response:
    """200 while new requests are welcome; 503 while the engine starts, drains or is dead."""
    return _state(ctx, ctx.front.state == "ready")


def _state(ctx: AppContext, good: bool) -> Response:
    front = ctx.front
    response = reply({"status": front.state, "reason": front.reason}, 200 if good else 503)
    if not good:
        response.headers["Retry-After"] = str(ctx.options.retry_after)
    return response


async def resolved(ctx: AppContext, request: Request) -> Response:
    """Every choice that the resolver made, with its reason."""
    return reply(_ready(ctx).report.as_tree())


async def metrics(ctx: AppContext, request: Request) -> Response:
    front = ctx.front
    snapshot = MetricsSnapshot(ctx.metrics, front.stats, front.state == "ready", front.ready, ctx.names[0])
    text = prometheus_text(snapshot, ctx.options.metrics_names)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


FAILED = "it failed and was switched off; the log says how"


def _speculative(ready: EngineReady | None, stats: Stats) -> dict[str, Any]:
    """What drafts, and whether it still does."""
    decision = None if ready is None else ready.report.current().get("speculative_algorithm")
    drafter, reason = ("NONE", "") if decision is None else (decision.value, decision.reason)
    lost = drafter != "NONE" and stats.drafter_failures > 0
    return {"drafter": drafter, "active": drafter != "NONE" and not lost, "reason": FAILED if lost else reason}


def _acceptance(ready: EngineReady | None, stats: Stats) -> dict[str, Any] | None:
    """The rule that judges drafts, and whether answers are the model's under it all the same; None where nothing is
    drafted, or no more. simulated: tokens that a verification brings by decree.
    """
    if ready is None or stats.drafter_failures:
        return None
    decisions = ready.report.current()
    decision, simulated = (decisions.get(f"speculative_{name}") for name in ("acceptance", "simulate_accept_length"))
    if decision is None:
        return None
    return {
        "rule": decision.value,
        "lossless": decision.value != "relaxed" and simulated is None,
        "reason": decision.reason if simulated is None else simulated.reason,
        "simulated": None if simulated is None else simulated.value,
    }


async def server_info(ctx: AppContext, request: Request) -> Response:
    """What runs here and how it fares; `internal_states` is where SGLang's tools look."""
    front, stats, lately, now = ctx.front, ctx.front.stats, ctx.metrics.rates(1.0), ctx.metrics.rates()
    context = None if front.ready is None else front.ready.context
    state = {
        "running": stats.running,
        "waiting": stats.waiting,
        "num_running_reqs": stats.running,
        "num_queue_reqs": stats.waiting,
        "token_usage": token_usage(stats),
        "cache_held": stats.pages_cached / stats.pages if stats.pages else 0.0,
        "cache_hit_rate": hit_rate(stats),
        "prefill_throughput": lately.prefill,
        "decode_throughput": lately.decode,
        "last_gen_throughput": now.decode,
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
            "context_length": context,
            "weight_version": front.weight_version,
            "strip_thinking_cache": ctx.history.strips,
            "speculative_acceptance": _acceptance(front.ready, stats),
            "slots": None if front.ready is None else front.ready.slots,
            "requests": front.running,
            "uptime_seconds": time.time() - ctx.started,
            "internal_states": [state],
        }
    )
