"""Chooses how a model's conversations become prompts, and reads its answers: encoder and parser names for a
checkpoint.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.core.errors import CheckpointError, InvalidRequest, UnsupportedConfig
from thalweg.text import encode_v3, encode_v32
from thalweg.text.messages import Message, read_messages, read_tools
from thalweg.text.template import Template, read_templates


@dataclass(frozen=True)
class PromptOptions:
    """How a prompt is wanted. thinks None: the model's default. generation: it ends with the opening of the assistant's
    turn.
    """

    thinks: bool | None
    drop_thinking: bool
    generation: bool
    response_format: Mapping[str, Any] | None
    variables: Mapping[str, Any]


@dataclass(frozen=True)
class ChatEncoder(ABC):
    """Conversation → prompt text, BOS included (`Tokenizer.encode` never doubles it). name: what `thalweg plan`
    prints.
    """

    name: str

    @property
    @abstractmethod
    def renders_tools(self) -> bool:
        """Whether tool schemas reach the prompt; where not (V3, R1 as published), a request with tools is worth a
        warning.
        """

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
        """The prompt. thinking None: the model's default. continue_final_message: the prompt ends inside the last
        message, which must be the assistant's (no generation prompt then). template_kwargs: `chat_template_kwargs` of
        the request; `thinking` and `enable_thinking` in it count when `thinking` is None. Raises InvalidRequest naming
        message and field.
        """
        read, functions = read_messages(messages), read_tools(tools)
        if continue_final_message:
            _check_continues(read)
        thinks = wants_thinking(thinking, template_kwargs)
        generation = add_generation_prompt and not continue_final_message
        prompt = self._prompt(
            read, functions, PromptOptions(thinks, drop_thinking, generation, response_format, template_kwargs or {})
        )
        return self._end_inside(prompt, read[-1]) if continue_final_message else prompt

    @abstractmethod
    def _prompt(
        self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], ask: PromptOptions
    ) -> str: ...

    def _end_inside(self, prompt: str, last: Message) -> str:
        """The prompt without what closes its last message."""
        return prompt.removesuffix(encode_v32.EOS)


@dataclass(frozen=True)
class ParserNames:
    """The parsers that read what a model writes (names of `thalweg.text.parser`); None: its text is content as it
    stands.
    """

    reasoning: str | None
    tools: str | None


@dataclass(frozen=True)
class _Own:
    """One of our encoders for checkpoints without a template."""

    formats: ParserNames
    renders_tools: bool = True


BUILTIN_ENCODERS = {
    "deepseek-v3": _Own(ParserNames(None, "deepseekv3"), renders_tools=False),
    "deepseek-r1": _Own(ParserNames("deepseek-r1", "deepseekv3"), renders_tools=False),
    "deepseek-r1-0528": _Own(ParserNames("deepseek-r1", "deepseekv3")),
    "deepseek-v31": _Own(ParserNames("deepseek-v3", "deepseekv31")),
    "deepseek-v31-terminus": _Own(ParserNames("deepseek-v3", "deepseekv31")),
    "deepseek-v32": _Own(ParserNames("deepseek-v3", "deepseekv32")),
}


@dataclass(frozen=True)
class BuiltinEncoder(ChatEncoder):
    """A prompt encoder written in Python, by name (a key of OWN)."""

    @property
    def renders_tools(self) -> bool:
        return BUILTIN_ENCODERS[self.name].renders_tools

    def _prompt(self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], ask: PromptOptions) -> str:
        thinks = bool(ask.thinks)
        if self.name == "deepseek-v32":
            return encode_v32.encode_v32(messages, functions, thinks, ask.generation, ask.response_format)
        if self.name in ("deepseek-v31", "deepseek-v31-terminus"):
            terminus = self.name.endswith("terminus")
            return encode_v3.encode_v31(messages, functions, thinks, ask.generation, terminus=terminus)
        styles = {
            "deepseek-v3": encode_v3.V3,
            "deepseek-r1": encode_v3.R1,
            "deepseek-r1-0528": encode_v3.R1_0528,
        }
        return encode_v3.encode_v3(styles[self.name], messages, functions, ask.generation)


@dataclass(frozen=True)
class TemplateEncoder(ChatEncoder):
    """The checkpoint's own templates, by name; `tool_use` is taken for requests with tools."""

    templates: Mapping[str, Template]
    name: str = field(default="jinja", init=False)

    @property
    def renders_tools(self) -> bool:
        return any("tools" in template.source for template in self.templates.values())

    def _prompt(self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], ask: PromptOptions) -> str:
        name = "tool_use" if functions and "tool_use" in self.templates else "default"
        variables = {**ask.variables, "drop_thinking": ask.drop_thinking}
        if ask.response_format is not None:
            variables["response_format"] = ask.response_format
        if ask.thinks is not None:  # DeepSeek's name and Qwen's for the same switch
            variables |= {"thinking": ask.thinks, "enable_thinking": ask.thinks}
        return self.templates[name].render(
            messages, functions, add_generation_prompt=ask.generation, variables=variables
        )

    def _end_inside(self, prompt: str, last: Message) -> str:
        return _cut_after(prompt, last.content)


@dataclass(frozen=True)
class NoEncoder(ChatEncoder):
    """A base model: no template, and none of ours fits."""

    name: str = field(default="none", init=False)
    renders_tools = False

    def _prompt(self, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]], ask: PromptOptions) -> str:
        raise InvalidRequest(
            "messages", "this model has no chat template: use /v1/completions, or start with --chat-template"
        )


@dataclass(frozen=True)
class ChatFormat:
    """The text side of one model: its encoder and the parsers of its answers, and why they were chosen. strip: the
    user's wish that thoughts stay out of the prefix cache, None for where the template drops them (see
    `thalweg.text.retention`).
    """

    encoder: ChatEncoder
    formats: ParserNames
    reason: str
    strip: bool | None = None


@dataclass(frozen=True)
class ChatOptions:
    """What the user set. template: `auto`, the name of one of our encoders, or the path of a Jinja file."""

    template: str = "auto"
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def choose_chat(
    folder: Path, config: Mapping[str, Any], wish: ChatOptions = ChatOptions(), name: str = ""
) -> ChatFormat:
    """The encoder of a checkpoint: the user's wish, else its own template, else ours by config and name.

    folder: the checkpoint. config: its config.json. name: what the user called the model (`deepseek-ai/DeepSeek-R1`);
    the folder's name counts too, because V3, R1 and V3.1 share one architecture. wish.special_tokens: `bos_token`,
    `eos_token` … for the template. Raises UnsupportedConfig for an unknown name, CheckpointError for a broken template.
    """
    if wish.template in BUILTIN_ENCODERS:
        return _own(wish.template, "set by the user")
    if wish.template != "auto":
        path = Path(wish.template)
        if not path.is_file():
            raise UnsupportedConfig(
                f"--chat-template {wish.template}: no such file, nor one of auto, {', '.join(BUILTIN_ENCODERS)}"
            )
        return _jinja({"default": path.read_text(encoding="utf-8")}, wish, f"the template {path.name} set by the user")
    templates = read_templates(folder, _tokenizer_config(folder))
    if templates:
        templates.setdefault("default", next(iter(templates.values())))
        return _jinja(templates, wish, "the checkpoint brings a chat template")
    own = builtin_encoder(config, f"{name} {folder.name}")
    if own is None:
        return ChatFormat(
            NoEncoder(),
            ParserNames(None, None),
            "no chat template in the checkpoint, and no encoder of ours fits its architecture",
        )
    return _own(own, "no chat template in the checkpoint; chosen by architecture and name")


def builtin_encoder(config: Mapping[str, Any], name: str) -> str | None:
    """The name of our encoder for a checkpoint without a template, or None. `name`: anything that tells R1 from V3."""
    architectures = config.get("architectures") or []
    kind = f"{config.get('model_type', '')} {' '.join(map(str, architectures))}".lower().replace("_", "")
    lower = name.lower()
    if "deepseekv32" in kind:
        return "deepseek-v31-terminus" if "exp" in lower else "deepseek-v32"
    if "deepseekv3" not in kind:
        return None
    # The first mark that stands in the name decides: "r1-0528" before "r1".
    marks = {
        "r1-0528": "deepseek-r1-0528",
        "r1": "deepseek-r1",
        "terminus": "deepseek-v31-terminus",
        "v3.1": "deepseek-v31",
    }
    return next((encoder for mark, encoder in marks.items() if mark in lower), "deepseek-v3")


def wants_thinking(thinking: bool | None, template_kwargs: Mapping[str, Any] | None) -> bool | None:
    """The request's wish: `thinking` itself, else `thinking` or `enable_thinking` of chat_template_kwargs, else
    None.
    """
    if thinking is not None:
        return thinking
    given = template_kwargs or {}
    for key in ("thinking", "enable_thinking"):
        if isinstance(given.get(key), bool):
            return bool(given[key])
    return None


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


def _own(name: str, reason: str) -> ChatFormat:
    return ChatFormat(BuiltinEncoder(name), BUILTIN_ENCODERS[name].formats, reason)


def _jinja(sources: Mapping[str, str], wish: ChatOptions, reason: str) -> ChatFormat:
    templates = {name: Template(source, wish.special_tokens) for name, source in sources.items()}
    return ChatFormat(TemplateEncoder(templates), formats_of(sources["default"]), reason)


def _tokenizer_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return config


def _check_continues(messages: Sequence[Message]) -> None:
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise InvalidRequest("continue_final_message", "needs an assistant message without tool calls as the last one")


def _cut_after(prompt: str, content: str) -> str:
    """The prompt up to the end of the last message's text, which a template may have trimmed."""
    for text in (content, content.strip()):
        at = prompt.rfind(text)
        if text and at >= 0:
            return prompt[: at + len(text)]
    raise InvalidRequest(
        "continue_final_message", "the chat template does not render the last message's content as it stands"
    )
