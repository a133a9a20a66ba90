"""The door, as one plain ASGI layer before all routes: request id, key, sizes, and how many may come in at a time.

A request takes its places, the server's and its key's, when its whole body is there: who sends slowly holds none.
"""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thalweg.config.server import ServerOptions
from thalweg.server.api_keys import ApiKey, ApiKeys, RequestQuota
from thalweg.server.context import clean_rid
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.metrics import ServerMetrics

WORK = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"}
)  # the routes that generate, each of which has its own line in the metrics
COUNTED = WORK | {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}  # what the concurrency limits count
PROBES = frozenset({"/health", "/ready", "/metrics"})


class AuthMiddleware:
    """Lets a request through, or answers it here with a 401, 403, 413, 415 or 429.

    Everything inside finds `request_id`, `send_chunk` and `allowance` in the scope.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        metrics: ServerMetrics,
        api_keys: ApiKeys,
        open_paths: frozenset[str],
    ) -> None:
        self.app, self.options, self.metrics, self._keyring = app, options, metrics, api_keys
        self._open = open_paths | (PROBES if options.open_probes else frozenset())
        self.header = options.request_id_header.lower().encode()
        self._inside = 0
        self._bytes = 0  # of bodies, of all requests that are under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        rid = clean_rid(headers.get(self.options.request_id_header)) or uuid.uuid4().hex
        scope["request_id"] = rid
        scope["send_chunk"] = send  # past all layers inside, which have no business with the chunks of a stream
        api_key = self._keyring.find(headers)
        scope["quota"] = RequestQuota(api_key or self._keyring.anyone)
        scope["accounting"].key = scope["quota"].api_key.label
        visit = _Visit(self, scope, receive, send, rid)
        problem = self._refusal(scope, headers, api_key)
        if problem is not None:
            scope["accounting"].error = problem.kind
            return await problem.response(self.options.retry_after, scope["path"])(scope, receive, visit.send)
        try:
            await self.app(scope, visit.receive, visit.send)
        except ClientDisconnect:  # in the middle of its body
            scope["accounting"].gone = True
            self.metrics.disconnects += 1
        finally:
            visit.close()

    def _refusal(self, scope: Scope, headers: Headers, api_key: ApiKey | None) -> ErrorInfo | None:
        path: str = scope["path"]
        if api_key is None and path not in self._open:
            message = "a valid API key is needed: send it as the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
            return ErrorInfo(401, message, "authentication_error", code="invalid_api_key")
        if scope["method"] != "GET" and headers.get("sec-fetch-site") == "cross-site" and not self._welcome(headers):
            message = (
                f"a page of {headers.get('origin', 'another site')} sent this: --cors-origins names those that may"
            )
            return ErrorInfo(403, message, "permission_error", code="cross_site")
        if headers.get("content-encoding", "identity").lower() != "identity":
            message = f"Content-Encoding {headers['content-encoding']!r} is not read here: send the body as it is"
            return ErrorInfo(415, message, code="unsupported_encoding")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.options.max_body_bytes:
            return _too_long(self.options.max_body_bytes)
        if path in COUNTED and self.full:
            return self.crowded()
        return None

    def _welcome(self, headers: Headers) -> bool:
        origins = self.options.cors_origins
        return "*" in origins or headers.get("origin") in origins

    @property
    def full(self) -> bool:
        limit = self.options.max_concurrent_requests
        return bool(limit) and self._inside >= limit

    def crowded(self) -> ErrorInfo:
        limit = self.options.max_concurrent_requests
        message = f"{limit} requests are being served, which is the limit: try again later"
        return ErrorInfo(429, message, "rate_limit_error", code="too_many_requests", retry=True)

    def admit(self, quota: RequestQuota) -> None:
        """The whole body of a counted request is there. Raises ApiError (429) where there is no place."""
        if self.full:
            raise ApiError(self.crowded())
        quota.enter()
        self._inside += 1

    def leave(self, entered: bool, size: int) -> None:
        self._inside -= entered
        self._bytes -= size

    def grow(self, size: int) -> None:
        """So many more bytes of a body have come. Raises ApiError (429)."""
        self._bytes += size
        if self._bytes > self.options.max_bodies_bytes:
            message = (
                f"the bodies of all requests have more than {self.options.max_bodies_bytes} bytes: try again later"
            )
            raise ApiError(ErrorInfo(429, message, "rate_limit_error", code="too_many_bytes", retry=True))


def _too_long(limit: int) -> ErrorInfo:
    return ErrorInfo(413, f"the body is longer than the limit of {limit} bytes", code="body_too_large")


class _Visit:
    """One request on its way through: counts its body, puts its id on the answer, and notes how it was answered."""

    __slots__ = ("gate", "scope", "_receive", "_send", "rid", "read", "quota", "entered")

    def __init__(self, gate: AuthMiddleware, scope: Scope, receive: Receive, send: Send, rid: str) -> None:
        self.gate, self.scope, self._receive, self._send, self.rid = gate, scope, receive, send, rid
        self.read = 0
        self.quota: RequestQuota = scope["quota"]
        self.entered = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.read += size
            self.gate.grow(size)
            if self.read > self.gate.options.max_body_bytes:
                raise ApiError(_too_long(self.gate.options.max_body_bytes))
            if self.scope["path"] in COUNTED and not message.get("more_body") and not self.entered:
                self.gate.admit(self.quota)
                self.entered = True
        return message

    def close(self) -> None:
        """The request has ended, however it did."""
        self.gate.leave(self.entered, self.read)
        self.quota.close()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (self.gate.header, self.rid.encode())]
            self._note(message["status"])
        await self._send(message)

    def _note(self, status: int) -> None:
        route = self.scope["path"] if self.scope["path"] in WORK else "other"
        self.gate.metrics.answered(route, status)
        self.scope["accounting"].status = status
