"""POST /v1/responses, GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.server.chat import prepare_chat
from thalweg.server.content_parts import PartBuilder
from thalweg.server.context import AppContext, reply
from thalweg.server.conversion import ChatConversion
from thalweg.server.errors import ApiError, ErrorInfo
from thalweg.server.generation import GenerationJob
from thalweg.server.parsing import given
from thalweg.server.responses.convert import chat_of, message_of
from thalweg.server.responses.protocol import (
    DeletedResponse,
    Reasoning,
    ResponsesRequest,
    ResponsesResponse,
    TextFormat,
    TextOptions,
)
from thalweg.server.responses.stream import ResponsesStreamEncoder
from thalweg.server.stream import respond

_NAMES = {  # of the chat request's fields, in this API
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}


async def create_response(ctx: AppContext, request: Request, body: ResponsesRequest) -> Response:
    """OpenAI's Responses API: an answer to an input, and to the stored response that it continues."""
    model, conversion = ctx.model(body.model), ChatConversion("parameters", _NAMES)
    history = _history(ctx, request, body.previous_response_id)
    chat = chat_of(body, history, conversion)
    job, new_parser = await prepare_chat(ctx, request, chat, conversion.client_field)
    answer, state = PartBuilder(new_parser()), _initial(body, model, job)

    async def count_tokens(text: str) -> int:
        return len(await ctx.tokenize(text, False, "input", ctx.ready.context))

    def store() -> None:
        if state.store:
            messages = [*conversion.messages[bool(body.instructions) :], message_of(answer)]
            ctx.store.put(_key(request, state.id), messages, msgspec.json.encode(state))

    encoder = ResponsesStreamEncoder(state, answer, count_tokens, store)
    return await respond(ctx, request, job, encoder, body.stream)


async def stored_response(ctx: AppContext, request: Request) -> Response:
    """A stored response."""
    id = request.path_params["id"]
    stored = ctx.store.get(_key(request, id))
    if stored is None:
        raise _not_stored(id, None)
    return Response(stored.body, media_type="application/json")


async def delete_response(ctx: AppContext, request: Request) -> Response:
    """Deletes a stored response."""
    id = request.path_params["id"]
    if not ctx.store.remove(_key(request, id)):
        raise _not_stored(id, None)
    return reply(DeletedResponse(id))


def _key(request: Request, id: str) -> str:
    scoped: str = request.scope["quota"].api_key.scoped_rid(id)
    return scoped


def _history(ctx: AppContext, request: Request, id: str | None) -> Sequence[dict[str, Any]]:
    if id is None:
        return ()
    stored = ctx.store.get(_key(request, id))
    if stored is None:
        raise _not_stored(id, "previous_response_id")
    return stored.messages


def _not_stored(id: str, param: str | None) -> ApiError:
    message = f"no response {id!r} is stored here: it was not stored, or later ones took its place"
    return ApiError(ErrorInfo(404, message, "not_found_error", param, "response_not_found"))


def _initial(body: ResponsesRequest, model: str, job: GenerationJob) -> ResponsesResponse:
    params = job.prompts[0].params
    return ResponsesResponse(
        id=f"resp_{uuid.uuid4().hex}",  # not the request's id, which clients choose and others could guess
        created_at=int(job.accounting.began),
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
