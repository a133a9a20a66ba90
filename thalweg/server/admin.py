"""Everything that is not generation: models, tokens, aborts, cache, health, metrics."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from thalweg import __version__
from thalweg.core.errors import EngineDead, InvalidRequest
from thalweg.core.messages import Ready
from thalweg.server.desk import Desk, reply
from thalweg.server.errors import ApiError, Problem
from thalweg.server.metrics import exposition, hit_rate, token_usage
from thalweg.server.protocol import AbortRequest, DetokenizeRequest
from thalweg.server.reading import read

_abort = msgspec.json.Decoder(AbortRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)
PREFIXES = ("chatcmpl-", "cmpl-", "msg_")


async def models(desk: Desk, request: Request) -> Response:
    return reply({"object": "list", "data": [_card(desk, name) for name in desk.names]})


async def model(desk: Desk, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in desk.names:
        raise ApiError(
            Problem(404, f"model {name!r} does not exist here", "not_found_error", "model", "model_not_found")
        )
    return reply(_card(desk, name))


def _card(desk: Desk, name: str) -> dict[str, Any]:
    ready = desk.front.ready
    return {
        "id": name,
        "object": "model",
        "created": int(desk.started),
        "owned_by": "thalweg",
        "root": desk.path,
        "max_model_len": None if ready is None else ready.context,
    }


async def detokenize(desk: Desk, request: Request) -> Response:
    body = read(await request.body(), _detokenize)
    desk.model(body.model)
    vocab = _ready(desk).vocab
    bad = next((i for i, token in enumerate(body.tokens) if not 0 <= token < vocab), None)
    if bad is not None:
        raise InvalidRequest(f"tokens[{bad}]", f"{body.tokens[bad]} is outside the vocabulary of {vocab}")
    text = desk.front.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return reply({"prompt": text, "text": text})


async def abort(desk: Desk, request: Request) -> Response:
    body = read(await request.body(), _abort)
    if body.abort_all == bool(body.rid):
        raise InvalidRequest("rid", "give the id of a request, or abort_all: true, and not both")
    told = await desk.front.abort(body.rid)
    for prefix in PREFIXES:  # the id of an answer names its request too
        if body.rid.startswith(prefix):
            told += await desk.front.abort(body.rid.removeprefix(prefix))
    return reply({"aborted": told})


async def flush_cache(desk: Desk, request: Request) -> Response:
    await desk.front.flush_cache()
    return reply({"flushed": True})


def _ready(desk: Desk) -> Ready:
    if desk.front.ready is None:
        raise EngineDead(desk.front.reason)
    return desk.front.ready


async def health(desk: Desk, request: Request) -> Response:
    """200 while the engine lives, draining included; 503 with the reason while it starts or is dead."""
    return _state(desk, desk.front.state in ("ready", "draining"))


async def ready(desk: Desk, request: Request) -> Response:
    """200 while new requests are welcome; 503 while the engine starts, drains or is dead."""
    return _state(desk, desk.front.state == "ready")


def _state(desk: Desk, good: bool) -> Response:
    front = desk.front
    response = reply({"status": front.state, "reason": front.reason}, 200 if good else 503)
    if not good:
        response.headers["Retry-After"] = str(desk.options.retry_after)
    return response


async def resolved(desk: Desk, request: Request) -> Response:
    """Every choice that the resolver made, with its reason."""
    return Response(_ready(desk).resolved, media_type="application/json")


async def metrics(desk: Desk, request: Request) -> Response:
    serving = desk.front.state == "ready"
    text = exposition(desk.meters, desk.front.stats, serving, desk.names[0], desk.options.sglang_metrics)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def server_info(desk: Desk, request: Request) -> Response:
    """What runs here and how it fares; `internal_states` is where SGLang's tools look."""
    front, stats, lately, now = desk.front, desk.front.stats, desk.meters.rates(1.0), desk.meters.rates()
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
        "avg_spec_accept_length": None,
        "stats": stats,
    }
    return reply(
        {
            "version": __version__,
            "status": front.state,
            "reason": front.reason,
            "model_path": desk.path,
            "served_model_name": desk.names[0],
            "context_length": context,
            "slots": None if front.ready is None else front.ready.slots,
            "requests": front.running,
            "uptime_seconds": time.time() - desk.started,
            "internal_states": [state],
        }
    )
