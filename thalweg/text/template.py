"""A checkpoint's own Jinja chat template, rendered as transformers renders it, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.text.messages import Message, ToolCall

_PROBE = "thalweg_probe"


class _Refused(Exception):
    """raise_exception() was called by the template: the conversation is one that it does not accept."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; for a prompt it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Template:
    """One compiled chat template. Raises CheckpointError when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the chat template does not compile: {error}; give another with --chat-template"
            ) from error
        self._arguments = self._how_arguments()

    def render(
        self,
        messages: Sequence[Message],
        functions: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. Raises InvalidRequest when the template refuses the conversation, CheckpointError when it does
        what the sandbox forbids.
        """
        values: dict[str, Any] = {"documents": None, **self._special_tokens, **variables}
        values["messages"] = [_as_dict(message, self._arguments) for message in messages]
        values["tools"] = [{"type": "function", "function": dict(function)} for function in functions] or None
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(values)
        except _Refused as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        except jinja2.exceptions.SecurityError as error:
            raise CheckpointError(f"the chat template does what the sandbox forbids: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidRequest("messages", f"the model's chat template fails on them: {error}") from error

    def _how_arguments(self) -> Callable[[ToolCall], Any]:
        """Templates disagree on whether `arguments` is an object (Qwen, Llama: `| tojson`) or a string (DeepSeek:
        concatenated).

        A probe tells: rendered as an object it must come out as JSON.
        """
        call = ToolCall(id="call000000", name="f", raw=json.dumps({_PROBE: True}), arguments={_PROBE: True})
        probe = (
            Message("messages[0]", "user", "q"),
            Message("messages[1]", "assistant", "", tool_calls=(call,)),
            Message("messages[2]", "tool", "r", tool_call_id=call.id),
        )
        values = {**self._special_tokens, "messages": [_as_dict(message, _parsed) for message in probe], "tools": None}
        try:
            text = self._template.render(values)
        except (jinja2.TemplateError, _Refused, TypeError, ValueError, KeyError, AttributeError):
            return _raw
        return _raw if f"'{_PROBE}'" in text else _parsed


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a checkpoint by name (`default`, `tool_use`, …); empty when it has none.

    Looks at chat_template.jinja and additional_chat_templates/*.jinja, then chat_template.json, then `config`
    (tokenizer_config.json): transformers' order. Raises CheckpointError for a broken one.
    """
    found = _named(config.get("chat_template"), "tokenizer_config.json")
    single = folder / "chat_template.json"
    if single.is_file():
        try:
            found |= _named(json.loads(single.read_text(encoding="utf-8"))["chat_template"], single.name)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{single}: expected a JSON object with chat_template ({error!r})") from error
    extra = folder / "additional_chat_templates"
    for path in sorted(extra.glob("*.jinja")) if extra.is_dir() else []:
        found[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return found


def _named(value: Any, file: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(v, Mapping) and {"name", "template"} <= v.keys() for v in value):
        return {str(v["name"]): str(v["template"]) for v in value}
    raise CheckpointError(f"{file}: chat_template must be a string or a list of {{name, template}}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; a prompt must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> str:
    raise _Refused(message)


def _raw(call: ToolCall) -> Any:
    return call.raw


def _parsed(call: ToolCall) -> Any:
    return dict(call.arguments)


def _as_dict(message: Message, arguments: Callable[[ToolCall], Any]) -> dict[str, Any]:
    """The message as templates know it. Absent keys stay absent: templates ask `is defined`."""
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        given["reasoning_content"] = message.reasoning
    if message.tool_calls:
        given["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        given["tool_call_id"] = message.tool_call_id
    return given
