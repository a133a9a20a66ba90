"""Routes that say how the server is: its health, version and load, under SGLang's and vLLM's names."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import TypedDict

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from thalweg import __version__
from thalweg.core.errors import Overloaded, ThalwegError
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineState, PromptRequest
from thalweg.server.context import AppContext, reply

HEALTH_TIMEOUT = 20.0  # seconds, as SGLang waits


class ServerState(msgspec.Struct):
    status: EngineState
    reason: str
    ranks: dict[str, str] | UnsetType = UNSET  # the state of each process by its name, if there are several


class VersionResponse(TypedDict):
    version: str


class LoadResponse(TypedDict):
    server_load: int  # generation requests


class RankLoad(TypedDict):
    """SGLang's fields of one data-parallel rank."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int  # in the cache for running requests, and of waiting prompts
    num_pending_tokens: int  # of waiting prompts: the server's, divided by the waiting requests of each rank
    ts_tic: float


async def health(ctx: AppContext, request: Request) -> Response:
    """200 while the engine lives, drains, or is being restarted; 503 with the reason while the first one starts, and
    when it makes no step although requests wait, or is dead.
    """
    return _state(ctx, ctx.front.state in ("ready", "draining", "restarting"))


async def ready(ctx: AppContext, request: Request) -> Response:
    """200 while new requests are accepted; 503 while the engine starts, hangs, drains or is dead."""
    return _state(ctx, ctx.front.state == "ready")


async def health_generate(ctx: AppContext, request: Request) -> Response:
    """200 once the engine has generated a token for this check, or has made steps for those that fill it."""
    if ctx.front.state != "ready":
        return _state(ctx, False)
    if ctx.health_check is None or ctx.health_check.done():  # one check serves all that ask meanwhile
        ctx.health_check = asyncio.create_task(_generate_token(ctx))
    error = await asyncio.shield(ctx.health_check)
    return _state(ctx, not error, error)


async def _generate_token(ctx: AppContext) -> str:
    """Why no token came, or ""."""
    front, steps = ctx.front, ctx.front.stats.steps
    prompt = PromptRequest([0], SamplingParams(max_tokens=1, temperature=0.0), f"HEALTH_CHECK_{uuid.uuid4().hex}")
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT):
            try:
                async with aclosing(front.stream_all([prompt])) as pieces:
                    async for _ in pieces:
                        return ""
            except Overloaded:
                while front.stats.steps == steps:
                    await asyncio.sleep(0.05)
    except TimeoutError:
        if front.stats.steps == steps:
            return f"the engine generated no token within {HEALTH_TIMEOUT:g} seconds"
    except ThalwegError as error:
        return str(error)
    return ""


def _state(ctx: AppContext, good: bool, error: str = "") -> Response:
    reason = error or ctx.front.reason or ctx.front.weights_lost
    response = reply(ServerState(ctx.front.state, reason, ctx.front.rank_states or UNSET), 200 if good else 503)
    if not good:
        response.headers["Retry-After"] = str(ctx.options.retry_after)
    return response


async def version(ctx: AppContext, request: Request) -> VersionResponse:
    return {"version": __version__}


async def load(ctx: AppContext, request: Request) -> LoadResponse:
    """The number of generation requests, under vLLM's name."""
    return {"server_load": ctx.load.running}


async def get_load(ctx: AppContext, request: Request) -> list[RankLoad]:
    """Requests and tokens of each data-parallel rank, under SGLang's names."""
    waiting, now = ctx.front.stats.waiting, time.perf_counter()
    loads: list[RankLoad] = []
    for rank, stats in (ctx.front.of_ranks or {0: ctx.front.stats}).items():
        pending = ctx.metrics.pending_tokens * stats.waiting // max(waiting, 1)
        loads.append(
            {
                "dp_rank": rank,
                "num_reqs": stats.running + stats.waiting,
                "num_waiting_reqs": stats.waiting,
                "num_tokens": stats.pages_used * stats.page_size + pending,
                "num_pending_tokens": pending,
                "ts_tic": now,
            }
        )
    return loads
