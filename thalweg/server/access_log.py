"""The layer around the gate: opens the account of each request, and tells it to the log and the traces when the request
has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from thalweg.server.accounting import RequestAccounting, Teller

GONE = 499  # nginx's status for a client that went away


class AccessLogMiddleware:
    """Everything inside finds `account` in the scope. It stands beside the path of an answer's chunks, not on it.
    tellers: in order.
    """

    def __init__(self, app: ASGIApp, tellers: Iterable[Teller]) -> None:
        self.app, self._tellers = app, tuple(tellers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        accounting = RequestAccounting(scope["method"], scope["path"], Headers(scope=scope), time.time())
        scope["accounting"] = accounting
        broken = True
        try:
            await self.app(scope, receive, send)
            broken = False
        finally:
            accounting.ended = time.time()
            accounting.id = str(scope.get("request_id", ""))
            if broken:  # the error is on its way out to the layer that answers it
                accounting.error = accounting.error or "server_error"
            accounting.status = accounting.status or (500 if broken else GONE)
            for tell in self._tellers:
                tell(accounting)
