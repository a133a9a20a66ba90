"""Chat messages as they come (OpenAI-style dicts) → checked, frozen values that every encoder reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.core.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """One call in the history. `raw` is the arguments as text, exactly as given; `arguments` the same parsed."""

    id: str
    name: str
    raw: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One checked message; `field` is where it stands in the request, e.g. `messages[2]`.

    `tools` and `response_format` may stand on a system or developer message itself (DeepSeek's search agent does that);
    those of the request are not here.
    """

    field: str
    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Mapping[str, Any] | None = None


def read_messages(messages: Sequence[Mapping[str, Any]], field: str = "messages") -> tuple[Message, ...]:
    """Check the messages of a request. Raises InvalidRequest naming the message and the field."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(field, "must be a list of messages")
    if not messages:
        raise InvalidRequest(field, "is empty: give at least one message")
    read = tuple(_message(message, f"{field}[{i}]") for i, message in enumerate(messages))
    _check_tool_results(read)
    return read


def read_tools(tools: Sequence[Mapping[str, Any]] | None, field: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Check an OpenAI tool list and return its functions (`{"name": …, "parameters": …}`, keys in the given order)."""
    if tools is None:
        return ()
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequest(field, "must be a list of tools")
    return tuple(_function(tool, f"{field}[{i}]") for i, tool in enumerate(tools))


def text_of(content: Any, field: str) -> str:
    """A string, or a list of text parts joined as they stand. Raises InvalidRequest for anything else."""
    if isinstance(content, str):
        return _unicode(content, field)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(field, f"must be a string or a list of text parts, not {_kind(content)}")
    return "".join(_part(part, f"{field}[{i}]") for i, part in enumerate(content))


def to_json(value: Any) -> str:
    """JSON the way DeepSeek's templates write it: `, ` and `: ` between, nothing escaped to ASCII."""
    return json.dumps(value, ensure_ascii=False)


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be an object with role and content, not {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{field}.role", f"is {role!r}: must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role in ("system", "developer", "user"):
        raise InvalidRequest(f"{field}.content", f"is missing: a {role} message needs text")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise InvalidRequest(f"{field}.tool_calls", f"stands on a {role} message: only the assistant calls tools")
    response_format = message.get("response_format")
    if response_format is not None and not isinstance(response_format, Mapping):
        raise InvalidRequest(f"{field}.response_format", f"must be an object, not {_kind(response_format)}")
    return Message(
        field=field,
        role=role,
        content="" if content is None else text_of(content, f"{field}.content"),
        reasoning=_reasoning(message, field) if role == "assistant" else "",
        tool_calls=_tool_calls(calls, f"{field}.tool_calls"),
        tool_call_id=_optional_text(message.get("tool_call_id"), f"{field}.tool_call_id"),
        tools=read_tools(message.get("tools"), f"{field}.tools"),
        response_format=response_format,
    )


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return _unicode(part, field)
    if not isinstance(part, Mapping):
        raise InvalidRequest(field, f"must be a text part, not {_kind(part)}")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text"):
        raise InvalidRequest(f"{field}.type", f"is {kind!r}: this model reads text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", f"must be a string, not {_kind(text)}")
    return _unicode(text, f"{field}.text")


def _reasoning(message: Mapping[str, Any], field: str) -> str:
    """`reasoning_content` (DeepSeek, SGLang) or `reasoning` (vLLM's and OpenRouter's name for it)."""
    name = "reasoning_content" if message.get("reasoning_content") is not None else "reasoning"
    return _optional_text(message.get(name), f"{field}.{name}")


def _optional_text(value: Any, field: str) -> str:
    return "" if value is None else text_of(value, field)


def _tool_calls(calls: Any, field: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise InvalidRequest(field, f"must be a list, not {_kind(calls)}")
    return tuple(_tool_call(call, f"{field}[{i}]") for i, call in enumerate(calls))


def _tool_call(call: Any, field: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{field}.function", "is missing: a tool call is {id, type, function: {name, arguments}}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.function.name", "must be the name of a function")
    given = function.get("arguments")
    where = f"{field}.function.arguments"
    arguments = {} if given is None or given == "" else given
    if isinstance(given, str) and given:
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                where, f"is not JSON ({error}): send the arguments as the model's call had them"
            ) from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(where, f"must be a JSON object, not {_kind(arguments)}")
    raw = given if isinstance(given, str) and given else to_json(arguments)
    return ToolCall(
        id=_optional_text(call.get("id"), f"{field}.id"),
        name=_unicode(name, f"{field}.function.name"),
        raw=_unicode(raw, where),
        arguments=arguments,
    )


def _function(tool: Any, field: str) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{field}.function", 'is missing: a tool is {"type": "function", "function": {"name": …}}')
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"{field}.type", f"is {tool['type']!r}: only functions can be called")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.function.name", "must be the name of a function")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{field}.function.parameters", f"must be a JSON schema, not {_kind(parameters)}")
    _unicode(to_json(function), f"{field}.function")
    return function


def _check_tool_results(messages: Sequence[Message]) -> None:
    """Every run of tool messages follows an assistant message that made at least as many calls."""
    calls, results = 0, 0
    for message in messages:
        if message.role != "tool":
            calls, results = len(message.tool_calls), 0
            continue
        results += 1
        if not calls:
            raise InvalidRequest(
                f"{message.field}.role", "is 'tool', but no assistant message with tool_calls precedes it"
            )
        if results > calls:
            raise InvalidRequest(
                message.field, f"is tool result {results}, but the assistant made only {calls} call(s)"
            )


def _unicode(text: str, field: str) -> str:
    """Reject lone surrogates (JSON can spell them, UTF-8 and so the tokenizer cannot)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, f"holds half a surrogate pair at character {error.start}: not valid Unicode"
        ) from None
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
