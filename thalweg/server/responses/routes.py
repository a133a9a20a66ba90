"""POST /v1/responses, GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Piece
from thalweg.server.chat import prepare
from thalweg.server.context import AppContext, collect, gone, quota_of, reply, run
from thalweg.server.conversion import ChatConversion
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.parsing import read
from thalweg.server.responses.convert import chat_of, message_of
from thalweg.server.responses.protocol import (
    Deleted,
    Reasoning,
    ResponseAnswer,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from thalweg.server.responses.stream import ResponsesStreamEncoder
from thalweg.server.sampling import given
from thalweg.server.stream import EventStream, EventWriter

_decoder = msgspec.json.Decoder(ResponsesRequest)
_NAMES = {  # of the chat request's fields, in this API
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}


async def respond(ctx: AppContext, request: Request) -> Response:
    """OpenAI's Responses API: an answer to an input and to what went before it."""
    started = time.time()
    body = read(await request.body(), _decoder)
    model, conversion, mark = (
        ctx.model(body.model),
        ChatConversion("parameters", _NAMES),
        quota_of(request).api_key.mark,
    )
    before = _before(ctx, mark, body.previous_response_id)
    chat = chat_of(body, before, conversion)
    with conversion.named():
        turn = await prepare(ctx, chat, request, started)
    narrator = ResponsesStreamEncoder(_response(body, model, turn.params, int(started)), turn.parser())
    spoken = conversion.messages[1:] if body.instructions else conversion.messages

    async def end(piece: Piece) -> None:
        narrator.end(piece, len(await ctx.tokens(narrator.thought, False, "input", ctx.context)))
        if narrator.response.store:
            messages = [*spoken, message_of(narrator.parts)]
            ctx.store.put(mark(narrator.response.id), messages, msgspec.json.encode(narrator.response))

    async def stream(writer: EventWriter) -> None:
        async def take(choice: int, piece: Piece) -> None:
            events = narrator.feed(piece)
            if piece.finish is not None:
                await end(piece)
                events += narrator.last()
            if events:
                await writer.write(events, piece.at)

        with conversion.named():
            await run(ctx, turn.job, take)

    if body.stream:
        return EventStream(ctx.metrics, stream, done=b"", failed=narrator.failed)
    with conversion.named():
        ended = await collect(ctx, turn.job, request.receive)
    if ended is None:
        return gone()
    narrator.take(ended[0])
    await end(ended[0])
    return reply(narrator.response)


async def kept_response(ctx: AppContext, request: Request) -> Response:
    """A response that is kept."""
    id = request.path_params["id"]
    kept = ctx.store.get(quota_of(request).api_key.mark(id))
    if kept is None:
        raise _unknown(id, None)
    return Response(kept.body, media_type="application/json")


async def forget_response(ctx: AppContext, request: Request) -> Response:
    """Forgets a response that is kept."""
    id = request.path_params["id"]
    if not ctx.store.remove(quota_of(request).api_key.mark(id)):
        raise _unknown(id, None)
    return reply(Deleted(id))


def _before(ctx: AppContext, mark: Callable[[str], str], id: str | None) -> Sequence[dict[str, Any]]:
    if id is None:
        return ()
    kept = ctx.store.get(mark(id))
    if kept is None:
        raise _unknown(id, "previous_response_id")
    return kept.messages


def _unknown(id: str, param: str | None) -> ApiError:
    message = f"no response {id!r} is kept here: it was not stored, or has made room for later ones"
    return ApiError(ErrorInfo(404, message, "not_found_error", param, "response_not_found"))


def _response(body: ResponsesRequest, model: str, params: SamplingParams, created: int) -> ResponseAnswer:
    return ResponseAnswer(
        id=f"resp_{uuid.uuid4().hex}",  # not the request's id, which clients choose and others could guess
        created_at=created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=given(body.reasoning, Reasoning()),
        store=body.store is not False,
        temperature=params.temperature,
        text=body.text if body.text and body.text.format else TextOptions(format=TextFormat(type="text")),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=given(body.tools, []),
        top_p=params.top_p,
        truncation=given(body.truncation, "disabled"),
        user=body.user,
        metadata=given(body.metadata, {}),
    )
