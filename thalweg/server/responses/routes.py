"""OpenAI's Responses API: POST /v1/responses, GET and DELETE /v1/responses/{id}. An error names the client's field."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.engine.streams import Piece
from thalweg.server.chat import ChatConversion, prepare_chat, tool, tool_call
from thalweg.server.context import AppContext
from thalweg.server.errors import ApiError
from thalweg.server.generation import GenerationJob
from thalweg.server.parsing import convert
from thalweg.server.protocol import ChatRequest, ResponseFormat
from thalweg.server.responses.protocol import (
    CallItem,
    CallOutputItem,
    DeletedResponse,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponsesError,
    ResponsesOutput,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesTool,
    ResponsesUsage,
    Status,
    TextFormat,
)
from thalweg.server.stream import PartsEncoder, named_event, respond
from thalweg.text.events import Event, ParsedAnswer, Part, PartKind
from thalweg.text.parser import AnswerParser


def chat_of(body: ResponsesRequest, history: Sequence[dict[str, Any]], conversion: ChatConversion) -> ChatRequest:
    """history: the messages of the previous response. Raises InvalidRequest."""
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        name = "top_logprobs" if body.top_logprobs else "include"
        raise InvalidRequest(name, "log-probabilities are not supported here: /v1/chat/completions has them")
    if body.instructions:
        conversion.add("instructions", "system", content=body.instructions)
    conversion.messages += history
    conversion.fields += ["previous_response_id"] * len(history)
    if isinstance(body.input, str):
        conversion.add("input", "user", content=body.input)
    else:
        _add_items(body.input, conversion)
    return conversion.chat_request(
        body,
        max_tokens=body.max_output_tokens,
        stop=body.stop,
        tools=[_tool(entry, f"tools[{i}]") for i, entry in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs or {},
        response_format=_format(body.text.format) if body.text and body.text.format else None,
    )


def message_of(answer: ParsedAnswer) -> dict[str, Any]:
    """An answer as a message of the conversation that continues it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or ""}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.has_calls:  # one that broke off was never made
        message["tool_calls"] = [tool_call(c.id, c.name, c.arguments) for c in answer.calls if c.complete]
    return message


def _add_items(items: Sequence[dict[str, Any]], conversion: ChatConversion) -> None:
    """A thought, a text and calls in a row are one message of the assistant."""
    assistant: dict[str, Any] | None = None  # the message that items are added to

    def current(field: str) -> dict[str, Any]:
        nonlocal assistant
        if assistant is None:
            conversion.add(field, "assistant", content="")
            assistant = conversion.messages[-1]
        return assistant

    for i, item in enumerate(items):
        field = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                message = convert(item, MessageItem, field)
                if message.role != "assistant":
                    assistant = None
                    role = "system" if message.role == "developer" else message.role
                    conversion.add(field, role, content=message.content)
                    continue
                if assistant is not None and assistant["content"]:
                    assistant = None
                current(field)["content"] = message.content
            case "reasoning":
                texts = convert(item, ReasoningItem, field).content or ()
                current(field)["reasoning_content"] = "".join(text.text for text in texts)
            case "function_call":
                call = convert(item, CallItem, field)
                calls = current(field).setdefault("tool_calls", [])
                calls.append(tool_call(call.call_id, call.name, call.arguments))
            case "function_call_output":
                assistant, result = None, convert(item, CallOutputItem, field)
                conversion.add(field, "tool", tool_call_id=result.call_id, content=result.output)
            case kind:
                supported = "message, reasoning, function_call and function_call_output are supported here"
                raise InvalidRequest(f"{field}.type", f"is {kind!r}: {supported}")


def _tool(entry: ResponsesTool, field: str) -> dict[str, Any]:
    if entry.type != "function":
        raise InvalidRequest(f"{field}.type", f"is {entry.type!r}: only your own functions can be called here")
    return tool(name=entry.name, description=entry.description, parameters=entry.parameters, strict=entry.strict)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function"}:
            return {"type": "function", "function": {"name": choice.get("name")}}
        case {"type": "allowed_tools", "tools": list(tools)}:
            allowed = {"mode": choice.get("mode", "auto"), "tools": list(map(_function, tools))}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    message = f"is {choice.get('type')!r}; there is function, and allowed_tools with a list of tools"
    raise InvalidRequest("tool_choice.type", message)


def _function(choice: Any) -> Any:
    """A function's name in the chat API's form."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: TextFormat) -> ResponseFormat:
    schema = {"name": form.name or "answer", "schema": form.schema, "strict": form.strict}
    value = {"type": form.type} | ({"json_schema": schema} if form.type == "json_schema" else {})
    return convert(value, ResponseFormat, "text.format")


_PREFIXES = {PartKind.TEXT: "msg_", PartKind.REASONING: "rs_", PartKind.CALL: "fc_"}
_NAMES = {PartKind.TEXT: "output_text", PartKind.REASONING: "reasoning_text", PartKind.CALL: "function_call_arguments"}
_STATUSES: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}


class ResponsesStreamEncoder(PartsEncoder):
    def __init__(
        self,
        state: ResponsesResponse,
        parser: AnswerParser,
        count_tokens: Callable[[str], Awaitable[int]],
        store: Callable[[], None],
    ) -> None:
        """state: the response before the first token. count_tokens: of the reasoning. store: runs when it is done."""
        super().__init__(parser)
        self.state, self._count_tokens, self._store = state, count_tokens, store
        self._ids: list[str] = []
        self._sequence = 0

    def begin(self, piece: Piece) -> bytes:
        return b"".join(self._event(f"response.{name}", response=self.state) for name in ("created", "in_progress"))

    async def response(self, pieces: Sequence[Piece]) -> ResponsesResponse:
        await self.feed(pieces[0])
        return self.state

    def failed(self, info: ApiError) -> bytes:
        self.state.status, self.state.error = "failed", ResponsesError(info.message)
        self.state.output = [self._item(part, "incomplete") for part in self.parser.parts]
        return self._event("response.failed", response=self.state)

    async def finish(self, piece: Piece) -> bytes:
        reasoning_tokens = await self._count_tokens(self.parser.answer.reasoning or "")
        state, status = self.state, _STATUSES.get(piece.finish, "cancelled")
        state.status = status
        state.incomplete_details = IncompleteDetails() if status == "incomplete" else None
        state.output = [self._item(part) for part in self.parser.parts]
        if state.output and status != "completed":
            state.output[-1].status = "incomplete"
        state.usage = ResponsesUsage(
            piece.prompt_tokens,
            InputTokensDetails(piece.cached_tokens),
            piece.completion_tokens,
            OutputTokensDetails(reasoning_tokens),
            piece.prompt_tokens + piece.completion_tokens,
        )
        self._store()
        name = "response.completed" if self.state.status == "completed" else "response.incomplete"
        return self._event(name, response=self.state)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._sequence += 1
        return named_event(name, sequence_number=self._sequence - 1, **fields)

    def part_event(self, event: Event) -> bytes:
        part, name = event.part, f"response.{_NAMES[event.part.kind]}"
        logprobs = {"logprobs": ()} if part.kind is PartKind.TEXT else {}
        if event.type == "delta":
            return self._inner_event(part, f"{name}.delta", delta=event.text, **logprobs)
        if event.type == "open":
            self._ids.append(_PREFIXES[part.kind] + uuid.uuid4().hex)
            item = self._item(part, "in_progress")
            if isinstance(item, OutputCall):
                item.arguments = ""
            else:
                item.content = []
            added = self._event("response.output_item.added", output_index=part.index, item=item)
            return added + self._content_event("response.content_part.added", part, "")
        is_call = part.kind is PartKind.CALL
        value = {"name": part.name, "arguments": part.text} if is_call else {"text": part.text, **logprobs}
        done = self._inner_event(part, f"{name}.done", **value) if part.complete else b""
        done += self._content_event("response.content_part.done", part, part.text)
        item = self._item(part)
        return done + self._event("response.output_item.done", output_index=part.index, item=item)

    def _content_event(self, name: str, part: Part, text: str) -> bytes:
        if part.kind is PartKind.CALL:
            return b""
        content = OutputText(text) if part.kind is PartKind.TEXT else ReasoningText(text)
        return self._inner_event(part, name, part=content)

    def _inner_event(self, item: Part, event: str, /, **fields: Any) -> bytes:
        """An event about the content of an item."""
        place = {} if item.kind is PartKind.CALL else {"content_index": 0}
        return self._event(event, item_id=self._ids[item.index], output_index=item.index, **place, **fields)

    def _item(self, part: Part, status: Status | None = None) -> ResponsesOutput:
        id, status = self._ids[part.index], status or ("completed" if part.complete else "incomplete")
        match part.kind:
            case PartKind.TEXT:
                return OutputMessage(id, [OutputText(part.text)], status)
            case PartKind.REASONING:
                return OutputReasoning(id, [ReasoningText(part.text)], status)
        return OutputCall(id, part.id, part.name, part.text, status)


_CLIENT_FIELDS = {  # of the chat request's fields, in this API
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}


async def create_response(ctx: AppContext, request: Request, body: ResponsesRequest) -> Response:
    """OpenAI's Responses API: an answer to an input, and to the stored response that it continues."""
    model, conversion = ctx.model(body.model), ChatConversion("parameters", _CLIENT_FIELDS)
    history = _history(ctx, request, body.previous_response_id)
    chat = chat_of(body, history, conversion)
    job, new_parser = await prepare_chat(ctx, request, chat, conversion.client_field)
    parser, state = new_parser(), _initial(body, model, job)

    async def count_tokens(text: str) -> int:
        return len(await ctx.tokenize(text, False, "input"))

    def store() -> None:
        if state.store:
            messages = [*conversion.messages[bool(body.instructions) :], message_of(parser.answer)]
            ctx.store.put(_key(request, state.id), messages, msgspec.json.encode(state))

    encoder = ResponsesStreamEncoder(state, parser, count_tokens, store)
    return await respond(ctx, request, job, encoder, body.stream)


async def stored_response(ctx: AppContext, request: Request) -> Response:
    """A stored response."""
    id = request.path_params["id"]
    stored = ctx.store.get(_key(request, id))
    if stored is None:
        raise _not_stored(id, None)
    return Response(stored.body, media_type="application/json")


async def delete_response(ctx: AppContext, request: Request) -> DeletedResponse:
    """Deletes a stored response."""
    id = request.path_params["id"]
    if not ctx.store.remove(_key(request, id)):
        raise _not_stored(id, None)
    return DeletedResponse(id)


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
    return ApiError(404, message, "not_found_error", param, "response_not_found")


def _initial(body: ResponsesRequest, model: str, job: GenerationJob) -> ResponsesResponse:
    params, names = job.prompts[0].params, ResponsesResponse.__struct_fields__
    echoed = {name: value for name, value in structs.asdict(body).items() if name in names and value is not None}
    if body.text is None or body.text.format is None:
        echoed.pop("text", None)
    own = {"model": model, "temperature": params.temperature, "top_p": params.top_p, "background": False}
    own |= {"warnings": list(job.warnings)} if job.warnings else {}
    return ResponsesResponse(
        id=f"resp_{uuid.uuid4().hex}",  # not the request's id, which clients choose and others could guess
        created_at=int(job.accounting.began),
        **(echoed | own),
    )
