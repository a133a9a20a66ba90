"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Undeclared fields of bodies are ignored; a null means "not given". An error names the field as the client wrote it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.engine.streams import Piece
from thalweg.server.chat import ChatConversion, prepare_chat, render, tool, tool_call
from thalweg.server.context import AppContext
from thalweg.server.errors import ApiError
from thalweg.server.generation import GenerationJob
from thalweg.server.parsing import renamed
from thalweg.server.protocol import ChatRequest, ResponseFormat
from thalweg.server.refused import RefusedFields
from thalweg.server.stream import PartsEncoder, named_event, respond
from thalweg.text.events import Event, Part, PartKind
from thalweg.text.parser import AnswerParser
from thalweg.text.partial_json import whole_members


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """Decoded so that it can be refused by name."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """Decoded so that it can be refused by name."""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None  # not checked


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Another model's encrypted thought: left out."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None  # "custom" or nothing; tools that run on Anthropic's servers are refused
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None  # calls match the schema also with tool_choice auto, and all of it is enforced


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the tool, with type "tool"
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None  # tokens after which the thought is ended
    display: Literal["summarized", "omitted"] | None = None  # "omitted": the thought comes as its signature alone


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str  # "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    format: OutputFormat | None = None  # of the answer's text
    effort: str | None = None  # "none" turns thinking off, any other on; templates with levels read it


class Conversation(RefusedFields, kw_only=True):
    """POST /v1/messages/count_tokens, and the part of /v1/messages that makes the prompt."""

    REFUSED = ("mcp_servers", "container", "thread")

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None  # of messages that the server keeps
    output_config: OutputConfig | None = None
    reasoning_effort: str | None = None  # an extension: `effort` of output_config, by OpenAI's name

    def refuse(self, where: str = "") -> None:
        """Raises InvalidRequest. For `thread` it has the code upon which clients send the whole conversation."""
        if self.thread:
            message = "thread: conversations are not kept here: send all messages and leave it out"
            raise ApiError(400, message, details={"error_code": "thread_unsupported_request"})
        super().refuse(where)


class MessagesRequest(Conversation, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    # extensions
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None


class MessagesUsage(msgspec.Struct):
    input_tokens: int  # of the prompt, without those found in the cache
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


MessageContent = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesResponse(msgspec.Struct):
    id: str
    model: str
    content: list[MessageContent]
    stop_reason: StopReason | None  # null only in the message_start of a stream
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    warnings: list[str] | UnsetType = UNSET  # parts of a schema that are not enforced


class TokenCount(msgspec.Struct):
    input_tokens: int


def chat_of(body: Conversation, conversion: ChatConversion) -> ChatRequest:
    """Raises InvalidRequest."""
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget < 1:
        raise InvalidRequest("thinking.budget_tokens", f"must be at least 1, got {budget}")
    system = body.system if isinstance(body.system, str) else _text(body.system or (), "system")
    if system:
        conversion.add("system", "system", content=system)
    for i, message in enumerate(body.messages):
        _add_message(message, f"messages[{i}]", conversion)
    chat = conversion.chat_request(body)
    chat.continue_final_message = bool(body.messages) and body.messages[-1].role == "assistant"
    effort = body.reasoning_effort
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
    if body.thinking is not None:
        chat.chat_template_kwargs = {"thinking": body.thinking.type != "disabled"}
    elif effort is None:
        chat.chat_template_kwargs = {"thinking": False}
    chat.thinking_token_budget = budget
    chat.tools = [_tool(entry, f"tools[{i}]") for i, entry in enumerate(body.tools or ())] or None
    if body.tool_choice is not None:
        chat.tool_choice = _tool_choice(body.tool_choice)
        chat.parallel_tool_calls = False if body.tool_choice.disable_parallel_tool_use else None
    chat.reasoning_effort = effort
    if body.output_config is not None and body.output_config.format is not None:
        form = body.output_config.format
        chat.response_format = ResponseFormat(type=form.type, json_schema={"schema": form.schema})
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"must be at least 1, got {body.max_tokens}")
        chat.max_tokens, chat.stop = body.max_tokens, body.stop_sequences
    return chat


def _add_message(message: InputMessage, field: str, conversion: ChatConversion) -> None:
    """Adds one message, and before it one for each tool result among its blocks."""
    if isinstance(message.content, str):
        return conversion.add(field, message.role, content=message.content)
    texts: list[str] = []
    rest: dict[str, Any] = {}
    for i, block in enumerate(message.content):
        where = f"{field}.content[{i}]"
        match block, message.role:
            case ToolResultBlock(), "user":
                parts = block.content or ()
                content = parts if isinstance(parts, str) else _text(parts, where + ".content")
                conversion.add(where, "tool", tool_call_id=block.tool_use_id, content=content)
            case ThinkingBlock(), "assistant":
                rest["reasoning_content"] = rest.get("reasoning_content", "") + block.thinking
            case ToolUseBlock(), "assistant":
                rest.setdefault("tool_calls", []).append(tool_call(block.id, block.name, block.input))
            case RedactedThinkingBlock(), "assistant":
                pass
            case _:
                texts.append(_text_of(block, where))
    if texts or message.role == "assistant" or not message.content:
        conversion.add(field, message.role, content="".join(texts), **rest)


def _text_of(block: Block, field: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    kind = type(block).__struct_config__.tag
    if isinstance(block, ImageBlock | DocumentBlock):
        raise InvalidRequest(f"{field}.type", f"is {kind!r}: this model reads text only")
    raise InvalidRequest(f"{field}.type", f"is {kind!r}, which is not allowed in a message of this role")


def _text(blocks: Iterable[Block], field: str) -> str:
    return "".join(_text_of(block, f"{field}[{i}]") for i, block in enumerate(blocks))


def _tool(entry: AnthropicTool, field: str) -> dict[str, Any]:
    if entry.type not in (None, "custom"):
        raise InvalidRequest(f"{field}.type", f"is {entry.type!r}: only your own tools can be called here")
    if entry.input_schema is None:
        raise InvalidRequest(f"{field}.input_schema", "is required")
    return tool(name=entry.name, description=entry.description, parameters=entry.input_schema, strict=entry.strict)


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice.name", "is required with type 'tool'")
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


_PING = named_event("ping")
_DELTAS = {  # type, field of the text
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesStreamEncoder(PartsEncoder):
    def __init__(self, id: str, model: str, body: MessagesRequest, parser: AnswerParser, job: GenerationJob) -> None:
        super().__init__(parser)
        self._id, self._model, self._max_tokens = id, model, body.max_tokens
        self._hides_thought = body.thinking is not None and body.thinking.display == "omitted"
        self._warnings = list(job.warnings) or UNSET

    def begin(self, piece: Piece) -> bytes:
        message = MessagesResponse(self._id, self._model, [], None, None, _usage(piece), warnings=self._warnings)
        return named_event("message_start", message=message) + _PING

    async def finish(self, piece: Piece) -> bytes:
        delta = {"stop_reason": self._stop_reason(piece), "stop_sequence": _stop_sequence(piece)}
        return named_event("message_delta", delta=delta, usage=_usage(piece)) + named_event("message_stop")

    async def response(self, pieces: Sequence[Piece]) -> MessagesResponse:
        (piece,) = pieces
        self.parser.feed(piece.text, piece.finish)
        content = [_content(part, part.text, self._hides_thought) for part in self.parser.parts]
        reason, stop = self._stop_reason(piece), _stop_sequence(piece)
        usage = _usage(piece)
        return MessagesResponse(self._id, self._model, content, reason, stop, usage, warnings=self._warnings)

    def part_event(self, event: Event) -> bytes:
        part = event.part
        if event.type == "open":
            return named_event("content_block_start", index=part.index, content_block=_content(part, ""))
        if event.type == "delta":
            if self._hides_thought and part.kind is PartKind.REASONING:
                return b""
            type, field = _DELTAS[part.kind]
            return _delta(part, type, field, event.text)
        is_thought = part.kind is PartKind.REASONING
        signature = _delta(part, "signature_delta", "signature", _signature(part.text)) if is_thought else b""
        return signature + named_event("content_block_stop", index=part.index)

    def failed(self, info: ApiError) -> bytes:
        return b"event: error\ndata: " + info.anthropic + b"\n\n"

    def _stop_reason(self, piece: Piece) -> StopReason:
        if piece.finish == "length":
            is_cut = piece.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_cut else "max_tokens"
        if _stop_sequence(piece) is not None:
            return "stop_sequence"
        return "tool_use" if self.parser.answer.has_calls and piece.finish == "stop" else "end_turn"


def _stop_sequence(piece: Piece) -> str | None:
    return piece.stop if isinstance(piece.stop, str) else None


def _usage(piece: Piece) -> MessagesUsage:
    return MessagesUsage(piece.prompt_tokens - piece.cached_tokens, piece.completion_tokens, piece.cached_tokens)


def _content(part: Part, text: str, hides_thought: bool = False) -> MessageContent:
    """The part's block. text: of the part, "" in its start event. `input` must be an object: of a call that is not
    complete it has the members that are.
    """
    match part.kind:
        case PartKind.TEXT:
            return TextContent(text)
        case PartKind.REASONING:
            return ThinkingContent("" if hides_thought else text, _signature(text))
    arguments = text if part.complete and text else json.dumps(whole_members(text))  # writes half a surrogate, too
    return ToolUseContent(part.id, part.name, msgspec.Raw(arguments.encode()))


def _delta(part: Part, type: str, field: str, text: str) -> bytes:
    return named_event("content_block_delta", index=part.index, delta={"type": type, field: text})


def _signature(text: str) -> str:
    """Not checked when it comes back. Some clients drop thoughts without one, which would break tool loops."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest() if text else ""


_NAMES = {  # of the chat request's fields, in this API
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "tool_choice.function": "tool_choice",
    "thinking_token_budget": "thinking.budget_tokens",
}


async def messages(ctx: AppContext, request: Request, body: MessagesRequest) -> Response:
    """Anthropic's Messages API: an answer to a conversation."""
    model, conversion = ctx.model(body.model), ChatConversion("input_schema", _NAMES)
    chat = chat_of(body, conversion)
    job, new_parser = await prepare_chat(ctx, request, chat, conversion.client_field, may_cut=True)
    parser = new_parser(new_id=lambda: f"toolu_{secrets.token_hex(12)}")
    encoder = MessagesStreamEncoder(f"msg_{job.prompts[0].rid}", model, body, parser, job)
    return await respond(ctx, request, job, encoder, body.stream)


async def count_tokens(ctx: AppContext, request: Request, body: Conversation) -> TokenCount:
    """The number of prompt tokens of a conversation."""
    ctx.model(body.model)
    conversion = ChatConversion("input_schema", _NAMES)
    chat = chat_of(body, conversion)
    with renamed(conversion.client_field):
        _, ids, _ = await render(ctx, chat)
    return TokenCount(len(ids))
