"""Items of the Responses API → the messages that every encoder reads, and back. An error names the field as the client
wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thalweg.core.errors import InvalidRequest
from thalweg.server.content_parts import ContentPart, PartKind
from thalweg.server.conversion import ChatConversion
from thalweg.server.parsing import convert
from thalweg.server.protocol import ChatRequest, ResponseFormat
from thalweg.server.responses.protocol import (
    CallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
)

_NO_THOUGHT = ("none", "minimal")


def chat_of(body: ResponsesRequest, before: Sequence[dict[str, Any]], conversion: ChatConversion) -> ChatRequest:
    """The same as a chat request; its messages are those of `draft`. before: the conversation so far. Raises
    InvalidRequest.
    """
    _refuse(body)
    if body.instructions:
        conversion.add("instructions", "system", content=body.instructions)
    for message in before:
        conversion.messages.append(message)
        conversion.fields.append("previous_response_id")
    if isinstance(body.input, str):
        conversion.add("input", "user", content=body.input)
    else:
        _Writer(conversion).write(body.input)
    chat = ChatRequest(messages=conversion.messages, model=body.model, stream=body.stream)
    chat.max_tokens, chat.temperature, chat.top_p = body.max_output_tokens, body.temperature, body.top_p
    chat.seed, chat.stop, chat.top_k, chat.min_p = body.seed, body.stop, body.top_k, body.min_p
    chat.repetition_penalty, chat.cache_salt, chat.priority = body.repetition_penalty, body.cache_salt, body.priority
    chat.tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None
    chat.tool_choice, chat.parallel_tool_calls = _choice(body.tool_choice), body.parallel_tool_calls
    chat.chat_template_kwargs = _template_kwargs(body)
    if body.text is not None and body.text.format is not None:
        chat.response_format = _format(body.text.format)
    return chat


def message_of(parts: Sequence[ContentPart]) -> dict[str, Any]:
    """An answer as a message of the conversation that goes on from it."""
    message: dict[str, Any] = {"role": "assistant", "content": _texts(parts, PartKind.TEXT)}
    if thought := _texts(parts, PartKind.THOUGHT):
        message["reasoning_content"] = thought
    if calls := [_call(part.id, part.name, part.text) for part in parts if part.kind is PartKind.CALL]:
        message["tool_calls"] = calls
    return message


def _texts(parts: Sequence[ContentPart], kind: PartKind) -> str:
    return "".join(part.text for part in parts if part.kind is kind)


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class _Writer:
    """Writes items as messages: a thought, a text and calls that follow each other are one message of the assistant."""

    def __init__(self, conversion: ChatConversion) -> None:
        self._draft = conversion
        self._answer: dict[str, Any] | None = None

    def write(self, items: Sequence[dict[str, Any]]) -> None:
        for i, item in enumerate(items):
            field, kind = f"input[{i}]", item.get("type", "message")
            if kind == "message":
                self._message(convert(item, MessageItem, field), field)
            elif kind == "reasoning":
                thought = convert(item, ReasoningItem, field)
                self._joined(field)["reasoning_content"] = "".join(part.text for part in thought.content or ())
            elif kind == "function_call":
                call = convert(item, CallItem, field)
                self._joined(field).setdefault("tool_calls", []).append(_call(call.call_id, call.name, call.arguments))
            elif kind == "function_call_output":
                result = convert(item, OutputItem, field)
                self._answer = None
                self._draft.add(field, "tool", tool_call_id=result.call_id, content=result.output)
            else:
                raise InvalidRequest(
                    f"{field}.type",
                    f"is {kind!r}: message, reasoning, function_call and function_call_output are supported here",
                )

    def _message(self, message: MessageItem, field: str) -> None:
        if message.role != "assistant":
            self._answer = None
            role = "system" if message.role == "developer" else message.role
            return self._draft.add(field, role, content=message.content)
        if self._answer is None or self._answer["content"]:
            self._answer = None
        self._joined(field)["content"] = message.content

    def _joined(self, field: str) -> dict[str, Any]:
        """The assistant's message that is being written."""
        if self._answer is None:
            self._draft.add(field, "assistant", content="")
            self._answer = self._draft.messages[-1]
        return self._answer


def _refuse(body: ResponsesRequest) -> None:
    refused = {"background": body.background, "conversation": body.conversation, "prompt": body.prompt}
    for name, value in refused.items():
        if value:
            raise InvalidRequest(name, "is not supported here and would change the result: leave it out")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        name = "top_logprobs" if body.top_logprobs else "include"
        raise InvalidRequest(name, "log-probabilities are not supported here: /v1/chat/completions has them")


def _tool(tool: ResponsesTool, field: str) -> dict[str, Any]:
    if tool.type != "function":
        raise InvalidRequest(f"{field}.type", f"is {tool.type!r}: only your own functions can be called here")
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice.type", f"is {choice.get('type')!r}: only a function can be named here")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(format: TextFormat) -> ResponseFormat:
    wanted: dict[str, Any] = {"type": format.type}
    if format.type == "json_schema":
        wanted["json_schema"] = {"name": format.name or "answer", "schema": format.schema, "strict": format.strict}
    return convert(wanted, ResponseFormat, "text.format")


def _template_kwargs(body: ResponsesRequest) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    asked = {} if effort is None else {"thinking": effort not in _NO_THOUGHT}
    return {**asked, **(body.chat_template_kwargs or {})}
