"""Background responses: generated without their client, who fetches them or follows their events later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from thalweg.core.errors import ThalwegError
from thalweg.core.logs import fields
from thalweg.engine.streams import Piece
from thalweg.server.context import AppContext
from thalweg.server.errors import ApiError, api_error
from thalweg.server.generation import GenerationJob, run
from thalweg.server.responses.encoder import ResponsesStreamEncoder
from thalweg.server.responses.protocol import ResponsesResponse
from thalweg.server.responses.store import ResponseRun
from thalweg.server.stream import EVENT_STREAM, cancelled_on_disconnect

log = logging.getLogger("thalweg.server")
GROWTH = 1 << 16  # bytes of events for which room is made at a time


class BackgroundRun:
    """The generation of one background response. Its HTTP request is accounted for until it ends."""

    def __init__(self, state: ResponsesResponse, make_room: Callable[[int], bool], keeps_events: bool) -> None:
        """make_room: for more bytes of events; False where there is none."""
        self._state, self._make_room = state, make_room
        self._events: list[bytes] | None = [] if keeps_events else None
        self.done = False
        self._news = asyncio.Event()
        self._room = 0  # bytes of events that there is room for
        self._reason: str | None = None  # why it was stopped
        self._task: asyncio.Task[None] | None = None

    @property
    def events(self) -> Sequence[bytes] | None:
        return self._events

    def start(self, ctx: AppContext, job: GenerationJob, encoder: ResponsesStreamEncoder) -> None:
        """Called once it is stored."""
        self._add(encoder.queued())
        job.accounting.work = self._task = asyncio.create_task(self._run(ctx, job, encoder))

    def response(self) -> bytes:
        return msgspec.json.encode(self._state)

    async def stop(self, reason: str = "") -> None:
        assert self._task is not None, "it was started"
        if not self.done and self._reason is None:
            await asyncio.sleep(0)  # a task that has not begun would end without its last events
            self._reason = reason
            self._task.cancel()
        await asyncio.wait({self._task})

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from this sequence number on, until the last."""
        assert self._events is not None, "they are kept"
        while True:
            news, events = self._news, self._events[start:]
            if events:
                start += len(events)
                yield b"".join(events)
            elif self.done:
                return
            else:
                await news.wait()

    async def _run(self, ctx: AppContext, job: GenerationJob, encoder: ResponsesStreamEncoder) -> None:
        last: Piece | None = None
        try:
            try:
                async with aclosing(run(ctx, job)) as pieces:
                    async for piece in pieces:
                        last = piece
                        self._add(await encoder.feed(piece))
            except asyncio.CancelledError:
                if self._reason is None:
                    raise
                if self._reason:
                    raise ApiError(503, self._reason, "service_unavailable_error") from None
                self._add(encoder.cancelled() if last is None else await encoder.feed(_aborted(last)))
        except Exception as error:
            info = api_error(error)
            job.accounting.error = info.kind
            if not isinstance(error, ApiError | ThalwegError):
                log.error("failed", exc_info=error, extra=fields(id=job.accounting.id))
            self._room = 1 << 62  # for the last event
            self._add(encoder.failed(info))
        finally:
            self.done = True
            self._news.set()

    def _add(self, chunk: bytes) -> None:
        """Appends events, of which each has its own entry. Raises ApiError where there is no room for them."""
        if self._events is None or not chunk:
            return
        self._room -= len(chunk)
        if self._room < 0:
            growth = max(GROWTH, -self._room)
            if self._reason is None and not self._make_room(growth):
                message = "its events have no room: --max-stored-response-bytes is the limit of all stored responses"
                raise ApiError(500, message, "server_error", code="stored_responses_full")
            self._room += growth
        self._events += [event + b"\n\n" for event in chunk.split(b"\n\n")[:-1]]
        self._news.set()
        self._news = asyncio.Event()


def _aborted(piece: Piece) -> Piece:
    return msgspec.structs.replace(piece, text="", ids=(), logprobs=(), finish="abort")


class FollowStream(Response):
    """Streams the events of a background response, which goes on when the client leaves."""

    def __init__(self, ctx: AppContext, followed: ResponseRun, start: int) -> None:
        self._ctx, self._followed, self._start = ctx, followed, start
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accounting, send_chunk = scope["accounting"], scope["send_chunk"]
        accounting.stream = True
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        async with cancelled_on_disconnect(receive, accounting, self._ctx.metrics):
            async for events in self._followed.follow(self._start):
                await send_chunk({"type": "http.response.body", "body": events, "more_body": True})
        if not accounting.gone:
            await send_chunk({"type": "http.response.body", "body": b"", "more_body": False})
