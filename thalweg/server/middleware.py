"""The two outermost ASGI layers: access log and concurrency limit."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from thalweg.server.accounting import CLIENT_CLOSED_REQUEST, OnEnd, RequestAccounting

PER_TURN = 4


class AccessLogMiddleware:
    """Puts `accounting` into the scope and passes it to `on_end`, in order, when the request has ended.

    The chunks of a stream do not pass through it.
    """

    def __init__(self, app: ASGIApp, on_end: Iterable[OnEnd]) -> None:
        self.app, self._on_end = app, tuple(on_end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        accounting = RequestAccounting(scope["method"], scope["path"], Headers(scope=scope), time.time())
        scope["accounting"] = accounting
        failed = True
        try:
            await self.app(scope, receive, send)
            failed = False
        finally:
            accounting.ended = time.time()
            accounting.id = str(scope.get("request_id", ""))
            if failed:  # an outer layer will answer the exception
                accounting.error = accounting.error or "server_error"
            accounting.status = accounting.status or (500 if failed else CLIENT_CLOSED_REQUEST)
            for on_end in self._on_end:
                on_end(accounting)


class ConcurrencyLimit:
    """Starts PER_TURN requests in each turn of the event loop, in their order of arrival.

    Parsing, rendering and tokenizing a request takes some 0.3 ms. Starting a whole burst in one turn would delay the
    tokens of running streams by that for each request; this way a token waits for PER_TURN requests at most.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._queue: deque[asyncio.Future[None]] = deque()
        self._free = PER_TURN  # in this turn
        self._scheduled = False  # the next turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._wait_for_turn()
        await self._app(scope, receive, send)

    async def _wait_for_turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next_turn)
        if self._free and not self._queue:
            self._free -= 1
            return
        turn = loop.create_future()
        self._queue.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._free = PER_TURN
        while self._free and self._queue:
            turn = self._queue.popleft()
            if not turn.done():  # else cancelled
                turn.set_result(None)
                self._free -= 1
        self._scheduled = bool(self._queue) or self._free < PER_TURN
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next_turn)
