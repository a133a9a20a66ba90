"""Jinja chat templates, rendered as transformers renders them, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.core.files import read_object, read_text
from thalweg.text.messages import Message, ToolCall

_PROBE = "thalweg_probe"
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError)


class _RefusedByTemplate(Exception):
    """The template called raise_exception()."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; a prompt has only its body."""

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
            message = f"the chat template does not compile: {error}; give another with --chat-template"
            raise CheckpointError(message) from error
        self._takes_objects = self._probe()

    def render(
        self,
        messages: Sequence[Message],
        functions: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. Raises InvalidRequest when the template refuses the conversation, CheckpointError when the
        sandbox forbids what it does.
        """
        values: dict[str, Any] = {"documents": None, **self._special_tokens, **variables}
        values["messages"] = [_as_dict(message, self._takes_objects) for message in messages]
        values["tools"] = _as_tools(functions) or None
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(values)
        except _RefusedByTemplate as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        except jinja2.exceptions.SecurityError as error:
            raise CheckpointError(f"the chat template does what the sandbox forbids: {error}") from error
        except _FAILURES as error:
            raise InvalidRequest("messages", f"the model's chat template fails on them: {error}") from error

    def _probe(self) -> bool:
        """Whether the template takes `arguments` as an object (Qwen, Llama: `| tojson`) or as a string (DeepSeek:
        concatenated). An object must be rendered as JSON.
        """
        call = ToolCall("call000000", "f", json.dumps({_PROBE: True}), {_PROBE: True})
        messages = (
            Message("messages[0]", "user", "q"),
            Message("messages[1]", "assistant", "", tool_calls=(call,)),
            Message("messages[2]", "tool", "r", tool_call_id=call.id),
        )
        values = {**self._special_tokens, "messages": [_as_dict(message, True) for message in messages], "tools": None}
        try:
            return f"'{_PROBE}'" not in self._template.render(values)
        except (_RefusedByTemplate, *_FAILURES):
            return False


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a checkpoint by name (`default`, `tool_use`, …); empty when it has none.

    Looks at chat_template.jinja and additional_chat_templates/*.jinja, then chat_template.json, then `config`
    (tokenizer_config.json): transformers' order. Raises CheckpointError for a broken one.
    """
    templates = _by_name(config.get("chat_template"), folder / "tokenizer_config.json")
    single = folder / "chat_template.json"
    with suppress(FileNotFoundError):
        content = read_object(single)
        if "chat_template" not in content:
            raise CheckpointError(f"{single}: chat_template is missing")
        templates |= _by_name(content["chat_template"], single)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    with suppress(FileNotFoundError):
        templates["default"] = read_text(folder / "chat_template.jinja")
    return templates


def _by_name(value: Any, file: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(v, Mapping) and {"name", "template"} <= v.keys() for v in value):
        return {str(v["name"]): str(v["template"]) for v in value}
    raise CheckpointError(f"{file}: chat_template must be a string or a list of {{name, template}}")


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> str:
    raise _RefusedByTemplate(message)


def _as_tools(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": dict(function)} for function in functions]


def _as_dict(message: Message, takes_objects: bool) -> dict[str, Any]:
    """The message as templates know it. Absent keys stay absent: templates ask `is defined`."""
    values: dict[str, Any] = {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.reasoning,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments) if takes_objects else call.raw},
            }
            for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
        "tools": _as_tools(message.tools),
        "response_format": message.response_format,
    }
    return {key: value for key, value in values.items() if value or key in ("role", "content")}
