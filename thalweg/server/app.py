"""Builds the HTTP application: routes, middleware, error responses, and the OpenAPI page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from thalweg.config.server import ServerOptions
from thalweg.core.errors import ThalwegError
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.server import admin, models, openapi, playground, probes
from thalweg.server.accounting import OnEnd
from thalweg.server.anthropic import MessagesResponse, count_tokens, messages
from thalweg.server.api_keys import RequestQuota
from thalweg.server.chat import ChatChoice, chat_completions
from thalweg.server.completions import CompletionChoice, completions
from thalweg.server.context import AppContext, reply
from thalweg.server.errors import ApiError, api_error
from thalweg.server.generate import GenerateResponse, generate
from thalweg.server.middleware import COUNTED, RequestMiddleware, RootPath
from thalweg.server.openai_stream import OpenAIResponse
from thalweg.server.openapi import Route
from thalweg.server.parsing import parse_body, parse_query
from thalweg.server.responses.protocol import ResponsesResponse
from thalweg.server.responses.routes import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    input_items,
    stored_response,
)
from thalweg.text.chat import ChatFormat

SAMPLE_SECONDS = 1.0

ROUTES = (
    Route("POST", "/v1/completions", completions, OpenAIResponse[CompletionChoice]),
    Route("POST", "/v1/chat/completions", chat_completions, OpenAIResponse[ChatChoice]),
    Route("POST", "/v1/responses", create_response, ResponsesResponse),
    Route("POST", "/v1/responses/input_tokens", count_input_tokens),
    Route("GET", "/v1/responses/{id}", stored_response, ResponsesResponse),
    Route("DELETE", "/v1/responses/{id}", delete_response),
    Route("POST", "/v1/responses/{id}/cancel", cancel_response, ResponsesResponse, statuses=(400,)),
    Route("GET", "/v1/responses/{id}/input_items", input_items),
    Route("POST", "/v1/messages", messages, MessagesResponse),
    Route("POST", "/v1/messages/count_tokens", count_tokens),
    Route("GET", "/v1/models", models.models, (models.ModelList, models.AnthropicModelList)),
    Route("GET", "/v1/models/{name:path}", models.model, (models.ModelCard, models.AnthropicModel)),
    Route("POST", "/generate", generate, GenerateResponse | list[GenerateResponse]),
    Route("POST", "/tokenize", admin.tokenize),
    Route("POST", "/detokenize", admin.detokenize),
    Route("POST", "/abort", admin.abort),
    Route("POST", "/abort_request", admin.abort),
    Route("POST", "/flush_cache", admin.flush_cache, admin=True),
    Route("POST", "/update_weights_from_disk", admin.update_weights_from_disk, admin=True),
    Route("POST", "/start_profile", admin.start_profile, admin=True),
    Route("POST", "/stop_profile", admin.stop_profile, admin=True),
    Route("POST", "/dump_expert_distribution_record", admin.dump_experts, admin=True),
    Route("GET", "/server_info", admin.server_info),
    Route("GET", "/get_server_info", admin.server_info),
    Route("GET", "/get_model_info", models.model_info),
    Route("GET", "/model_info", models.model_info),
    Route("GET", "/tokenizer_info", models.tokenizer_info),
    Route("GET", "/get_load", probes.get_load),
    Route("GET", "/load", probes.load),
    Route("GET", "/version", probes.version),
    Route("GET", "/health", probes.health, probes.ServerState),
    Route("GET", "/ping", probes.health, probes.ServerState),
    Route("POST", "/ping", probes.health, probes.ServerState),
    Route("GET", "/health_generate", probes.health_generate, probes.ServerState),
    Route("GET", "/ready", probes.ready, probes.ServerState),
    Route("GET", "/resolved", admin.resolved),
)
METRICS = Route("GET", "/metrics", admin.metrics, str)


def build(
    front: EngineClient,
    options: ServerOptions,
    chat: ChatFormat,
    *,
    path: str = "",
    defaults: SamplingParams = SamplingParams(),
    folder: Path | None = None,
) -> Starlette:
    """The HTTP application of one engine, which the caller starts and ends.

    path: of the checkpoint, as the user gave it; its last part names the model unless options.served_model_name does.
    defaults: sampling parameters of requests that leave them out. folder: with the checkpoint's files.
    """
    ctx, on_end = AppContext(front, options, chat, path, defaults, folder), list[OnEnd]()
    close_traces: Callable[[], object] = lambda: None  # noqa: E731
    if options.otlp_traces_endpoint is not None:
        from thalweg.server.tracing import traces_to

        traces = traces_to(options.otlp_traces_endpoint)
        on_end, close_traces = [traces.record], traces.close
    if options.log_requests:
        on_end.append(ctx.log.write)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sampler = asyncio.create_task(_sample(ctx))
        yield
        for run in ctx.store.running:
            await run.stop("the server has shut down")
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
        await asyncio.to_thread(close_traces)

    by_path: dict[str, dict[str, Route]] = {}
    for route in (*ROUTES, METRICS) if options.metrics else ROUTES:
        by_path.setdefault(route.path, {})[route.method] = route
    document = openapi.document(by_path, ctx.api_keys.required, options.open_probes, options.prefix)
    pages = {"/openapi.json": lambda request: Response(document, media_type="application/json")}
    open_pages = playground.PAGES if options.playground else {}
    # one route for all methods of a path: a 405 lists them
    routes = [HttpRoute(where, _endpoint(ctx, methods), methods=list(methods)) for where, methods in by_path.items()]
    routes += [HttpRoute(name, page, methods=["GET"]) for name, page in {**pages, **open_pages}.items()]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[options.request_id_header],
    )
    requests = Middleware(RequestMiddleware, ctx, open_pages, on_end)
    prefix = [Middleware(RootPath, options.prefix)] if options.prefix else []
    middleware = [*prefix, *([cors] if options.cors_origins else []), requests]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=_error_handlers(ctx), lifespan=lifespan)
    app.router.redirect_slashes = False
    return app


async def _sample(ctx: AppContext) -> None:
    while True:
        await ctx.api_keys.refresh()
        ctx.metrics.sample(time.time(), ctx.front.stats)
        await asyncio.sleep(SAMPLE_SECONDS)


def _endpoint(ctx: AppContext, methods: Mapping[str, Route]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        route = methods["GET" if request.method == "HEAD" else request.method]
        quota: RequestQuota = request.scope["quota"]
        if route.method == "POST":
            await ctx.next_turn()
        if route.admin:
            ctx.api_keys.check_admin(quota.api_key, route.path)
        body: list[Any] = [] if route.query is None else [parse_query(request.query_params, route.query)]
        if route.body is not None:
            content = await quota.read(request, ctx.options.max_body_bytes)
            if route.path in COUNTED:  # from now on, so that slow senders take no places
                quota.enter()
            # an empty body is {}: each field is missing by its name, or optional
            body.append(parse_body(content or b"{}", route.body))
        answer = await route.handler(ctx, request, *body)
        return answer if isinstance(answer, Response) else reply(answer)

    return endpoint


def _error_handlers(ctx: AppContext) -> dict[Any, Callable[[Request, Any], Awaitable[Response]]]:
    async def answer(request: Request, error: Exception) -> Response:
        info = api_error(error)
        if isinstance(error, HTTPException):
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            info = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
        request.scope["accounting"].error = info.kind
        response = info.response(ctx.options.retry_after, request.url.path, request.headers)
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    return dict.fromkeys((ApiError, ThalwegError, RecursionError, HTTPException), answer)
