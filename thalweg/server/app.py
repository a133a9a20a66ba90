"""Puts the server together: routes, the gate, error answers, and the OpenAPI page made from the request structs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from thalweg import __version__
from thalweg.config.server import ServerOptions
from thalweg.core.errors import ThalwegError
from thalweg.core.sampling import SamplingParams
from thalweg.server import admin, playground, protocol
from thalweg.server.chat import chat_completions, tokenize
from thalweg.server.completions import completions
from thalweg.server.contract import Front
from thalweg.server.desk import Desk
from thalweg.server.errors import ApiError, Problem, problem_of
from thalweg.server.gate import Gate
from thalweg.server.metrics import Meters
from thalweg.server.native import generate
from thalweg.text.chat import Chat

log = logging.getLogger("thalweg.server")
SAMPLE_SECONDS = 1.0

Handler = Callable[[Desk, Request], Awaitable[Response]]
Route = tuple[str, tuple[str, ...], Handler, type[msgspec.Struct] | None]

ROUTES: tuple[Route, ...] = (
    ("/v1/completions", ("POST",), completions, protocol.CompletionRequest),
    ("/v1/chat/completions", ("POST",), chat_completions, protocol.ChatRequest),
    ("/v1/models", ("GET",), admin.models, None),
    ("/v1/models/{name:path}", ("GET",), admin.model, None),
    ("/generate", ("POST",), generate, protocol.GenerateRequest),
    ("/tokenize", ("POST",), tokenize, protocol.TokenizeRequest),
    ("/detokenize", ("POST",), admin.detokenize, protocol.DetokenizeRequest),
    ("/abort", ("POST",), admin.abort, protocol.AbortRequest),
    ("/abort_request", ("POST",), admin.abort, protocol.AbortRequest),
    ("/flush_cache", ("POST",), admin.flush_cache, None),
    ("/server_info", ("GET",), admin.server_info, None),
    ("/get_server_info", ("GET",), admin.server_info, None),
    ("/health", ("GET",), admin.health, None),
    ("/ready", ("GET",), admin.ready, None),
    ("/resolved", ("GET",), admin.resolved, None),
)


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
    desk = Desk(front, chat, options, names, path, defaults, Meters(), time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sampler = asyncio.create_task(_sample(desk))
        yield
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler

    app = FastAPI(title="Thalweg", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    for route in ROUTES:
        _add(app, desk, *route)
    if options.metrics:
        _add(app, desk, "/metrics", ("GET",), admin.metrics, None)
    pages = playground.PAGES if options.playground else {}
    for name, page in pages.items():
        app.add_route(name, page.respond, methods=["GET"], include_in_schema=False)
    _add_error_answers(app, options)
    app.add_middleware(Gate, options=options, meters=desk.meters, open_paths=frozenset(pages))
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[options.request_id_header],
        )
    return app


async def _sample(desk: Desk) -> None:
    while True:
        desk.meters.sample(time.time(), desk.front.stats)
        await asyncio.sleep(SAMPLE_SECONDS)


def _add(
    app: FastAPI, desk: Desk, path: str, methods: tuple[str, ...], handler: Handler, body: type[Any] | None
) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(desk, request)

    app.add_api_route(
        path,
        endpoint,
        methods=list(methods),
        name=handler.__name__,
        summary=" ".join((handler.__doc__ or handler.__name__.replace("_", " ")).split()),
        response_model=None,
        openapi_extra=_request_body(body),
    )


def _request_body(body: type[Any] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    schema = msgspec.json.schema(body)
    definitions = schema.pop("$defs")
    content = {"application/json": {"schema": _inline(definitions[body.__name__], definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its references replaced by what they stand for (the structs do not contain themselves)."""
    if isinstance(schema, list):
        return [_inline(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}


def _add_error_answers(app: FastAPI, options: ServerOptions) -> None:
    async def on_purpose(request: Request, error: Exception) -> Response:
        return problem_of(error).response(options.retry_after)

    async def by_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        problem = Problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code)
        response = problem.response(options.retry_after)
        response.headers.update(error.headers or {})
        return response

    async def by_accident(request: Request, error: Exception) -> Response:
        log.error("request %s failed", request.scope.get("request_id"), exc_info=error)
        response = problem_of(error).response(options.retry_after)
        response.headers[options.request_id_header] = request.scope.get("request_id", "")
        return response

    app.add_exception_handler(ApiError, on_purpose)
    app.add_exception_handler(ThalwegError, on_purpose)
    app.add_exception_handler(HTTPException, by_route)
    app.add_exception_handler(Exception, by_accident)
