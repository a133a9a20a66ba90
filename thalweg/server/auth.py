"""Auth middleware, outside all routes: request id, API key, body sizes, and the number of requests at a time.

A request counts from the moment its whole body is there, so that slow senders take no places.
"""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thalweg.config.server import ServerOptions
from thalweg.server.accounting import RequestAccounting
from thalweg.server.api_keys import ApiKey, ApiKeys, RequestQuota
from thalweg.server.context import clean_rid
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.metrics import ServerMetrics

GENERATION = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"})
COUNTED = GENERATION | {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}  # by the concurrency limits
PROBES = frozenset({"/health", "/ready", "/metrics"})


class AuthMiddleware:
    """Passes a request on, or answers it with a 401, 403, 413, 415 or 429.

    Puts `request_id`, `send_chunk` and `quota` into the scope.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        metrics: ServerMetrics,
        api_keys: ApiKeys,
        open_paths: frozenset[str],  # without a key
    ) -> None:
        self.app, self.options, self.metrics, self._api_keys = app, options, metrics, api_keys
        self._open = open_paths | (PROBES if options.open_probes else frozenset())
        self._running = 0
        self._body_bytes = 0  # of all running requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        rid = clean_rid(headers.get(self.options.request_id_header)) or uuid.uuid4().hex
        api_key = self._api_keys.find(headers)
        quota = RequestQuota(api_key or self._api_keys.anyone)
        scope.update(request_id=rid, send_chunk=send, quota=quota)  # the chunks of a stream skip all inner layers
        accounting: RequestAccounting = scope["accounting"]
        accounting.key = quota.api_key.label
        visit = _Visit(self, scope, receive, send)
        info = self._refusal(scope, headers, api_key)
        if info is not None:
            accounting.error = info.kind
            return await info.response(self.options.retry_after, scope["path"])(scope, receive, visit.send)
        try:
            await self.app(scope, visit.receive, visit.send)
        except ClientDisconnect:  # in the middle of its body
            accounting.gone = True
            self.metrics.disconnects += 1
        finally:
            self._running -= visit.admitted
            self._body_bytes -= visit.body_bytes
            quota.close()

    def _refusal(self, scope: Scope, headers: Headers, api_key: ApiKey | None) -> ErrorInfo | None:
        path, origins, limit = scope["path"], self.options.cors_origins, self.options.max_body_bytes
        if api_key is None and path not in self._open:
            message = "a valid API key is needed: send it as the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
            return ErrorInfo(401, message, "authentication_error", code="invalid_api_key")
        allowed = "*" in origins or headers.get("origin") in origins
        if scope["method"] != "GET" and headers.get("sec-fetch-site") == "cross-site" and not allowed:
            origin = headers.get("origin", "another site")
            message = f"a page of {origin} sent this: --cors-origins names the sites that may"
            return ErrorInfo(403, message, "permission_error", code="cross_site")
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            message = f"Content-Encoding {encoding!r} is not supported: send the body as it is"
            return ErrorInfo(415, message, code="unsupported_encoding")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            return _too_large(limit)
        return self._full() if path in COUNTED else None

    def _full(self) -> ErrorInfo | None:
        limit = self.options.max_concurrent_requests
        if not limit or self._running < limit:
            return None
        message = f"{limit} requests are running, which is the limit: try again later"
        return ErrorInfo(429, message, "rate_limit_error", code="too_many_requests", retry=True)

    def admit(self, quota: RequestQuota) -> None:
        """Counts a request whose body is there. Raises ApiError (429)."""
        if (info := self._full()) is not None:
            raise ApiError(info)
        quota.enter()
        self._running += 1

    def add_body(self, size: int) -> None:
        """Counts a part of a body. Raises ApiError (429)."""
        self._body_bytes += size
        limit = self.options.max_bodies_bytes
        if self._body_bytes > limit:
            message = f"the bodies of all requests have more than {limit} bytes: try again later"
            raise ApiError(ErrorInfo(429, message, "rate_limit_error", code="too_many_bytes", retry=True))


def _too_large(limit: int) -> ErrorInfo:
    return ErrorInfo(413, f"the body is longer than the limit of {limit} bytes", code="body_too_large")


class _Visit:
    """One request: counts its body, and adds its id to the response."""

    __slots__ = ("_auth", "_receive", "_scope", "_send", "admitted", "body_bytes")

    def __init__(self, auth: AuthMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        self._auth, self._scope, self._receive, self._send = auth, scope, receive, send
        self.body_bytes, self.admitted = 0, False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            size, limit = len(message.get("body", b"")), self._auth.options.max_body_bytes
            self.body_bytes += size
            self._auth.add_body(size)
            if self.body_bytes > limit:
                raise ApiError(_too_large(limit))
            if self._scope["path"] in COUNTED and not message.get("more_body") and not self.admitted:
                self._auth.admit(self._scope["quota"])
                self.admitted = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            header = self._auth.options.request_id_header.lower().encode()
            message["headers"] = [*message["headers"], (header, self._scope["request_id"].encode())]
            path, status = self._scope["path"], message["status"]
            self._auth.metrics.answered(path if path in GENERATION else "other", status)
            self._scope["accounting"].status = status
        await self._send(message)
