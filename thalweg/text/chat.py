"""Chooses the chat encoder of a checkpoint, and the parsers of its answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from thalweg.core.errors import CheckpointError, InvalidRequest, UnsupportedConfig
from thalweg.core.files import read_text
from thalweg.text.messages import Message, read_messages, read_tools
from thalweg.text.template import Template, read_templates
from thalweg.text.tokenizer import read_json_object

EOS = "<｜end▁of▁sentence｜>"
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class ChatEncoder:
    """Conversation → prompt text, BOS included (`Tokenizer.encode` never doubles it)."""

    name: str  # `thalweg plan` prints it
    templates: Mapping[str, Template]  # `tool_use` renders requests with tools; empty: a base model
    renders_tools: bool  # V3's and R1's published templates ignore tools
    sorts_results: bool = False  # in the order of the calls

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
        if not self.templates:
            message = "this model has no chat template: use /v1/completions, or start with --chat-template"
            raise InvalidRequest("messages", message)
        is_builtin = self.name in BUILTIN_ENCODERS  # such a template reads `thinking` alone
        variables = {**({} if is_builtin else template_kwargs or {}), "drop_thinking": drop_thinking}
        if response_format is not None:
            variables["response_format"] = response_format
        if (wanted := wants_thinking(thinking, template_kwargs)) is not None:  # DeepSeek's name and Qwen's
            variables |= {"thinking": wanted, "enable_thinking": wanted}
        template = self.templates["tool_use" if functions and "tool_use" in self.templates else "default"]
        opens = add_generation_prompt and not continue_final_message
        shown = _in_call_order(checked) if self.sorts_results else checked
        prompt = template.render(shown, functions, add_generation_prompt=opens, variables=variables)
        if not continue_final_message:
            return prompt
        return prompt.removesuffix(EOS) if is_builtin else _cut_end(prompt, last)


def _cut_end(prompt: str, last: Message) -> str:
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
    "deepseek-v32-speciale": _Builtin("deepseek_v32", "v32", ParserNames("deepseek-v3", "deepseekv32"), False),
}


@functools.cache
def builtin(name: str) -> ChatEncoder:
    """One of our own encoders. name: a key of BUILTIN_ENCODERS."""
    file, style, _, renders_tools = BUILTIN_ENCODERS[name]
    source = (TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8")
    template = Template(f"{{%- set style = '{style}' -%}}\n{source}", {}, is_own=True)
    return ChatEncoder(name, {"default": template}, renders_tools, sorts_results=name == "deepseek-v32")


@dataclass(frozen=True)
class ChatFormat:
    """The text side of one model."""

    encoder: ChatEncoder
    formats: ParserNames
    reason: str  # why they were chosen
    strip: bool | None = None  # keep thoughts out of the prefix cache; None: where the template drops them
    builtin: str = ""  # the built-in encoder that fits the checkpoint, in place of its own template
    shows_calls: bool = False  # the user wants calls as text

    @property
    def no_tools(self) -> str:
        """Why requests with tools are refused; "" where they are served."""
        instead = "leave them out, or start with "
        instead += f"--chat-template {self.builtin}" if self.builtin else "another --chat-template"
        if not self.encoder.renders_tools:
            return f"this model's chat template does not render tools: {instead}"
        if self.formats.tools is None and self.encoder.templates and not self.shows_calls:
            why = "no parser knows the calls that this model's chat template asks for"
            return f"{why}: {instead}, or --tool-call-parser (none: calls are text)"
        return ""


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
    if options.template == "auto":
        reason = "the checkpoint brings a chat template"
        sources = read_templates(folder, read_json_object(folder / "tokenizer_config.json"))
    else:
        path = Path(options.template)
        if not path.is_file():
            known = ", ".join(("auto", *BUILTIN_ENCODERS))
            raise UnsupportedConfig(f"--chat-template {options.template}: no such file, nor one of {known}")
        sources, reason = {"default": read_text(path)}, f"the template {path.name} set by the user"
    if sources:
        sources.setdefault("default", next(iter(sources.values())))
        try:
            templates = {name: Template(source, options.special_tokens) for name, source in sources.items()}
        except CheckpointError as error:
            raise CheckpointError(f"{folder if options.template == 'auto' else options.template}: {error}") from error
        encoder = ChatEncoder("jinja", templates, any("tools" in source for source in sources.values()))
        return ChatFormat(
            encoder, formats_of("".join(sources.values())), reason, builtin=_with_tools(folder, config, name)
        )
    chosen = builtin_encoder(config, f"{name} {folder.name}")
    if chosen is None:
        reason = "no chat template in the checkpoint, and no built-in encoder fits its architecture"
        return ChatFormat(ChatEncoder("none", {}, False), ParserNames(None, None), reason)
    return _builtin_format(chosen, "no chat template in the checkpoint; chosen by architecture and name")


def _with_tools(folder: Path, config: Mapping[str, Any], name: str) -> str:
    """The built-in encoder for a checkpoint, if it renders tools; else ""."""
    chosen = builtin_encoder(config, f"{name} {folder.name}")
    return chosen if chosen is not None and BUILTIN_ENCODERS[chosen].renders_tools else ""


def builtin_encoder(config: Mapping[str, Any], name: str) -> str | None:
    """The name of the built-in encoder for a checkpoint, or None. name: any text that tells R1 from V3."""
    architectures = config.get("architectures") or []
    kind = f"{config.get('model_type', '')} {' '.join(map(str, architectures))}".lower().replace("_", "")
    lower = name.lower()
    if "deepseekv32" in kind:
        if "speciale" in lower:
            return "deepseek-v32-speciale"
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


def with_thinking(template_kwargs: Mapping[str, Any] | None, effort: str | None, *said: bool | None) -> dict[str, Any]:
    """Template arguments that say whether to think, if anything does: `effort`, where "none" is off, `said`, and the
    arguments `reasoning_effort`, `thinking` and `enable_thinking`. Off wins.
    """
    arguments = {**({} if effort is None else {"reasoning_effort": effort}), **(template_kwargs or {})}
    efforts = [each != "none" for each in (effort, arguments.get("reasoning_effort")) if each is not None]
    votes = [*said, *efforts, arguments.get("thinking"), arguments.get("enable_thinking")]
    if known := [vote for vote in votes if isinstance(vote, bool)]:
        arguments["thinking"] = all(known)
    return arguments


def formats_of(template: str) -> ParserNames:
    """The parsers for a model, by the markup that its template writes."""
    reasoning = None
    if "</think>" in template and "｜" in template:  # DeepSeek's
        reasoning = "deepseek-v3" if "thinking" in template and "enable_thinking" not in template else "deepseek-r1"
    elif "</think>" in template:
        reasoning = "glm45" if "<arg_key>" in template else "qwen3"
    if "｜DSML｜" in template:
        return ParserNames(reasoning, "deepseekv32")
    if "<｜tool▁sep｜>" in template:
        return ParserNames(reasoning, "deepseekv3" if "```json" in template else "deepseekv31")
    marks = {  # the first that matches decides; "<function=" is Qwen3-Coder's, which no parser here knows
        "<arg_key>": "glm45",
        "<|tool_call_begin|>": "kimi_k2",
        "<function=": None,
        "<tool_call>": "qwen25",
        "<|python_tag|>": "llama3",
        '{"name": function name, "parameters"': "llama3",  # 3.2
    }
    return ParserNames(reasoning, next((parser for mark, parser in marks.items() if mark in template), None))


def _builtin_format(name: str, reason: str) -> ChatFormat:
    return ChatFormat(builtin(name), BUILTIN_ENCODERS[name].formats, reason)


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Sorts each run of tool results by the calls they answer, unless an id is missing, unknown or used twice."""
    out: list[Message] = []
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        group = list(run)
        if is_result:
            calls, ids = [call.id for call in out[-1].tool_calls], [result.tool_call_id for result in group]
            if set(ids) <= set(calls) and all(len(set(each)) == len(each) for each in (calls, ids)):
                group.sort(key=lambda result: calls.index(result.tool_call_id))
        out += group
    return out
