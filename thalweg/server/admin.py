"""Routes that do not generate: tokens, aborts, cache, metrics; new weights and profiles of a running engine, under
SGLang's names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from thalweg import __version__
from thalweg.core.errors import InvalidRequest
from thalweg.core.messages import DumpExperts, EngineReady, StartProfile, Stats, StopProfile, UpdateWeights
from thalweg.server.api_keys import ApiKey
from thalweg.server.chat import render_text
from thalweg.server.context import AppContext
from thalweg.server.errors import ApiError
from thalweg.server.generation import prompt_fields
from thalweg.server.metrics import hit_rate, token_usage
from thalweg.server.prometheus import MetricsSnapshot, prometheus_text
from thalweg.server.protocol import (
    AbortRequest,
    DetokenizeRequest,
    DumpExpertsRequest,
    StartProfileRequest,
    TokenizeRequest,
    UpdateWeightsRequest,
)

MANY_TOKENS = 8192  # more are decoded on a thread
PREFIXES = ("chatcmpl-", "cmpl-", "msg_")
MAX_TOKENIZED = 1 << 18  # tokens of one request to /tokenize or /detokenize
_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "max_tokens",
)
DRAFTER_FAILED = "it failed and was switched off; the log says how"


class TokenizeResponse(TypedDict):
    """Lists for a list of texts."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int | None


class DetokenizeResponse(TypedDict):
    prompt: str
    text: str


class AbortResponse(TypedDict):
    aborted: int  # sequences


class FlushResponse(TypedDict):
    flushed: bool


class InternalState(TypedDict):
    running: int
    waiting: int
    num_running_reqs: int
    num_queue_reqs: int
    token_usage: float
    cache_held: float
    cache_hit_rate: float
    prefill_throughput: float
    decode_throughput: float
    last_gen_throughput: float
    avg_spec_accept_length: float | None
    spec_accept_rate: float | None
    spec_accept_rate_by_depth: Sequence[float]
    spec_rolled_back_tokens: int
    speculative: dict[str, Any]
    stats: Stats


class ServerInfoResponse(TypedDict):
    version: str
    status: str
    reason: str
    model_path: str
    served_model_name: str
    context_length: int | None
    tp_size: int
    pp_size: int
    dp_size: int
    dcp_size: int
    ep_size: int
    attn_cp_size: int
    enable_dp_attention: bool
    weight_version: str
    weights_lost: str
    strip_thinking_cache: bool
    default_sampling_params: dict[str, float | None]  # of requests that leave them out: see generation_config.json
    reasoning_parser: str | None
    tool_call_parser: str | None
    speculative_acceptance: dict[str, Any] | None
    slots: int | None
    requests: int
    uptime_seconds: float
    internal_states: list[InternalState]


async def tokenize(ctx: AppContext, request: Request, body: TokenizeRequest) -> TokenizeResponse:
    ctx.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "give either prompt or messages, and not both")
    special = body.add_special_tokens is not False
    texts, field = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""], "prompt"
    if body.messages is not None:
        opens = body.add_generation_prompt is not False
        kwargs = {"add_generation_prompt": opens, "template_kwargs": body.chat_template_kwargs}
        texts, field = [await render_text(ctx, body.messages, body.tools, **kwargs)], "messages"
    lists: list[list[int]] = []
    limit = MAX_TOKENIZED
    for text, where in zip(texts, prompt_fields(field, len(texts)), strict=True):
        lists.append(await ctx.tokenize(text, special, where, limit))
        limit = max(limit - len(lists[-1]), 0)
    counts, is_batch = [len(ids) for ids in lists], isinstance(body.prompt, list)
    tokens, count = (lists, counts) if is_batch else (lists[0], counts[0])
    return {"tokens": tokens, "count": count, "max_model_len": ctx.context_len}


async def detokenize(ctx: AppContext, request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
    ctx.model(body.model)
    vocab = ctx.ready.vocab
    if len(body.tokens) > MAX_TOKENIZED:
        raise InvalidRequest("tokens", f"are {len(body.tokens)}: at most {MAX_TOKENIZED} in one request")
    bad = next((i for i, token in enumerate(body.tokens) if not 0 <= token < vocab), None)
    if bad is not None:
        raise InvalidRequest(f"tokens[{bad}]", f"{body.tokens[bad]} is outside the vocabulary of {vocab}")
    decode = partial(ctx.front.tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
    text = await ctx.on_thread(decode) if len(body.tokens) > MANY_TOKENS else decode()
    return {"prompt": text, "text": text}


async def abort(ctx: AppContext, request: Request, body: AbortRequest) -> AbortResponse:
    """The number of aborted sequences."""
    api_key: ApiKey = request.scope["quota"].api_key
    if body.abort_all == bool(body.rid):
        raise InvalidRequest("rid", "give the id of a request, or abort_all: true, and not both")
    if body.abort_all:
        if not api_key.admin:
            message = "abort_all ends the requests of others too: it needs the server's --admin-api-key"
            raise ApiError(403, message, "permission_error", "abort_all", "admin_only")
        return {"aborted": await ctx.front.abort("")}
    # the id of a response names its request too
    rids = {body.rid, *(body.rid.removeprefix(prefix) for prefix in PREFIXES)} - {""}
    counts = [await ctx.front.abort(rid if api_key.admin else api_key.scoped_rid(rid)) for rid in rids]
    return {"aborted": sum(counts)}


async def flush_cache(ctx: AppContext, request: Request) -> FlushResponse:
    """Empties the prefix cache. Running requests keep their pages."""
    await ctx.front.flush_cache()
    return {"flushed": True}


async def resolved(ctx: AppContext, request: Request) -> dict[str, Any]:
    """Every decision of the resolver, with its reason."""
    return dict(ctx.ready.report.as_tree())


async def metrics(ctx: AppContext, request: Request) -> Response:
    front = ctx.front
    serving, weights_lost = front.state == "ready", bool(front.weights_lost)
    snapshot = MetricsSnapshot(
        ctx.metrics, front.stats, serving, front.ready, ctx.names[0], weights_lost, front.of_ranks, front.pids
    )
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


async def server_info(ctx: AppContext, request: Request) -> ServerInfoResponse:
    """The model, the engine and their state. SGLang's tools read `internal_states`."""
    front, stats, last_second, rates = ctx.front, ctx.front.stats, ctx.metrics.rates(1.0), ctx.metrics.rates()
    state: InternalState = {
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
    return {
        "version": __version__,
        "status": front.state,
        "reason": front.reason,
        "model_path": ctx.path,
        "served_model_name": ctx.names[0],
        "context_length": ctx.context_len,
        "tp_size": front.config.tp_size,
        "pp_size": front.config.pp_size,
        "dp_size": front.config.dp_size,
        "dcp_size": front.config.dcp_size,
        "ep_size": front.config.ep_size,
        "attn_cp_size": front.config.attn_cp_size,
        "enable_dp_attention": front.config.enable_dp_attention,
        "weight_version": front.weight_version,
        "weights_lost": front.weights_lost,
        "strip_thinking_cache": ctx.retention.strips,
        "default_sampling_params": {name: getattr(ctx.defaults, name) for name in _DEFAULTS},
        "reasoning_parser": ctx.chat.formats.reasoning,
        "tool_call_parser": ctx.chat.formats.tools,
        "speculative_acceptance": _acceptance(front.ready, stats),
        "slots": None if front.ready is None else front.ready.slots,
        "requests": front.running,
        "uptime_seconds": time.time() - ctx.started,
        "internal_states": [state],
    }


MAX_VERSION = 256  # characters
MAX_STEPS = 2**31 - 1  # of a profile


class OperationResult(TypedDict):
    success: bool
    message: str


class UpdateWeightsResponse(OperationResult):
    num_paused_requests: int


async def update_weights_from_disk(
    ctx: AppContext, request: Request, body: UpdateWeightsRequest
) -> UpdateWeightsResponse:
    """Replaces the weights that a folder holds, between two steps. A 400 has changed nothing. Running requests
    continue.
    """
    if not body.model_path or "\0" in body.model_path:
        raise InvalidRequest("model_path", "must name a folder on the engine's machine")
    version = body.weight_version or ""
    if len(version) > MAX_VERSION:
        raise InvalidRequest("weight_version", f"has {len(version)} characters; at most {MAX_VERSION}")
    # links are resolved now: an engine that restarts must not follow them to another folder
    try:
        path = str(await ctx.on_thread(Path(body.model_path).resolve))  # a network file system may not answer
    except (OSError, RuntimeError) as error:  # a loop of links
        raise InvalidRequest("model_path", f"is not a path: {error}") from None
    flush = body.flush_cache is not False
    message = await ctx.front.control(UpdateWeights(0, path, flush, bool(body.abort_all_requests), version))
    return {"success": True, "message": message, "num_paused_requests": 0}


async def start_profile(ctx: AppContext, request: Request, body: StartProfileRequest) -> OperationResult:
    """Profiles the engine's steps until /stop_profile, or for num_steps. An empty body is {}."""
    root = _profile_folder(ctx)
    steps = body.num_steps or 0
    if body.num_steps is not None and not 1 <= steps <= MAX_STEPS:
        message = f"must lie between 1 and {MAX_STEPS}, got {steps}; leave it out to end it by /stop_profile"
        raise InvalidRequest("num_steps", message)
    activities = {"CPU", "GPU"} if body.activities is None else set(body.activities)
    if not activities:
        raise InvalidRequest("activities", "must name CPU, GPU or both; leave it out for both")
    folder = _within(root, body.output_dir or "")
    profile = StartProfile(
        0,
        str(folder),
        steps,
        cpu="CPU" in activities,
        gpu="GPU" in activities,
        shapes=bool(body.record_shapes),
        stacks=bool(body.with_stack),
    )
    profiled = await ctx.front.control(profile)
    until = f"for {steps} steps" if steps else "until /stop_profile"
    return {"success": True, "message": f"profiling {profiled} {until}, into {folder}"}


async def stop_profile(ctx: AppContext, request: Request) -> OperationResult:
    """Ends the profile and writes it: a Chrome trace, for Perfetto."""
    _profile_folder(ctx)
    return {"success": True, "message": f"written: {await ctx.front.control(StopProfile(0))}"}


async def dump_experts(ctx: AppContext, request: Request, body: DumpExpertsRequest) -> OperationResult:
    """Writes where experts are and how many tokens chose each: a file for --init-expert-location."""
    folder = _within(_profile_folder(ctx), body.output_dir or "")
    return {"success": True, "message": f"written: {await ctx.front.control(DumpExperts(0, str(folder)))}"}


def _profile_folder(ctx: AppContext) -> Path:
    if ctx.options.profile_folder is None:
        message = "profiles are off: --profile-folder DIR turns them on, and says where they are written"
        raise ApiError(403, message, "permission_error", code="profiles_off")
    return Path(ctx.options.profile_folder).resolve()


def _within(root: Path, path: str) -> Path:
    """A folder, absolute or relative to `root`, links followed. Raises InvalidRequest if it is outside `root`."""
    if "\0" in path:
        raise InvalidRequest("output_dir", "must be a path")
    try:
        folder = (root / path).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long
        raise InvalidRequest("output_dir", f"is not a path: {error}") from None
    if not folder.is_relative_to(root):
        raise InvalidRequest("output_dir", f"must lie within the server's --profile-folder, {root}: give it from there")
    return folder
