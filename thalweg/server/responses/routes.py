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
from thalweg.server.chat import prepare
from thalweg.server.contract import Piece
from thalweg.server.desk import Desk, allowance_of, collect, gone, reply, run
from thalweg.server.draft import Draft
from thalweg.server.errors import ApiError, Problem
from thalweg.server.reading import read
from thalweg.server.responses.convert import chat_of, message_of
from thalweg.server.responses.events import Narrator
from thalweg.server.responses.protocol import (
    Deleted,
    Reasoning,
    ResponseAnswer,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from thalweg.server.sampling import given
from thalweg.server.stream import EventStream, Writer

_decoder = msgspec.json.Decoder(ResponsesRequest)
_NAMES = {  # of the chat request's fields, in this API
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}


async def respond(desk: Desk, request: Request) -> Response:
    """OpenAI's Responses API: an answer to an input and to what went before it."""
    started = time.time()
    body = read(await request.body(), _decoder)
    model, draft, mark = desk.model(body.model), Draft("parameters", _NAMES), allowance_of(request).tenant.mark
    before = _before(desk, mark, body.previous_response_id)
    chat = chat_of(body, before, draft)
    with draft.named():
        turn = await prepare(desk, chat, request, started)
    narrator = Narrator(_response(body, model, turn.params, int(started)), turn.parser())
    spoken = draft.messages[1:] if body.instructions else draft.messages

    async def end(piece: Piece) -> None:
        narrator.end(piece, len(await desk.tokens(narrator.thought, False, "input", desk.context)))
        if narrator.response.store:
            messages = [*spoken, message_of(narrator.parts)]
            desk.shelf.put(mark(narrator.response.id), messages, msgspec.json.encode(narrator.response))

    async def stream(writer: Writer) -> None:
        async def take(choice: int, piece: Piece) -> None:
            events = narrator.feed(piece)
            if piece.finish is not None:
                await end(piece)
                events += narrator.last()
            if events:
                await writer.write(events, piece.at)

        with draft.named():
            await run(desk, turn.job, take)

    if body.stream:
        return EventStream(desk.meters, stream, done=b"", failed=narrator.failed)
    with draft.named():
        ended = await collect(desk, turn.job, request.receive)
    if ended is None:
        return gone()
    narrator.take(ended[0])
    await end(ended[0])
    return reply(narrator.response)


async def kept_response(desk: Desk, request: Request) -> Response:
    """A response that is kept."""
    id = request.path_params["id"]
    kept = desk.shelf.get(allowance_of(request).tenant.mark(id))
    if kept is None:
        raise _unknown(id, None)
    return Response(kept.body, media_type="application/json")


async def forget_response(desk: Desk, request: Request) -> Response:
    """Forgets a response that is kept."""
    id = request.path_params["id"]
    if not desk.shelf.remove(allowance_of(request).tenant.mark(id)):
        raise _unknown(id, None)
    return reply(Deleted(id))


def _before(desk: Desk, mark: Callable[[str], str], id: str | None) -> Sequence[dict[str, Any]]:
    if id is None:
        return ()
    kept = desk.shelf.get(mark(id))
    if kept is None:
        raise _unknown(id, "previous_response_id")
    return kept.messages


def _unknown(id: str, param: str | None) -> ApiError:
    message = f"no response {id!r} is kept here: it was not stored, or has made room for later ones"
    return ApiError(Problem(404, message, "not_found_error", param, "response_not_found"))


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
