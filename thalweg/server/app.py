"""Builds the HTTP application: routes, middleware, error responses, and the OpenAPI page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from thalweg.config.server import ServerOptions
from thalweg.core.errors import ThalwegError
from thalweg.core.logs import fields
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.server import admin, maintenance, openapi, playground, protocol
from thalweg.server.anthropic import protocol as anthropic
from thalweg.server.anthropic.routes import count_tokens, messages
from thalweg.server.api_keys import ApiKeys
from thalweg.server.auth import GENERATION, PROBES, AuthMiddleware
from thalweg.server.chat import chat_completions, tokenize
from thalweg.server.chat_stream import ChatChoice
from thalweg.server.completions import CompletionChoice, completions
from thalweg.server.context import AppContext
from thalweg.server.errors import ApiError, ErrorInfo, error_info
from thalweg.server.generate import generate
from thalweg.server.logs import NoRequestLog, RequestLog
from thalweg.server.middleware import AccessLogMiddleware, ConcurrencyLimit
from thalweg.server.openai_stream import OpenAIResponse
from thalweg.server.openapi import Route
from thalweg.server.parsing import parse_body
from thalweg.server.responses import protocol as responses
from thalweg.server.responses.routes import create_response, delete_response, stored_response
from thalweg.server.responses.store import ResponseStore
from thalweg.server.tracing import NoTraces, traces_to
from thalweg.text.chat import ChatFormat
from thalweg.text.retention import ThinkingRetention

log = logging.getLogger("thalweg.server")
SAMPLE_SECONDS = 1.0

ROUTES = (
    Route("/v1/completions", "POST", completions, protocol.CompletionRequest, OpenAIResponse[CompletionChoice]),
    Route("/v1/chat/completions", "POST", chat_completions, protocol.ChatRequest, OpenAIResponse[ChatChoice]),
    Route("/v1/responses", "POST", create_response, responses.ResponsesRequest, responses.ResponsesResponse),
    Route("/v1/responses/{id}", "GET", stored_response, None, responses.ResponsesResponse),
    Route("/v1/responses/{id}", "DELETE", delete_response, None, responses.DeletedResponse),
    Route("/v1/messages", "POST", messages, anthropic.MessagesRequest, anthropic.MessagesResponse),
    Route("/v1/messages/count_tokens", "POST", count_tokens, anthropic.Conversation, anthropic.TokenCount),
    Route("/v1/models", "GET", admin.models, None, openapi.ModelList),
    Route("/v1/models/{name:path}", "GET", admin.model, None, openapi.ModelCard),
    Route("/generate", "POST", generate, protocol.GenerateRequest, openapi.GenerateResponse, lists=True),
    Route("/tokenize", "POST", tokenize, protocol.TokenizeRequest, openapi.TokenizeResponse),
    Route("/detokenize", "POST", admin.detokenize, protocol.DetokenizeRequest, openapi.DetokenizeResponse),
    Route("/abort", "POST", admin.abort, protocol.AbortRequest, openapi.AbortResponse),
    Route("/abort_request", "POST", admin.abort, protocol.AbortRequest, openapi.AbortResponse),
    Route("/flush_cache", "POST", admin.flush_cache, None, openapi.FlushResponse, admin=True),
    Route(
        "/update_weights_from_disk",
        "POST",
        maintenance.update_weights_from_disk,
        protocol.UpdateWeightsRequest,
        openapi.UpdateWeightsResponse,
        admin=True,
    ),
    Route(
        "/start_profile",
        "POST",
        maintenance.start_profile,
        protocol.StartProfileRequest,
        openapi.OperationResult,
        admin=True,
        optional_body=True,
    ),
    Route("/stop_profile", "POST", maintenance.stop_profile, None, openapi.OperationResult, admin=True),
    Route("/server_info", "GET", admin.server_info, None, openapi.ServerInfoResponse),
    Route("/get_server_info", "GET", admin.server_info, None, openapi.ServerInfoResponse),
    Route("/health", "GET", admin.health, None, openapi.ServerState),
    Route("/ready", "GET", admin.ready, None, openapi.ServerState),
    Route("/resolved", "GET", admin.resolved, None, dict[str, Any]),
)
METRICS = Route("/metrics", "GET", admin.metrics, None, openapi.PlainText)


def build(
    front: EngineClient,
    options: ServerOptions,
    chat: ChatFormat,
    *,
    path: str = "",
    defaults: SamplingParams = SamplingParams(),
) -> FastAPI:
    """The HTTP application of one engine, which the caller starts and ends.

    path: of the checkpoint, as the user gave it; its last part names the model unless options.served_model_name does.
    defaults: sampling parameters of requests that leave them out.
    """
    names = options.served_model_name or (path.rstrip("/").rpartition("/")[2] or "default",)
    store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
    logged = RequestLog(options.log_requests_level, front.tokenizer, PROBES) if options.log_requests else NoRequestLog()
    traces = NoTraces() if options.otlp_traces_endpoint is None else traces_to(options.otlp_traces_endpoint)
    retention = ThinkingRetention(chat, front.tokenizer.mark_id)
    ctx = AppContext(front, chat, options, names, path, defaults, store, retention, logged)
    api_keys = ApiKeys(options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sampler = asyncio.create_task(_sample(ctx, api_keys))
        yield
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
        await asyncio.to_thread(traces.close)

    app = FastAPI(openapi_url=None, lifespan=lifespan, redirect_slashes=False)
    routes = ROUTES + ((METRICS,) if options.metrics else ())
    by_path: dict[str, dict[str, Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route
    for place, methods in by_path.items():  # one route for all methods of a path: a 405 lists them
        endpoint = _endpoint(ctx, api_keys, methods)
        app.add_api_route(place, endpoint, methods=list(methods), response_model=None)
    document = openapi.document(routes, api_keys.required, options.open_probes)
    app.add_route("/openapi.json", lambda request: Response(document, media_type="application/json"), methods=["GET"])
    pages = playground.PAGES if options.playground else {}
    for name, page in pages.items():
        app.add_route(name, page.respond, methods=["GET"], include_in_schema=False)
    app.exception_handlers.update(_error_handlers(ctx))
    open_paths = frozenset(pages)
    app.add_middleware(AuthMiddleware, options=options, metrics=ctx.metrics, api_keys=api_keys, open_paths=open_paths)
    app.add_middleware(ConcurrencyLimit)
    app.add_middleware(AccessLogMiddleware, on_end=(traces.record, logged.write))
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[options.request_id_header],
        )
    return app


async def _sample(ctx: AppContext, api_keys: ApiKeys) -> None:
    while True:
        await api_keys.refresh()
        ctx.metrics.sample(time.time(), ctx.front.stats)
        await asyncio.sleep(SAMPLE_SECONDS)


def _endpoint(
    ctx: AppContext, api_keys: ApiKeys, methods: Mapping[str, Route]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        route = methods[request.method]
        if route.admin:
            api_keys.check_admin(request.scope["quota"].api_key, route.path)
        if route.body is None:
            return await route.handler(ctx, request)
        content = await request.body()
        if route.optional_body:
            content = content or b"{}"
        return await route.handler(ctx, request, parse_body(content, route.body))

    return endpoint


def _error_handlers(ctx: AppContext) -> dict[Any, Callable[[Request, Any], Awaitable[Response]]]:
    async def answer(request: Request, error: Exception) -> Response:
        info = error_info(error)
        if isinstance(error, HTTPException):
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            info = ErrorInfo(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
        request.scope["accounting"].error = info.kind
        response = info.response(ctx.options.retry_after, request.url.path)
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    async def fail(request: Request, error: Exception) -> Response:
        """An unexpected exception, outside the auth middleware."""
        accounting, path = request.scope["accounting"], request.url.path
        log.error("failed", exc_info=error, extra=fields(id=accounting.id))
        if accounting.status == 500:  # else the response had begun, and was counted
            ctx.metrics.answered(path if path in GENERATION else "other", 500)
        response = error_info(error).response(ctx.options.retry_after, path)
        response.headers[ctx.options.request_id_header] = accounting.id
        return response

    expected = (ApiError, ThalwegError, RecursionError, HTTPException)
    return {**dict.fromkeys(expected, answer), Exception: fail}
