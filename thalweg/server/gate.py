"""The door, as one plain ASGI layer before all routes: request id, key, sizes, and how many may come in at a time."""

from __future__ import annotations

import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thalweg.config.server import ServerOptions
from thalweg.server.desk import clean_rid
from thalweg.server.errors import ApiError, Problem
from thalweg.server.metrics import Meters

log = logging.getLogger("thalweg.server")
WORK = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"}
)  # the routes that the concurrency limit counts
PROBES = frozenset({"/health", "/ready", "/metrics"})


class Gate:
    """Lets a request through, or answers it here with a 401, 413 or 429.

    Everything inside finds `request_id` and `send_chunk` in the scope.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, meters: Meters, open_paths: frozenset[str]) -> None:
        self.app, self.options, self.meters = app, options, meters
        self._open = open_paths | (PROBES if options.open_probes else frozenset())
        self.header = options.request_id_header.lower().encode()
        self._keys = [key.encode() for key in options.api_key]
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        rid = clean_rid(headers.get(self.options.request_id_header)) or uuid.uuid4().hex
        scope["request_id"] = rid
        scope["send_chunk"] = send  # past all layers inside, which have no business with the chunks of a stream
        visit = _Visit(self, scope, receive, send, rid)
        problem = self._refusal(scope["path"], headers)
        if problem is not None:
            return await problem.response(self.options.retry_after, scope["path"])(scope, receive, visit.send)
        if scope["path"] not in WORK:
            return await self.app(scope, visit.receive, visit.send)
        self._inside += 1
        try:
            await self.app(scope, visit.receive, visit.send)
        finally:
            self._inside -= 1

    def _refusal(self, path: str, headers: Headers) -> Problem | None:
        if self._keys and path not in self._open and not self._knows(headers):
            message = "a valid API key is needed: send it as the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
            return Problem(401, message, "authentication_error", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.options.max_body_bytes:
            return _too_long(self.options.max_body_bytes)
        limit = self.options.max_concurrent_requests
        if path in WORK and limit and self._inside >= limit:
            message = f"{limit} requests are being served, which is the limit: try again later"
            return Problem(429, message, "rate_limit_error", code="too_many_requests", retry=True)
        return None

    def _knows(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        bearer = key.strip() if kind.lower() == "bearer" else ""
        given = [
            text.encode("utf-8", "replace") for text in (bearer, headers.get("x-api-key", ""))
        ]  # OpenAI's, Anthropic's
        matches = [hmac.compare_digest(one, known) for one in given for known in self._keys]
        return any(matches)  # all were compared: the time tells nothing


def _too_long(limit: int) -> Problem:
    return Problem(413, f"the body is longer than the limit of {limit} bytes", code="body_too_large")


class _Visit:
    """One request on its way through: counts its body, puts its id on the answer, and notes how it was answered."""

    __slots__ = ("gate", "scope", "_receive", "_send", "rid", "read", "began")

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send, rid: str) -> None:
        self.gate, self.scope, self._receive, self._send, self.rid = gate, scope, receive, send, rid
        self.read = 0
        self.began = time.time()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.read += len(message.get("body", b""))
            if self.read > self.gate.options.max_body_bytes:
                raise ApiError(_too_long(self.gate.options.max_body_bytes))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (self.gate.header, self.rid.encode())]
            self._note(message["status"])
        await self._send(message)

    def _note(self, status: int) -> None:
        route = self.scope["path"] if self.scope["path"] in WORK else "other"
        self.gate.meters.answered(route, status)
        if self.gate.options.log_requests:
            seconds = time.time() - self.began
            log.info(
                "%s %s %s %d %.3f s to the first byte",
                self.rid,
                self.scope["method"],
                _plain(self.scope["path"]),
                status,
                seconds,
            )


def _plain(path: str) -> str:
    """A path as it may stand in a log line: no control characters, not endless."""
    return path[:200].encode("unicode_escape").decode()
