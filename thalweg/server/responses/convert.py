"""Converts the Responses API's items to a chat request, and an answer to a message. An error names the field as the
client wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thalweg.core.errors import InvalidRequest
from thalweg.server.content_parts import PartBuilder, PartKind
from thalweg.server.conversion import ChatConversion, tool, tool_call
from thalweg.server.parsing import convert
from thalweg.server.protocol import ChatRequest, ResponseFormat
from thalweg.server.responses.protocol import (
    CallItem,
    CallOutputItem,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
)

_NO_THINKING = ("none", "minimal")


def chat_of(body: ResponsesRequest, history: Sequence[dict[str, Any]], conversion: ChatConversion) -> ChatRequest:
    """history: the messages of the previous response. Raises InvalidRequest."""
    _refuse(body)
    if body.instructions:
        conversion.add("instructions", "system", content=body.instructions)
    conversion.messages += history
    conversion.fields += ["previous_response_id"] * len(history)
    if isinstance(body.input, str):
        conversion.add("input", "user", content=body.input)
    else:
        _add_items(body.input, conversion)
    effort = None if body.reasoning is None else body.reasoning.effort
    thinking = {} if effort is None else {"thinking": effort not in _NO_THINKING}
    return conversion.chat_request(
        body,
        max_tokens=body.max_output_tokens,
        stop=body.stop,
        tools=[_tool(entry, f"tools[{i}]") for i, entry in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=thinking | (body.chat_template_kwargs or {}),
        response_format=_format(body.text.format) if body.text and body.text.format else None,
    )


def message_of(answer: PartBuilder) -> dict[str, Any]:
    """An answer as a message of the conversation that continues it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text(PartKind.TEXT)}
    if reasoning := answer.text(PartKind.REASONING):
        message["reasoning_content"] = reasoning
    if answer.calls:
        message["tool_calls"] = [tool_call(part.id, part.name, part.text) for part in answer.calls]
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


def _refuse(body: ResponsesRequest) -> None:
    refused = {"background": body.background, "conversation": body.conversation, "prompt": body.prompt}
    for name, value in refused.items():
        if value:
            raise InvalidRequest(name, "is not supported here and would change the result: leave it out")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        name = "top_logprobs" if body.top_logprobs else "include"
        raise InvalidRequest(name, "log-probabilities are not supported here: /v1/chat/completions has them")


def _tool(entry: ResponsesTool, field: str) -> dict[str, Any]:
    if entry.type != "function":
        raise InvalidRequest(f"{field}.type", f"is {entry.type!r}: only your own functions can be called here")
    return tool(name=entry.name, description=entry.description, parameters=entry.parameters, strict=entry.strict)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice.type", f"is {choice.get('type')!r}: only a function can be named here")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(form: TextFormat) -> ResponseFormat:
    schema = {"name": form.name or "answer", "schema": form.schema, "strict": form.strict}
    value = {"type": form.type} | ({"json_schema": schema} if form.type == "json_schema" else {})
    return convert(value, ResponseFormat, "text.format")
