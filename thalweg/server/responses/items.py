"""Input of the Responses API: its items and tools as a chat request, and as the list that clients fetch."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.server.chat import ChatConversion, tool, tool_call
from thalweg.server.parsing import convert, given
from thalweg.server.protocol import ChatRequest, ResponseFormat
from thalweg.server.responses.protocol import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    MessageItem,
    Reasoning,
    ReasoningItem,
    ResponsesInput,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
)

CLIENT_FIELDS = {  # of the chat request's fields, in this API
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
LOGPROBS = "message.output_text.logprobs"


def chat_of(body: ResponsesInput, history: Sequence[dict[str, Any]], conversion: ChatConversion) -> ChatRequest:
    """history: the messages of the previous response. Raises InvalidRequest."""
    if body.instructions:
        conversion.add("instructions", "system", content=body.instructions)
    conversion.messages += history
    conversion.fields += ["previous_response_id"] * len(history)
    if isinstance(body.input, str):
        conversion.add("input", "user", content=body.input)
    else:
        _add_items(body.input, conversion)
    reasoning = body.reasoning or Reasoning()
    return conversion.chat_request(
        body,
        tools=[_tool(entry, f"tools[{i}]") for i, entry in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=given(reasoning.effort, body.reasoning_effort),
        thinking_token_budget=given(body.thinking_token_budget, reasoning.max_tokens),
        chat_template_kwargs=body.chat_template_kwargs or {},
        response_format=_format(body.text.format) if body.text and body.text.format else None,
        **(_generation(body) if isinstance(body, ResponsesRequest) else {}),
    )


def _generation(body: ResponsesRequest) -> dict[str, Any]:
    logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not logprobs:
        raise InvalidRequest("top_logprobs", f'needs include: ["{LOGPROBS}"]')
    return {
        "max_tokens": body.max_output_tokens,
        "stop": body.stop,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs if logprobs else None,
    }


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
            case "custom_tool_call":
                custom = convert(item, CustomCallItem, field)
                calls = current(field).setdefault("tool_calls", [])
                calls.append(tool_call(custom.call_id, custom.name, {"input": custom.input}))
            case "function_call_output" | "custom_tool_call_output":
                assistant, result = None, convert(item, CallOutputItem, field)
                conversion.add(field, "tool", tool_call_id=result.call_id, content=result.output)
            case kind:
                supported = "message, reasoning, and function and custom tool calls with their outputs"
                raise InvalidRequest(f"{field}.type", f"is {kind!r}; supported here: {supported}")


_KINDS = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}  # prefixes of ids


def listed(items: str | Sequence[dict[str, Any]]) -> list[bytes]:
    """The items of an input in the form in which they are listed, as JSON: each has an id and a status."""
    texts: Any = [{"role": "user", "content": items}] if isinstance(items, str) else items
    return [msgspec.json.encode(_listed(item)) for item in texts]


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    given = {
        name: value for name, value in item.items() if value is not None and (name != "id" or isinstance(value, str))
    }
    new = {"id": _KINDS.get(kind, "out_") + uuid.uuid4().hex, "type": kind, "status": "completed", **given}
    if kind == "message" and isinstance(item["content"], str):
        is_output = item["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        new["content"] = [{**part, "text": item["content"]}]
    return new | ({"summary": item.get("summary") or []} if kind == "reasoning" else {})


# ---- tools


def _tool(entry: ResponsesTool, field: str) -> dict[str, Any]:
    if entry.type == "function":
        return tool(name=entry.name, description=entry.description, parameters=entry.parameters, strict=entry.strict)
    if entry.type != "custom":
        raise InvalidRequest(f"{field}.type", f"is {entry.type!r}: only your own functions and custom tools are called")
    form = entry.format
    text: dict[str, Any] = {"type": "string", "description": "The input of the tool: any text."}
    if form and form.type == "grammar":
        if not form.syntax or not form.definition:
            raise InvalidRequest(f"{field}.format", "of type 'grammar' needs a syntax and a definition")
        name = "Lark grammar" if form.syntax == "lark" else "regular expression"
        text["description"] = f"The input of the tool. It must match this {name}:\n{form.definition}"
        text |= _regex(form.definition) if form.syntax == "regex" else {}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    strict = True if form and form.type == "grammar" else None
    return tool(name=entry.name, description=entry.description, parameters=schema, strict=strict)


def custom_names(tools: Sequence[ResponsesTool] | None) -> frozenset[str]:
    return frozenset(tool.name for tool in tools or () if tool.type == "custom" and tool.name)


def lark_inputs(tools: Sequence[ResponsesTool] | None) -> dict[str, str]:
    """Custom tool → Lark grammar of its input."""
    formats = ((tool.name, tool.format) for tool in tools or () if tool.name in custom_names(tools))
    return {
        name: form.definition for name, form in formats if name and form and form.syntax == "lark" and form.definition
    }


def input_grammars(tools: Sequence[ResponsesTool] | None) -> list[Grammar]:
    """The grammars of custom tools on their own, to be checked: an error then names the tool that has it."""
    grammars = []
    for i, entry in enumerate(tools or ()):
        form, field = entry.format, f"tools[{i}].format.definition"
        if entry.type == "custom" and form and form.definition and form.syntax == "lark":
            grammars.append(Grammar("ebnf", form.definition, field=field))
        elif entry.type == "custom" and form and form.definition:
            grammars.append(Grammar("json_schema", json.dumps(_regex(form.definition)), field=field, strict=True))
    return grammars


def _regex(definition: str) -> dict[str, str]:
    """A JSON schema of strings that match as a whole."""
    return {"type": "string", "pattern": f"^(?:{definition})$"}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function" | "custom"}:
            return {"type": "function", "function": {"name": choice.get("name")}}
        case {"type": "allowed_tools", "tools": list(tools)}:
            allowed = {"mode": choice.get("mode", "auto"), "tools": list(map(_function, tools))}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    message = f"is {choice.get('type')!r}; there is function, custom, and allowed_tools with a list of tools"
    raise InvalidRequest("tool_choice.type", message)


def _function(choice: Any) -> Any:
    """A tool's name in the chat API's form."""
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: TextFormat) -> ResponseFormat:
    schema = {"name": form.name or "answer", "schema": form.schema, "strict": form.strict}
    value = {"type": form.type} | ({"json_schema": schema} if form.type == "json_schema" else {})
    return convert(value, ResponseFormat, "text.format")
