"""Responses, streamed or whole. Server-sent events go straight to ASGI's `send`: one task a request, no queue."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from thalweg.core.errors import ThalwegError
from thalweg.engine.streams import Piece
from thalweg.server.accounting import CLIENT_CLOSED_REQUEST, RequestAccounting
from thalweg.server.context import AppContext, reply
from thalweg.server.errors import ApiError, api_error
from thalweg.server.generation import GenerationJob, run
from thalweg.server.metrics import ServerMetrics
from thalweg.text.events import Event
from thalweg.text.parser import AnswerParser

EVENT_STREAM = [  # headers
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the chunks back
]


def named_event(name: str, /, **values: Any) -> bytes:
    """A server-sent event with a type, as typed APIs have them."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode({"type": name, **values}) + b"\n\n"


class StreamEncoder(ABC):
    """Writes the output of one request in the format of one API."""

    @abstractmethod
    async def feed(self, piece: Piece) -> bytes:
        """The events of a piece; empty while the parser holds its text back."""

    @abstractmethod
    async def response(self, pieces: Sequence[Piece]) -> object:
        """The whole response. pieces: one for each choice."""

    def end(self) -> bytes:
        """The last events of a stream."""
        return b"data: [DONE]\n\n"

    def failed(self, info: ApiError) -> bytes:
        """The last events of a stream that an error ended."""
        return b"data: " + info.body + b"\n\n"


class PartsEncoder(StreamEncoder):
    """Writes one answer as its typed parts. parser: of this answer alone."""

    def __init__(self, parser: AnswerParser) -> None:
        self.parser = parser
        self._begun = False

    @abstractmethod
    def begin(self, piece: Piece) -> bytes:
        """The first events of a stream."""

    @abstractmethod
    def part_event(self, event: Event) -> bytes: ...

    @abstractmethod
    async def finish(self, piece: Piece) -> bytes:
        """The last events of a stream."""

    async def feed(self, piece: Piece) -> bytes:
        out = b"" if self._begun else self.begin(piece)
        self._begun = True
        out += b"".join(map(self.part_event, self.parser.feed(piece.text, piece.finish)))
        return out if piece.finish is None else out + await self.finish(piece)

    def end(self) -> bytes:
        return b""


@asynccontextmanager
async def cancelled_on_disconnect(
    receive: Receive, accounting: RequestAccounting, metrics: ServerMetrics
) -> AsyncIterator[None]:
    """Cancels the block when the client goes away; then `accounting.gone` is set.

    The request's body must have been read: other messages from `receive` are dropped.
    """
    task = asyncio.current_task()
    assert task is not None, "needs a task to cancel"

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        accounting.gone = True
        metrics.disconnects += 1
        task.cancel()

    listener = asyncio.create_task(listen())
    try:
        yield
    except asyncio.CancelledError:
        if not accounting.gone:
            raise
        task.uncancel()
    finally:
        listener.cancel()


async def respond(
    ctx: AppContext, request: Request, job: GenerationJob, encoder: StreamEncoder, stream: bool | None
) -> Response:
    """Runs the job and answers with a stream or with one response."""
    if stream:
        return EventStream(ctx, job, encoder)
    pieces: list[list[Piece]] = [[] for _ in range(job.choices)]
    async with cancelled_on_disconnect(request.receive, job.accounting, ctx.metrics):
        async for piece in run(ctx, job):
            pieces[piece.index].append(piece)
    if job.accounting.gone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    response = reply(await encoder.response([_merged(of_choice) for of_choice in pieces]))
    response.headers.update(job.headers)
    return response


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
        """send: through all layers, for status and headers; `send_chunk`: the server's own, for the chunks."""
        job, send_chunk, emit = self.job, scope["send_chunk"], self.ctx.metrics.emit
        job.accounting.stream = True
        started, held, held_at = False, b"", 0.0

        async def write(body: bytes, at: float, more: bool) -> None:
            """at: time.time() at which the engine had the events."""
            nonlocal started
            if not started:
                started = True
                own = [(name.encode(), value.encode()) for name, value in job.headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *own]})
            await send_chunk({"type": "http.response.body", "body": body, "more_body": more})
            if at:
                emit.observe(time.time() - at)

        last = b""
        async with cancelled_on_disconnect(receive, job.accounting, self.ctx.metrics):
            try:
                async with aclosing(run(self.ctx, job)) as pieces:
                    async for piece in pieces:
                        events = await self.encoder.feed(piece)
                        if events and piece.finish is not None and job.choices == 1:
                            held, held_at = events, piece.at  # sent with the end, in one packet
                        elif events:
                            await write(events, piece.at, True)
                last = self.encoder.end()
            except ThalwegError as error:
                if not started and not held:
                    raise
                info = api_error(error)
                job.accounting.error = info.kind
                last = self.encoder.failed(info)
        if not job.accounting.gone:
            await write(held + last, held_at, False)
