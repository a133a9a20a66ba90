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
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.core.files import read_object, read_text
from thalweg.text.messages import Message, ToolCall
from thalweg.text.sandbox import LimitedEnvironment, TemplateLimitError, limits

_PROBE = "thalweg_probe"
_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, TemplateLimitError),
)


class _RefusedByTemplate(Exception):
    """The template called raise_exception()."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; a prompt has only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Template:
    """One compiled chat template. Raises CheckpointError when it does not compile, or builds more than the sandbox
    allows from a short conversation.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], is_own: bool = False) -> None:
        """is_own: one of this package's, which needs no limits."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(is_own).from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError) as error:
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
            return self._text(values)
        except _RefusedByTemplate as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        except SecurityError as error:
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
        values: dict[str, Any] = {**self._special_tokens, "tools": None}
        dicts = [_as_dict(message, True) for message in messages]
        self._try(values | {"messages": dicts[:1], "add_generation_prompt": True})
        prompt = self._try(values | {"messages": dicts})
        return prompt is not None and f"'{_PROBE}'" not in prompt

    def _try(self, values: Mapping[str, Any]) -> str | None:
        """The prompt, or None where the template fails."""
        try:
            return self._text(values)
        except (TemplateLimitError, MemoryError) as error:
            raise CheckpointError(f"the chat template renders no short conversation: {error}") from None
        except (_RefusedByTemplate, *_FAILURES):
            return None

    def _text(self, values: Mapping[str, Any]) -> str:
        with limits():
            return self._template.render(values)


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


def _environment(is_own: bool) -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    kind = ImmutableSandboxedEnvironment if is_own else LimitedEnvironment
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    if isinstance(environment, LimitedEnvironment):
        environment.add_filter("tojson", _tojson)
    else:
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
