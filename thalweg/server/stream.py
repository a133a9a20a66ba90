"""Server-sent events straight onto ASGI's `send`: one task a request, no task, queue or pydantic model a token.

A client that goes away is noticed while its request waits as well as while it streams: `Hangup` listens beside the
work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from thalweg.core.errors import ThalwegError
from thalweg.server.errors import ErrorInfo, error_info
from thalweg.server.metrics import ServerMetrics

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the chunks back
]
DONE = b"data: [DONE]\n\n"


class DisconnectWatch:
    """`async with Hangup(receive) as hangup:` cancels the block when the client goes away; `hangup.gone` says so
    afterwards.

    The request's body must have been read: whatever else comes from `receive` is dropped.
    """

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive

    async def __aenter__(self) -> DisconnectWatch:
        task = asyncio.current_task()
        assert task is not None, "Hangup needs a task to cancel"
        self._task = task
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._listener.cancel()
        if self.gone and kind is asyncio.CancelledError:
            self._task.uncancel()
            return True
        return False

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()


class EventWriter:
    """Writes the chunks of one answer. The response starts with the first chunk, so what fails before it still has a
    status of its own.

    start: ASGI's send with all layers, for the status and headers; send: the one without, for the chunks.
    """

    __slots__ = ("_begun", "_start", "_send", "_emit", "_held", "_ages")

    def __init__(self, start: Send, send: Send, metrics: ServerMetrics) -> None:
        self._begun = False
        self._start, self._send = start, send
        self._emit = metrics.emit
        self._held: list[bytes] = []
        self._ages: list[float] = []  # when the engine had what is held

    @property
    def started(self) -> bool:
        """An event was written, or is held: what fails now is told on the stream."""
        return self._begun or bool(self._held)

    async def write(self, payload: bytes, at: float) -> None:
        """Sends whole events. at: when (time.time()) the engine had what they say."""
        if self._held:
            self._held.append(payload)
            self._ages.append(at)
            return await self._flush(b"", True)
        if not self._begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": payload, "more_body": True})
        self._emit.observe(time.time() - at)

    def hold(self, payload: bytes, at: float | None = None) -> None:
        """Keeps whole events for whoever writes next. For what comes right before `end`: so a stream ends in one
        packet, not in three. at: as for `write`; None for what the engine did not say.
        """
        self._held.append(payload)
        if at is not None:
            self._ages.append(at)

    async def end(self, payload: bytes) -> None:
        await self._flush(payload, False)

    async def _begin(self) -> None:
        self._begun = True
        await self._start({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    async def _flush(self, payload: bytes, more: bool) -> None:
        if not self._begun:
            await self._begin()
        body, ages = b"".join((*self._held, payload)), self._ages
        self._held, self._ages = [], []
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        now = time.time()
        for at in ages:
            self._emit.observe(now - at)


def openai_error(problem: ErrorInfo) -> bytes:
    return b"data: " + problem.body + b"\n\n"


class EventStream(Response):
    """Runs `work`, which writes events, until it ends, fails or the client goes away. An error on a running stream
    becomes its last event.

    done: the stream's last words. failed: writes an error's event.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        work: Callable[[EventWriter], Awaitable[None]],
        done: bytes = DONE,
        failed: Callable[[ErrorInfo], bytes] = openai_error,
    ) -> None:
        self.metrics, self.work, self.done, self.failed = metrics, work, done, failed
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["accounting"].stream = True
        writer = EventWriter(send, scope["send_chunk"], self.metrics)
        last = self.done
        async with DisconnectWatch(receive) as hangup:
            try:
                await self.work(writer)
            except ThalwegError as error:
                if not writer.started:
                    raise
                problem = error_info(error)
                scope["accounting"].error = problem.kind
                last = self.failed(problem)
        if hangup.gone:
            scope["accounting"].gone = True
            self.metrics.disconnects += 1
        else:
            await writer.end(last)
