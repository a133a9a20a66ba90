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
from thalweg.core.sampling import SamplingParams
from thalweg.server import admin, openapi, playground, protocol
from thalweg.server.anthropic import protocol as anthropic
from thalweg.server.anthropic.routes import count_tokens, messages
from thalweg.server.chat import chat_completions, tokenize
from thalweg.server.completions import completions
from thalweg.server.contract import Front
from thalweg.server.desk import Desk
from thalweg.server.errors import ApiError, Problem, problem_of
from thalweg.server.gate import Gate
from thalweg.server.metrics import Meters
from thalweg.server.native import generate
from thalweg.server.responses import protocol as responses
from thalweg.server.responses.routes import forget_response, kept_response, respond
from thalweg.server.responses.shelf import Shelf
from thalweg.text.chat import Chat

log = logging.getLogger("thalweg.server")
SAMPLE_SECONDS = 1.0

Handler = Callable[[Desk, Request], Awaitable[Response]]


class Route(NamedTuple):
    """body: the struct of the request, None for none. answer: what a 200 holds. many: a list of answers, where a list was asked."""

    path: str
    method: str
    handler: Handler
    body: type[msgspec.Struct] | None
    answer: Any
    many: bool = False

    @property
    def described(self) -> openapi.Described:
        name = self.handler.__name__
        summary = " ".join((self.handler.__doc__ or name.replace("_", " ")).split())
        return openapi.Described(self.path, self.method, name, summary, self.body, self.answer, self.many)


ROUTES = (
    Route("/v1/completions", "POST", completions, protocol.CompletionRequest, openapi.Completion),
    Route("/v1/chat/completions", "POST", chat_completions, protocol.ChatRequest, openapi.ChatCompletion),
    Route("/v1/responses", "POST", respond, responses.ResponsesRequest, responses.ResponseAnswer),
    Route("/v1/responses/{id}", "GET", kept_response, None, responses.ResponseAnswer),
    Route("/v1/responses/{id}", "DELETE", forget_response, None, responses.Deleted),
    Route("/v1/messages", "POST", messages, anthropic.MessagesRequest, anthropic.MessageAnswer),
    Route("/v1/messages/count_tokens", "POST", count_tokens, anthropic.Conversation, anthropic.TokenCount),
    Route("/v1/models", "GET", admin.models, None, openapi.ModelList),
    Route("/v1/models/{name:path}", "GET", admin.model, None, openapi.ModelCard),
    Route("/generate", "POST", generate, protocol.GenerateRequest, openapi.Generated, many=True),
    Route("/tokenize", "POST", tokenize, protocol.TokenizeRequest, openapi.Tokens),
    Route("/detokenize", "POST", admin.detokenize, protocol.DetokenizeRequest, openapi.Detokenized),
    Route("/abort", "POST", admin.abort, protocol.AbortRequest, openapi.Aborted),
    Route("/abort_request", "POST", admin.abort, protocol.AbortRequest, openapi.Aborted),
    Route("/flush_cache", "POST", admin.flush_cache, None, openapi.Flushed),
    Route("/server_info", "GET", admin.server_info, None, openapi.ServerInfo),
    Route("/get_server_info", "GET", admin.server_info, None, openapi.ServerInfo),
    Route("/health", "GET", admin.health, None, openapi.State),
    Route("/ready", "GET", admin.ready, None, openapi.State),
    Route("/resolved", "GET", admin.resolved, None, dict[str, Any]),
)
METRICS = Route("/metrics", "GET", admin.metrics, None, openapi.PlainText)


def build(
    front: Front,
    options: ServerOptions,
    chat: Chat,
    *,
    path: str = "",
    defaults: SamplingParams = SamplingParams(),
) -> FastAPI:
    """The HTTP application of one front. Starting and ending the front is the caller's business.

    chat: encoder and parsers of the model. path: of its checkpoint, as the user gave it; its last part names the model when
    options.served_model_name does not. defaults: sampling parameters of requests that do not say.
    """
    names = options.served_model_name or (path.rstrip("/").rpartition("/")[2] or "default",)
    shelf = Shelf(options.max_stored_responses, options.max_stored_response_bytes)
    desk = Desk(front, chat, options, names, path, defaults, Meters(), time.time(), shelf)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sampler = asyncio.create_task(_sample(desk))
        yield
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    routes = ROUTES + ((METRICS,) if options.metrics else ())
    for place in dict.fromkeys(route.path for route in routes):
        _add(app, desk, place, {route.method: route.handler for route in routes if route.path == place})
    document = openapi.document((route.described for route in routes), bool(options.api_key), options.open_probes)
    app.add_route("/openapi.json", lambda request: Response(document, media_type="application/json"), methods=["GET"])
    pages = playground.PAGES if options.playground else {}
    for name, page in pages.items():
        app.add_route(name, page.respond, methods=["GET"], include_in_schema=False)
    _add_error_answers(app, options)
    app.add_middleware(Gate, options=options, meters=desk.meters, open_paths=frozenset(pages))
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[options.request_id_header],
        )
    return app


async def _sample(desk: Desk) -> None:
    while True:
        desk.meters.sample(time.time(), desk.front.stats)
        await asyncio.sleep(SAMPLE_SECONDS)


def _add(app: FastAPI, desk: Desk, path: str, handlers: dict[str, Handler]) -> None:
    """One route for all methods of a path: a 405 lists them."""

    async def endpoint(request: Request) -> Response:
        return await handlers[request.method](desk, request)

    app.add_api_route(path, endpoint, methods=list(handlers), response_model=None)


def _add_error_answers(app: FastAPI, options: ServerOptions) -> None:
    async def on_purpose(request: Request, error: Exception) -> Response:
        return problem_of(error).response(options.retry_after, request.url.path)

    async def by_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        problem = Problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
        response = problem.response(options.retry_after, request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def by_accident(request: Request, error: Exception) -> Response:
        log.error("request %s failed", request.scope.get("request_id"), exc_info=error)
        response = problem_of(error).response(options.retry_after, request.url.path)
        response.headers[options.request_id_header] = request.scope.get("request_id", "")
        return response

    app.add_exception_handler(ApiError, on_purpose)
    app.add_exception_handler(ThalwegError, on_purpose)
    app.add_exception_handler(HTTPException, by_route)
    app.add_exception_handler(Exception, by_accident)
