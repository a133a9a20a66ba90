"""Responses, streamed or whole. Server-sent events go straight to ASGI's `send`: one task a request, no queue.

`DisconnectWatch` notices a client that goes away while its request waits or streams.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from thalweg.core.errors import ThalwegError
from thalweg.engine.streams import Piece
from thalweg.server.accounting import CLIENT_CLOSED_REQUEST, RequestAccounting
from thalweg.server.context import AppContext, reply
from thalweg.server.errors import ErrorInfo, error_info
from thalweg.server.generation import GenerationJob, run
from thalweg.server.metrics import ServerMetrics

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the chunks back
]


class StreamEncoder(ABC):
    """Writes the output of one request in the format of one API."""

    @abstractmethod
    async def feed(self, choice: int, piece: Piece) -> bytes:
        """The events of a piece; empty while the parser holds its text back."""

    @abstractmethod
    async def response(self, pieces: Sequence[Piece]) -> object:
        """The whole response. pieces: one for each choice."""

    def end(self) -> bytes:
        """The last events of a stream."""
        return b"data: [DONE]\n\n"

    def failed(self, info: ErrorInfo) -> bytes:
        """The last events of a stream that an error ended."""
        return b"data: " + info.body + b"\n\n"


class DisconnectWatch:
    """`async with DisconnectWatch(...) as watch:` cancels the block when the client goes away; `watch.gone` tells so.

    The request's body must have been read: whatever else comes from `receive` is dropped.
    """

    def __init__(self, receive: Receive, accounting: RequestAccounting, metrics: ServerMetrics) -> None:
        self.gone = False
        self._receive, self._accounting, self._metrics = receive, accounting, metrics

    async def __aenter__(self) -> DisconnectWatch:
        task = asyncio.current_task()
        assert task is not None, "DisconnectWatch needs a task to cancel"
        self._task = task
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._listener.cancel()
        if self.gone:
            self._accounting.gone = True
            self._metrics.disconnects += 1
            if kind is asyncio.CancelledError:
                self._task.uncancel()
                return True
        return False

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()


async def respond(
    ctx: AppContext, request: Request, job: GenerationJob, encoder: StreamEncoder, stream: bool | None
) -> Response:
    """Runs the job and answers with a stream or with one response."""
    if stream:
        return EventStream(ctx, job, encoder)
    pieces: list[list[Piece]] = [[] for _ in range(job.choices)]

    async def take(choice: int, piece: Piece) -> None:
        pieces[choice].append(piece)

    async with DisconnectWatch(request.receive, job.accounting, ctx.metrics) as watch:
        await run(ctx, job, take)
    if watch.gone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return reply(await encoder.response([_merged(of_choice) for of_choice in pieces]))


def _merged(pieces: Sequence[Piece]) -> Piece:
    return msgspec.structs.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        ids=tuple(token for piece in pieces for token in piece.ids),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        prompt_logprobs=pieces[0].prompt_logprobs,
    )


class EventStream(Response):
    """Streams until the job ends, fails or the client goes away.

    The status is sent with the first event: an error before it still has a status of its own, a later one becomes the
    stream's last event.
    """

    def __init__(self, ctx: AppContext, job: GenerationJob, encoder: StreamEncoder) -> None:
        self.ctx, self.job, self.encoder = ctx, job, encoder
        self.status_code, self.background = 200, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.job.accounting.stream = True
        writer = _EventWriter(send, scope["send_chunk"], self.ctx.metrics)

        async def take(choice: int, piece: Piece) -> None:
            if events := await self.encoder.feed(choice, piece):
                await writer.write(events, piece.at, piece.finish is not None and self.job.choices == 1)

        async with DisconnectWatch(receive, self.job.accounting, self.ctx.metrics) as watch:
            try:
                await run(self.ctx, self.job, take)
                last = self.encoder.end()
            except ThalwegError as error:
                if not writer.started:
                    raise
                info = error_info(error)
                self.job.accounting.error = info.kind
                last = self.encoder.failed(info)
        if not watch.gone:
            await writer.end(last)


class _EventWriter:
    """start: ASGI's `send` through all layers, for status and headers; send: the server's own, for the chunks."""

    def __init__(self, start: Send, send: Send, metrics: ServerMetrics) -> None:
        self.started = self._sent_header = False
        self._start, self._send, self._emit = start, send, metrics.emit
        self._held, self._held_at = b"", 0.0

    async def write(self, events: bytes, at: float, hold: bool) -> None:
        """Sends events. at: time.time() at which the engine had them. hold: send them with `end`, in one packet."""
        self.started = True
        if hold:
            self._held, self._held_at = events, at
        else:
            await self._write(events, at, True)

    async def end(self, events: bytes) -> None:
        await self._write(self._held + events, self._held_at, False)

    async def _write(self, body: bytes, at: float, more: bool) -> None:
        if not self._sent_header:
            self._sent_header = True
            await self._start({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        if at:
            self._emit.observe(time.time() - at)
