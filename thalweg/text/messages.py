"""Chat messages: OpenAI-style dicts → checked, frozen values that every encoder reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from thalweg.core.errors import InvalidRequest
from thalweg.text.tokenizer import check_unicode

ROLES = ("system", "developer", "user", "assistant", "tool")
T = TypeVar("T")


class ToolCall(NamedTuple):
    """One call in the history."""

    id: str
    name: str
    raw: str  # the arguments as given
    arguments: Mapping[str, Any]


class Message(NamedTuple):
    field: str  # in the request, e.g. `messages[2]`
    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    # of this message (DeepSeek's search agent has them on system and developer messages), not of the request
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Mapping[str, Any] | None = None


def read_messages(messages: Sequence[Mapping[str, Any]], field: str = "messages") -> tuple[Message, ...]:
    """Checks the messages of a request. Raises InvalidRequest naming the message and the field."""
    checked = _each(messages, field, "a list of messages", _message)
    if not checked:
        raise InvalidRequest(field, "is empty: give at least one message")
    calls, results = 0, 0  # of the last assistant message
    for message in checked:
        if message.role != "tool":
            calls, results = len(message.tool_calls), 0
            continue
        results += 1
        if not calls:
            raise InvalidRequest(
                f"{message.field}.role", "is 'tool', but no assistant message with tool_calls is before"
            )
        if results > calls:
            raise InvalidRequest(
                message.field, f"is tool result {results}, but the assistant made only {calls} call(s)"
            )
    return checked


def read_tools(tools: Sequence[Mapping[str, Any]] | None, field: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Checks an OpenAI tool list. Returns its functions (`{"name": …, "parameters": …}`, keys in the given order)."""
    return () if tools is None else _each(tools, field, "a list of tools", _function)


def text_of(content: Any, field: str) -> str:
    """A string, or a list of text parts joined. Raises InvalidRequest for anything else."""
    if isinstance(content, str):
        return check_unicode(content, field)
    return "".join(_each(content, field, "a string or a list of text parts", _part))


def to_json(value: Any) -> str:
    """JSON as DeepSeek's templates write it: `, ` and `: ` between, nothing escaped to ASCII."""
    return json.dumps(value, ensure_ascii=False)


def _each(values: Any, field: str, expected: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise _wrong_type(values, field, expected)
    return tuple([read(value, f"{field}[{i}]") for i, value in enumerate(values)])


def _wrong_type(value: Any, field: str, expected: str) -> InvalidRequest:
    kind = "null" if value is None else type(value).__name__
    return InvalidRequest(field, f"must be {expected}, not {kind}")


def _object(value: Any, field: str, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(value, field, expected)
    return value


def _message(message: Any, field: str) -> Message:
    role = _object(message, field, "an object with role and content").get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{field}.role", f"is {role!r}: must be one of {', '.join(ROLES)}")
    content, calls, form = (message.get(name) for name in ("content", "tool_calls", "response_format"))
    if content is None and role in ("system", "developer", "user"):
        raise InvalidRequest(f"{field}.content", f"is missing: a {role} message needs text")
    if calls and role != "assistant":
        raise InvalidRequest(f"{field}.tool_calls", f"is on a {role} message: only the assistant calls tools")
    # `reasoning_content` (DeepSeek, SGLang) or `reasoning` (vLLM, OpenRouter)
    reasoning = "reasoning_content" if message.get("reasoning_content") is not None else "reasoning"
    return Message(
        field,
        role,
        _optional_text(message, field, "content"),
        _optional_text(message, field, reasoning) if role == "assistant" else "",
        () if calls is None else _each(calls, f"{field}.tool_calls", "a list", _tool_call),
        _optional_text(message, field, "tool_call_id"),
        read_tools(message.get("tools"), f"{field}.tools"),
        None if form is None else _object(form, f"{field}.response_format", "an object"),
    )


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return check_unicode(part, field)
    kind = _object(part, field, "a text part").get("type")
    if kind not in ("text", "input_text", "output_text"):
        raise InvalidRequest(f"{field}.type", f"is {kind!r}: this model reads text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong_type(text, f"{field}.text", "a string")
    return check_unicode(text, f"{field}.text")


def _optional_text(values: Mapping[str, Any], field: str, name: str) -> str:
    return "" if values.get(name) is None else text_of(values[name], f"{field}.{name}")


def _named_function(value: Any, field: str, shape: str) -> Mapping[str, Any]:
    """The `function` of a tool or call, which must have a name."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{field}.function", f"is missing: {shape}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{field}.function.name", "must be the name of a function")
    return function


def _tool_call(call: Any, field: str) -> ToolCall:
    function = _named_function(call, field, "a tool call is {id, type, function: {name, arguments}}")
    given, where = function.get("arguments"), f"{field}.function.arguments"
    arguments = {} if given is None or given == "" else given
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            message = f"is not JSON ({error}): send the arguments as the model's call had them"
            raise InvalidRequest(where, message) from None
    _object(arguments, where, "a JSON object")
    raw = given if isinstance(given, str) and given else to_json(arguments)
    name = check_unicode(function["name"], f"{field}.function.name")
    return ToolCall(_optional_text(call, field, "id"), name, check_unicode(raw, where), arguments)


def _function(tool: Any, field: str) -> Mapping[str, Any]:
    if isinstance(tool, Mapping) and tool.get("type", "function") != "function":
        raise InvalidRequest(f"{field}.type", f"is {tool['type']!r}: only functions can be called")
    function = _named_function(tool, field, 'a tool is {"type": "function", "function": {"name": …}}')
    if function.get("parameters") is not None:
        _object(function["parameters"], f"{field}.function.parameters", "a JSON schema")
    check_unicode(to_json(function), f"{field}.function")
    return function
