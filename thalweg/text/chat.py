"""Chooses the chat encoder of a checkpoint, and the parsers of its answers."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from thalweg.core.errors import InvalidRequest, UnsupportedConfig
from thalweg.text.messages import Message, read_messages, read_tools
from thalweg.text.template import Template, read_templates
from thalweg.text.tokenizer import read_json_object

EOS = "<｜end▁of▁sentence｜>"
TEMPLATES = Path(__file__).parent / "templates"


class PromptOptions(NamedTuple):
    thinking: bool | None  # None: the model's default
    drop_thinking: bool
    add_generation_prompt: bool  # the prompt opens the assistant's turn
    response_format: Mapping[str, Any] | None
    variables: Mapping[str, Any]


@dataclass(frozen=True)
class ChatEncoder(ABC):
    """Conversation → prompt text, BOS included (`Tokenizer.encode` never doubles it)."""

    name: str  # `thalweg plan` prints it

    @property
    @abstractmethod
    def renders_tools(self) -> bool:
        """Whether tool schemas reach the prompt. V3's and R1's published templates ignore them."""

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: bool | None = None,
        drop_thinking: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        response_format: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. thinking: None is the model's default. continue_final_message: the prompt ends inside the last
        message, which must be the assistant's. template_kwargs: the request's `chat_template_kwargs`; its `thinking`
        and `enable_thinking` count when `thinking` is None. Raises InvalidRequest naming message and field.
        """
        checked, functions = read_messages(messages), read_tools(tools)
        last = checked[-1]
        if continue_final_message and (last.role != "assistant" or last.tool_calls):
            message = "needs an assistant message without tool calls as the last one"
            raise InvalidRequest("continue_final_message", message)
        thinking = wants_thinking(thinking, template_kwargs)
        opens = add_generation_prompt and not continue_final_message
        options = PromptOptions(thinking, drop_thinking, opens, response_format, template_kwargs or {})
        prompt = self._prompt(checked, functions, options)
        return self._cut_end(prompt, last) if continue_final_message else prompt

    @abstractmethod
    def _prompt(
        self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], options: PromptOptions
    ) -> str: ...

    def _cut_end(self, prompt: str, last: Message) -> str:
        """The prompt up to the end of the last message's text, which a template may have trimmed."""
        for text in (last.content, last.content.strip()):
            at = prompt.rfind(text)
            if text and at >= 0:
                return prompt[: at + len(text)]
        message = "the chat template does not render the last message's content as it is"
        raise InvalidRequest("continue_final_message", message)


class ParserNames(msgspec.Struct, frozen=True):
    """The parsers of a model's answers (names of `thalweg.text.parser`); None: there is none."""

    reasoning: str | None
    tools: str | None


class _Builtin(NamedTuple):
    """A prompt template for checkpoints that bring none."""

    file: str
    style: str  # variable of the template
    formats: ParserNames
    renders_tools: bool = True


BUILTIN_ENCODERS = {
    "deepseek-v3": _Builtin("deepseek_v3", "v3", ParserNames(None, "deepseekv3"), False),
    "deepseek-r1": _Builtin("deepseek_v3", "r1", ParserNames("deepseek-r1", "deepseekv3"), False),
    "deepseek-r1-0528": _Builtin("deepseek_v3", "r1-0528", ParserNames("deepseek-r1", "deepseekv3")),
    "deepseek-v31": _Builtin("deepseek_v31", "v31", ParserNames("deepseek-v3", "deepseekv31")),
    "deepseek-v31-terminus": _Builtin("deepseek_v31", "terminus", ParserNames("deepseek-v3", "deepseekv31")),
    "deepseek-v32": _Builtin("deepseek_v32", "v32", ParserNames("deepseek-v3", "deepseekv32")),
}


@functools.cache
def _builtin_template(name: str) -> Template:
    builtin = BUILTIN_ENCODERS[name]
    source = (TEMPLATES / f"{builtin.file}.jinja").read_text(encoding="utf-8")
    return Template(f"{{%- set style = '{builtin.style}' -%}}\n{source}", {})


@dataclass(frozen=True)
class BuiltinEncoder(ChatEncoder):
    """One of our own templates. name: a key of BUILTIN_ENCODERS."""

    @property
    def renders_tools(self) -> bool:
        return BUILTIN_ENCODERS[self.name].renders_tools

    def _prompt(
        self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], options: PromptOptions
    ) -> str:
        variables = {"thinking": options.thinking, "response_format": options.response_format}
        if self.name == "deepseek-v32":
            messages = _in_call_order(messages)
        opens = options.add_generation_prompt
        return _builtin_template(self.name).render(
            messages, functions, add_generation_prompt=opens, variables=variables
        )

    def _cut_end(self, prompt: str, last: Message) -> str:
        return prompt.removesuffix(EOS)


@dataclass(frozen=True)
class TemplateEncoder(ChatEncoder):
    """The checkpoint's own templates, by name; `tool_use` renders requests with tools."""

    templates: Mapping[str, Template]
    name: str = field(default="jinja", init=False)

    @property
    def renders_tools(self) -> bool:
        return any("tools" in template.source for template in self.templates.values())

    def _prompt(
        self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], options: PromptOptions
    ) -> str:
        template = self.templates["tool_use" if functions and "tool_use" in self.templates else "default"]
        variables = {**options.variables, "drop_thinking": options.drop_thinking}
        if options.response_format is not None:
            variables["response_format"] = options.response_format
        if options.thinking is not None:  # DeepSeek's name and Qwen's for the same switch
            variables |= {"thinking": options.thinking, "enable_thinking": options.thinking}
        opens = options.add_generation_prompt
        return template.render(messages, functions, add_generation_prompt=opens, variables=variables)


@dataclass(frozen=True)
class NoEncoder(ChatEncoder):
    """A base model without a template."""

    name: str = field(default="none", init=False)
    renders_tools = False

    def _prompt(
        self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], options: PromptOptions
    ) -> str:
        message = "this model has no chat template: use /v1/completions, or start with --chat-template"
        raise InvalidRequest("messages", message)


@dataclass(frozen=True)
class ChatFormat:
    """The text side of one model."""

    encoder: ChatEncoder
    formats: ParserNames
    reason: str  # why they were chosen
    strip: bool | None = None  # keep thoughts out of the prefix cache; None: where the template drops them


@dataclass(frozen=True)
class ChatOptions:
    """The user's settings."""

    template: str = "auto"  # `auto`, the name of a built-in encoder, or the path of a Jinja file
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # for the template


def choose_chat(
    folder: Path, config: Mapping[str, Any], options: ChatOptions = ChatOptions(), name: str = ""
) -> ChatFormat:
    """The encoder of a checkpoint: the user's choice, else its own template, else a built-in one by config and name.

    folder: the checkpoint. config: its config.json. name: the model's name as the user gave it; the folder's name
    counts too, because V3, R1 and V3.1 share one architecture. Raises UnsupportedConfig for an unknown name,
    CheckpointError for a broken template.
    """
    if options.template in BUILTIN_ENCODERS:
        return _builtin_format(options.template, "set by the user")
    if options.template != "auto":
        path = Path(options.template)
        if not path.is_file():
            known = ", ".join(("auto", *BUILTIN_ENCODERS))
            raise UnsupportedConfig(f"--chat-template {options.template}: no such file, nor one of {known}")
        source = {"default": path.read_text(encoding="utf-8")}
        return _template_format(source, options, f"the template {path.name} set by the user")
    templates = read_templates(folder, read_json_object(folder / "tokenizer_config.json"))
    if templates:
        templates.setdefault("default", next(iter(templates.values())))
        return _template_format(templates, options, "the checkpoint brings a chat template")
    builtin = builtin_encoder(config, f"{name} {folder.name}")
    if builtin is None:
        reason = "no chat template in the checkpoint, and no built-in encoder fits its architecture"
        return ChatFormat(NoEncoder(), ParserNames(None, None), reason)
    return _builtin_format(builtin, "no chat template in the checkpoint; chosen by architecture and name")


def builtin_encoder(config: Mapping[str, Any], name: str) -> str | None:
    """The name of the built-in encoder for a checkpoint, or None. name: any text that tells R1 from V3."""
    architectures = config.get("architectures") or []
    kind = f"{config.get('model_type', '')} {' '.join(map(str, architectures))}".lower().replace("_", "")
    lower = name.lower()
    if "deepseekv32" in kind:
        return "deepseek-v31-terminus" if "exp" in lower else "deepseek-v32"
    if "deepseekv3" not in kind:
        return None
    encoders = {  # the first that matches decides
        "r1-0528": "deepseek-r1-0528",
        "r1": "deepseek-r1",
        "terminus": "deepseek-v31-terminus",
        "v3.1": "deepseek-v31",
    }
    return next((encoder for mark, encoder in encoders.items() if mark in lower), "deepseek-v3")


def wants_thinking(thinking: bool | None, template_kwargs: Mapping[str, Any] | None) -> bool | None:
    """`thinking`, else `thinking` or `enable_thinking` of chat_template_kwargs, else None."""
    values = [thinking, *((template_kwargs or {}).get(key) for key in ("thinking", "enable_thinking"))]
    return next((value for value in values if isinstance(value, bool)), None)


def formats_of(template: str) -> ParserNames:
    """The parsers for a model, by the markup that its template writes."""
    reasoning = None
    if "</think>" in template:
        reasoning = "deepseek-v3" if "thinking" in template and "enable_thinking" not in template else "deepseek-r1"
        reasoning = "qwen3" if "<|im_start|>" in template else reasoning
    if "｜DSML｜" in template:
        return ParserNames(reasoning, "deepseekv32")
    if "<｜tool▁sep｜>" in template:
        return ParserNames(reasoning, "deepseekv3" if "```json" in template else "deepseekv31")
    if "<tool_call>" in template and "<function=" not in template:
        return ParserNames(reasoning, "qwen25")
    return ParserNames(reasoning, None)


def _builtin_format(name: str, reason: str) -> ChatFormat:
    return ChatFormat(BuiltinEncoder(name), BUILTIN_ENCODERS[name].formats, reason)


def _template_format(sources: Mapping[str, str], options: ChatOptions, reason: str) -> ChatFormat:
    templates = {name: Template(source, options.special_tokens) for name, source in sources.items()}
    return ChatFormat(TemplateEncoder(templates), formats_of(sources["default"]), reason)


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Sorts each run of tool results by the calls they answer, unless an id is missing, unknown or used twice."""
    out: list[Message] = []
    results: list[Message] = []
    order: dict[str, int] = {}
    for message in (*messages, None):
        if message is not None and message.role == "tool":
            results.append(message)
            continue
        ids = [result.tool_call_id for result in results]
        if len(set(ids)) == len(ids) and all(id in order for id in ids):
            results.sort(key=lambda result: order[result.tool_call_id])
        out += results
        results = []
        if message is not None:
            out.append(message)
            order = {call.id: i for i, call in enumerate(message.tool_calls)}
            order = order if len(order) == len(message.tool_calls) else {}
    return out
