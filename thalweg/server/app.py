"""Puts the server together: routes, the gate, error answers, and the OpenAPI page made from the request structs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec
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
from thalweg.server.access_log import AccessLogMiddleware
from thalweg.server.accounting import accounting_of
from thalweg.server.anthropic import protocol as anthropic
from thalweg.server.anthropic.routes import count_tokens, messages
from thalweg.server.api_keys import ApiKeys
from thalweg.server.auth import PROBES, WORK, AuthMiddleware
from thalweg.server.chat import chat_completions, tokenize
from thalweg.server.completions import completions
from thalweg.server.concurrency import ConcurrencyLimit
from thalweg.server.context import AppContext, quota_of
from thalweg.server.errors import ApiError, ErrorInfo, error_info
from thalweg.server.generate import generate
from thalweg.server.logs import NoLog, RequestLog
from thalweg.server.metrics import ServerMetrics
from thalweg.server.responses import protocol as responses
from thalweg.server.responses.routes import forget_response, kept_response, respond
from thalweg.server.responses.store import ResponseStore
from thalweg.server.tracing import NoTraces, traces_to
from thalweg.text.chat import ChatFormat
from thalweg.text.retention import ThinkingRetention

log = logging.getLogger("thalweg.server")
SAMPLE_SECONDS = 1.0

Handler = Callable[[AppContext, Request], Awaitable[Response]]


class Route(NamedTuple):
    """body: the struct of the request, None for none. answer: what a 200 holds. many: a list of answers, where a list
    was asked. admin: it needs the admin key. optional: an empty body is {}.
    """

    path: str
    method: str
    handler: Handler
    body: type[msgspec.Struct] | None
    answer: Any
    many: bool = False
    admin: bool = False
    optional: bool = False

    @property
    def described(self) -> openapi.RouteDoc:
        name = self.handler.__name__
        summary = " ".join((self.handler.__doc__ or name.replace("_", " ")).split())
        flags = self.many, self.admin, self.optional
        return openapi.RouteDoc(self.path, self.method, name, summary, self.body, self.answer, *flags)


ROUTES = (
    Route("/v1/completions", "POST", completions, protocol.CompletionRequest, openapi.Completion),
    Route("/v1/chat/completions", "POST", chat_completions, protocol.ChatRequest, openapi.ChatCompletion),
    Route("/v1/responses", "POST", respond, responses.ResponsesRequest, responses.ResponseAnswer),
    Route("/v1/responses/{id}", "GET", kept_response, None, responses.ResponseAnswer),
    Route("/v1/responses/{id}", "DELETE", forget_response, None, responses.Deleted),
    Route("/v1/messages", "POST", messages, anthropic.MessagesRequest, anthropic.MessagesResponse),
    Route("/v1/messages/count_tokens", "POST", count_tokens, anthropic.Conversation, anthropic.TokenCount),
    Route("/v1/models", "GET", admin.models, None, openapi.ModelList),
    Route("/v1/models/{name:path}", "GET", admin.model, None, openapi.ModelCard),
    Route("/generate", "POST", generate, protocol.GenerateRequest, openapi.Generated, many=True),
    Route("/tokenize", "POST", tokenize, protocol.TokenizeRequest, openapi.Tokens),
    Route("/detokenize", "POST", admin.detokenize, protocol.DetokenizeRequest, openapi.Detokenized),
    Route("/abort", "POST", admin.abort, protocol.AbortRequest, openapi.Aborted),
    Route("/abort_request", "POST", admin.abort, protocol.AbortRequest, openapi.Aborted),
    Route("/flush_cache", "POST", admin.flush_cache, None, openapi.Flushed, admin=True),
    Route(
        "/update_weights_from_disk",
        "POST",
        maintenance.update_weights_from_disk,
        protocol.UpdateWeightsRequest,
        openapi.WeightsUpdated,
        admin=True,
    ),
    Route(
        "/start_profile",
        "POST",
        maintenance.start_profile,
        protocol.StartProfileRequest,
        openapi.OperationResult,
        admin=True,
        optional=True,
    ),
    Route("/stop_profile", "POST", maintenance.stop_profile, None, openapi.OperationResult, admin=True),
    Route("/server_info", "GET", admin.server_info, None, openapi.ServerInfo),
    Route("/get_server_info", "GET", admin.server_info, None, openapi.ServerInfo),
    Route("/health", "GET", admin.health, None, openapi.State),
    Route("/ready", "GET", admin.ready, None, openapi.State),
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
    """The HTTP application of one front. Starting and ending the front is the caller's business.

    chat: encoder and parsers of the model. path: of its checkpoint, as the user gave it; its last part names the model
    when options.served_model_name does not. defaults: sampling parameters of requests that do not say.
    """
    names = options.served_model_name or (path.rstrip("/").rpartition("/")[2] or "default",)
    store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
    requests = RequestLog(options.log_requests_level, front.tokenizer, PROBES) if options.log_requests else NoLog()
    traces = NoTraces() if options.otlp_traces_endpoint is None else traces_to(options.otlp_traces_endpoint)
    history = ThinkingRetention(chat, front.tokenizer.mark_id)
    ctx = AppContext(
        front,
        chat,
        options,
        names,
        path,
        defaults,
        ServerMetrics(),
        time.time(),
        store,
        history,
        listen=requests.listen,
    )
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
    for place in dict.fromkeys(route.path for route in routes):
        _add(app, ctx, place, {route.method: _guarded(route, api_keys) for route in routes if route.path == place})
    document = openapi.document((route.described for route in routes), api_keys.asks, options.open_probes)
    app.add_route("/openapi.json", lambda request: Response(document, media_type="application/json"), methods=["GET"])
    pages = playground.PAGES if options.playground else {}
    for name, page in pages.items():
        app.add_route(name, page.respond, methods=["GET"], include_in_schema=False)
    _add_error_answers(app, options, ctx.metrics)
    app.add_middleware(
        AuthMiddleware,
        options=options,
        metrics=ctx.metrics,
        api_keys=api_keys,
        open_paths=frozenset(pages),
    )
    app.add_middleware(ConcurrencyLimit)
    app.add_middleware(AccessLogMiddleware, tellers=(traces.tell, requests.tell))
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


def _guarded(route: Route, api_keys: ApiKeys) -> Handler:
    if not route.admin:
        return route.handler

    async def guarded(ctx: AppContext, request: Request) -> Response:
        api_keys.check_admin(quota_of(request).api_key, route.path)
        return await route.handler(ctx, request)

    return guarded


def _add(app: FastAPI, ctx: AppContext, path: str, handlers: dict[str, Handler]) -> None:
    """One route for all methods of a path: a 405 lists them."""

    async def endpoint(request: Request) -> Response:
        return await handlers[request.method](ctx, request)

    app.add_api_route(path, endpoint, methods=list(handlers), response_model=None)


def _add_error_answers(app: FastAPI, options: ServerOptions, metrics: ServerMetrics) -> None:
    async def on_purpose(request: Request, error: Exception) -> Response:
        problem = error_info(error)
        accounting_of(request).error = problem.kind
        return problem.response(options.retry_after, request.url.path)

    async def by_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        problem = ErrorInfo(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
        accounting_of(request).error = problem.kind
        response = problem.response(options.retry_after, request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def by_accident(request: Request, error: Exception) -> Response:
        accounting = accounting_of(request)
        log.error("failed", exc_info=error, extra=fields(id=accounting.id))
        if accounting.status == 500:  # else it has begun to answer, which was counted
            metrics.answered(request.url.path if request.url.path in WORK else "other", 500)
        response = error_info(error).response(options.retry_after, request.url.path)
        response.headers[options.request_id_header] = accounting.id
        return response

    app.add_exception_handler(ApiError, on_purpose)
    app.add_exception_handler(ThalwegError, on_purpose)
    app.add_exception_handler(RecursionError, on_purpose)
    app.add_exception_handler(HTTPException, by_route)
    app.add_exception_handler(Exception, by_accident)
