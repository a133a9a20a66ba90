"""OpenAI's Responses API: the routes under /v1/responses. An error names the client's field."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.server.chat import ChatConversion, prepare_chat, render
from thalweg.server.context import AppContext, reply
from thalweg.server.errors import ApiError, too_many_requests
from thalweg.server.generation import GenerationJob
from thalweg.server.parsing import renamed
from thalweg.server.responses.background import BackgroundRun, FollowStream
from thalweg.server.responses.encoder import MessageLogprobs, ResponsesStreamEncoder, message_of
from thalweg.server.responses.items import (
    CLIENT_FIELDS,
    chat_of,
    custom_names,
    input_grammars,
    lark_inputs,
    listed,
)
from thalweg.server.responses.protocol import (
    DeletedResponse,
    InputItemsQuery,
    InputTokens,
    ResponseItems,
    ResponseQuery,
    ResponsesError,
    ResponsesInput,
    ResponsesRequest,
    ResponsesResponse,
)
from thalweg.server.responses.store import ResponseRun, StoredResponse
from thalweg.server.stream import respond


async def create_response(ctx: AppContext, request: Request, body: ResponsesRequest) -> Response:
    """OpenAI's Responses API: an answer to an input, and to the stored response that it continues."""
    model, conversion = ctx.model(body.model), ChatConversion("parameters", CLIENT_FIELDS)
    _check_background(ctx, body)
    before = _previous(ctx, request, body.previous_response_id)
    chat = chat_of(body, before.messages or (), conversion)
    for grammar in input_grammars(body.tools):
        await ctx.grammar_checker.check(grammar)
    job, new_parser = await prepare_chat(ctx, request, chat, conversion.client_field, lark=lark_inputs(body.tools))
    parser, state = new_parser(), _initial(body, model, job)
    tokenizer = ctx.front.tokenizer
    logprobs = MessageLogprobs(tokenizer, body.top_logprobs or 0) if chat.logprobs else None
    names = custom_names(body.tools)

    async def count_tokens(text: str) -> int:
        return len(await ctx.tokenize(text, False, "input"))

    encoder = ResponsesStreamEncoder(state, parser, count_tokens, names, logprobs)
    if not state.store:
        return await respond(ctx, request, job, encoder, body.stream)
    key = _key(request, state.id)
    messages = conversion.messages[bool(body.instructions) :]
    items = [*before.items, *_output(before.body), *listed(body.input)]

    def stored(run: ResponseRun | None) -> StoredResponse:
        ended = [*messages, message_of(parser.answer)] if state.status != "failed" else None
        events = sum(map(len, run.events or ())) if run is not None else 0
        return StoredResponse(ended, items, msgspec.json.encode(state), run, events)

    if not body.background:
        encoder.on_end = lambda: state.status == "failed" or ctx.store.put(key, stored(None))
        return await respond(ctx, request, job, encoder, body.stream)
    run = BackgroundRun(state, lambda extra: ctx.store.grow(key, extra), bool(body.stream))
    encoder.on_end = lambda: _finish(ctx, key, state, lambda: stored(run))
    if not ctx.store.put(key, StoredResponse(None, items, b"", run)):
        message = "the responses that run in the background leave no room for another: try again later"
        raise too_many_requests(message, "stored_responses_full")
    run.start(ctx, job, encoder)
    if body.stream:
        return FollowStream(ctx, run, 0)
    response = reply(state)
    response.headers.update(job.headers)
    return response


def _check_background(ctx: AppContext, body: ResponsesRequest) -> None:
    """Raises InvalidRequest."""
    if body.background and body.store is False:
        raise InvalidRequest("background", "needs a stored response: leave store out")
    if body.background and not ctx.store.count:
        raise InvalidRequest("background", "needs a server that stores responses: --max-stored-responses is 0")


def _finish(ctx: AppContext, key: str, state: ResponsesResponse, stored: Callable[[], StoredResponse]) -> None:
    """Stores what a background response has become, unless it was deleted. One without room fails."""
    if ctx.store.get(key) is None or ctx.store.put(key, stored()):
        return
    state.status, state.output, state.completed_at = "failed", [], None
    state.error = ResponsesError("it has no room: --max-stored-response-bytes is the limit of all stored responses")
    if not ctx.store.put(key, replace(stored(), items=(), extra=0)):
        ctx.store.remove(key)


async def count_input_tokens(ctx: AppContext, request: Request, body: ResponsesInput) -> InputTokens:
    """The number of prompt tokens of a response's input."""
    ctx.model(body.model)
    conversion = ChatConversion("parameters", CLIENT_FIELDS)
    chat = chat_of(body, _previous(ctx, request, body.previous_response_id).messages or (), conversion)
    with renamed(conversion.client_field):
        _, ids, _ = await render(ctx, chat)
    return InputTokens(len(ids))


async def stored_response(ctx: AppContext, request: Request, query: ResponseQuery) -> Response:
    """A stored response, or the events of one that was created in the background as a stream."""
    stored = _stored(ctx, request)
    if query.stream == "false":
        return _as_json(stored)
    if stored.run is None or stored.run.events is None:
        raise InvalidRequest("stream", "is for responses that were created with background and stream")
    return FollowStream(ctx, stored.run, 0 if query.starting_after is UNSET else query.starting_after + 1)


async def cancel_response(ctx: AppContext, request: Request) -> Response:
    """Ends a background response. One that has ended stays as it is."""
    stored = _stored(ctx, request)
    if stored.run is None:
        message = f"response {request.path_params['id']!r} was not created with background: true"
        raise ApiError(400, message, code="not_in_background")
    await stored.run.stop()
    return _as_json(ctx.store.get(_key(request, request.path_params["id"])) or stored)


async def delete_response(ctx: AppContext, request: Request) -> DeletedResponse:
    """Deletes a stored response. One that runs in the background ends."""
    id, stored = request.path_params["id"], _stored(ctx, request)
    ctx.store.remove(_key(request, id))
    if stored.run is not None:
        await stored.run.stop()
    return DeletedResponse(id)


async def input_items(ctx: AppContext, request: Request, query: InputItemsQuery) -> ResponseItems:
    """The items that a stored response was made from, those of the responses before it too."""
    items = [(msgspec.json.decode(item, type=_ItemId).id, msgspec.Raw(item)) for item in _stored(ctx, request).items]
    if query.order == "desc":
        items.reverse()
    start = 0
    if query.after is not UNSET:
        start = next((i + 1 for i, (id, _) in enumerate(items) if id == query.after), 0)
        if not start:
            raise InvalidRequest("after", f"is {query.after!r}, which is none of the items")
    page = items[start : start + query.limit]
    first, last = (page[0][0], page[-1][0]) if page else (None, None)
    return ResponseItems([item for _, item in page], first, last, start + len(page) < len(items))


class _ItemId(msgspec.Struct):
    id: str


class _Output(msgspec.Struct):
    output: list[msgspec.Raw] = []


def _output(body: bytes) -> list[bytes]:
    """The output items of a stored response."""
    return [bytes(item) for item in msgspec.json.decode(body or b"{}", type=_Output).output]


def _as_json(stored: StoredResponse) -> Response:
    body = stored.run.response() if stored.run is not None and stored.is_running else stored.body
    return Response(body, media_type="application/json")


def _key(request: Request, id: str) -> str:
    scoped: str = request.scope["quota"].api_key.scoped_rid(id)
    return scoped


def _stored(ctx: AppContext, request: Request) -> StoredResponse:
    id = request.path_params["id"]
    stored = ctx.store.get(_key(request, id))
    if stored is None:
        raise _not_stored(id, None)
    return stored


def _previous(ctx: AppContext, request: Request, id: str | None) -> StoredResponse:
    """The response that a request continues. Raises ApiError (404), InvalidRequest."""
    if id is None:
        return StoredResponse(())
    stored = ctx.store.get(_key(request, id))
    if stored is None:
        raise _not_stored(id, "previous_response_id")
    if stored.messages is None:
        state = "still runs" if stored.is_running else "has failed"
        raise InvalidRequest("previous_response_id", f"is {id!r}, which {state}")
    return stored


def _not_stored(id: str, param: str | None) -> ApiError:
    message = f"no response {id!r} is stored here: it was not stored, or later ones took its place"
    return ApiError(404, message, "not_found_error", param, "response_not_found")


def _initial(body: ResponsesRequest, model: str, job: GenerationJob) -> ResponsesResponse:
    params, names = job.prompts[0].params, ResponsesResponse.__struct_fields__
    echoed = {name: value for name, value in structs.asdict(body).items() if name in names and value is not None}
    if body.text is None or body.text.format is None:
        echoed.pop("text", None)
    own: dict[str, Any] = {"model": model, "temperature": params.temperature, "top_p": params.top_p}
    own |= {"warnings": list(job.warnings)} if job.warnings else {}
    return ResponsesResponse(
        id=f"resp_{uuid.uuid4().hex}",  # not the request's id, which clients choose and others could guess
        created_at=int(job.accounting.began),
        **(echoed | own),
    )
