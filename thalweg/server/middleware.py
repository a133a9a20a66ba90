"""Around all routes: the accounting, API key and response header of each request."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thalweg.core.logs import fields
from thalweg.server.accounting import CLIENT_CLOSED_REQUEST, GENERATION, PROBES, OnEnd, RequestAccounting
from thalweg.server.api_keys import ApiKey, RequestQuota, body_too_large
from thalweg.server.context import AppContext, clean_rid
from thalweg.server.errors import ApiError, api_error

log = logging.getLogger("thalweg.server")
COUNTED = {  # by the limits of running requests
    *(*GENERATION, "/tokenize", "/detokenize"),
    *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
}


class RootPath:
    """The same application under a prefix too, for proxies that pass it on."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """prefix: as ServerOptions.prefix."""
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._prefix:  # the page's own links are relative
            return await RedirectResponse(self._prefix + "/")(scope, receive, send)
        if path.startswith(self._prefix + "/"):
            scope = {**scope, "path": path.removeprefix(self._prefix)}
        await self._app(scope, receive, send)


class RequestMiddleware:
    """Passes a request on, or answers it with a 401, 403, 413, 415 or 429; answers an unexpected exception with a 500.

    Puts `accounting`, `quota` and `send_chunk` into the scope. When the request has ended, each of `on_end` gets its
    accounting, in order.
    """

    def __init__(self, app: ASGIApp, ctx: AppContext, open_paths: Collection[str], on_end: Iterable[OnEnd]) -> None:
        """open_paths: without a key."""
        self._app, self._ctx, self._on_end = app, ctx, tuple(on_end)
        self._open = {*open_paths, *(PROBES if ctx.options.open_probes else ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        ctx, headers, path = self._ctx, Headers(scope=scope), scope["path"]
        api_key = ctx.api_keys.find(headers)
        quota = RequestQuota(api_key or ctx.api_keys.anyone, ctx.load)
        rid = clean_rid(headers.get(ctx.options.request_id_header)) or uuid.uuid4().hex
        accounting = RequestAccounting(scope["method"], path, headers, time.time(), rid, quota.api_key.name)
        scope.update(accounting=accounting, quota=quota, send_chunk=send)  # a stream's chunks skip all inner layers

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = ctx.options.request_id_header.lower().encode()
                message["headers"] = [*message["headers"], (header, rid.encode())]
                accounting.status = message["status"]
                ctx.metrics.requests[path if path in GENERATION else "other", accounting.status] += 1
            await send(message)

        try:
            self._check(scope, headers, api_key)
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:  # in the middle of its body
            accounting.gone = True
            ctx.metrics.disconnects += 1
        except Exception as error:
            info = api_error(error)
            accounting.error = accounting.error or info.kind
            if not isinstance(error, ApiError):
                log.error("failed", exc_info=error, extra=fields(id=rid))
            if accounting.status:  # the response had begun
                raise
            await info.response(ctx.options.retry_after, path, headers)(scope, receive, send_with_id)
        finally:
            if accounting.work is None:
                self._end(quota, accounting)
            else:
                accounting.work.add_done_callback(lambda task: self._end(quota, accounting))

    def _end(self, quota: RequestQuota, accounting: RequestAccounting) -> None:
        quota.close()
        accounting.ended = time.time()
        accounting.status = accounting.status or CLIENT_CLOSED_REQUEST
        for on_end in self._on_end:
            on_end(accounting)

    def _check(self, scope: Scope, headers: Headers, api_key: ApiKey | None) -> None:
        """Raises ApiError for a request that is refused before its body is read."""
        path, origins, limit = scope["path"], self._ctx.options.cors_origins, self._ctx.options.max_body_bytes
        if api_key is None and path not in self._open:
            message = "a valid API key is needed: send it as the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")
        origin = headers.get("origin")
        allowed = "*" in origins or origin in origins
        # browsers send Sec-Fetch-Site over https and to localhost only, but Origin with every POST
        is_own = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
        is_foreign = not is_own or headers.get("sec-fetch-site") == "cross-site"
        if scope["method"] != "GET" and is_foreign and not allowed:
            message = f"a page of {origin or 'another site'} sent this: --cors-origins names the sites that may"
            raise ApiError(403, message, "permission_error", code="cross_site")
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            message = f"Content-Encoding {encoding!r} is not supported: send the body as it is"
            raise ApiError(415, message, code="unsupported_encoding")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise body_too_large(limit)
        if path in COUNTED:
            self._ctx.load.check()
