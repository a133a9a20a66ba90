"""Reads a model's answer as it comes: reasoning, content and tool calls, as events.

The lexer cuts the text into tags and text. The reasoning layer takes tokens until the thought has ended (by its end
tag, or by a tool call); the tool layer takes the rest.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from thalweg.core.errors import UnsupportedConfig
from thalweg.text.event_builder import EventBuilder, Schemas, TextSpacing, ToolLayer
from thalweg.text.events import Event, ParsedAnswer, answer_of
from thalweg.text.lexer import Lexer, Tag, TagSyntax, Token, literal_tags
from thalweg.text.tools_dsml import TAGS as DSML_TAGS
from thalweg.text.tools_dsml import DsmlTools, without_marks
from thalweg.text.tools_glm import TAGS as GLM_TAGS
from thalweg.text.tools_glm import GlmTools
from thalweg.text.tools_json import (
    HERMES_TAGS,
    KIMI_TAGS,
    LLAMA_TAGS,
    SEP_TAGS,
    HermesTools,
    KimiTools,
    LlamaTools,
    SepTools,
)

FormatT = TypeVar("FormatT")


class ToolFormat(NamedTuple):
    tags: TagSyntax
    layer: Callable[[EventBuilder, Schemas], ToolLayer]
    mark: str  # the token that every call has; "": none
    plain: Callable[[str], str]  # a tag → its text where no tools were offered: special tokens are dropped


_SEP = ToolFormat(SEP_TAGS, SepTools, "<｜tool▁calls▁begin｜>", lambda raw: "")
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseekv3": _SEP,
    "deepseekv31": _SEP,
    "deepseekv32": ToolFormat(DSML_TAGS, DsmlTools, "｜DSML｜", without_marks),
    "qwen25": ToolFormat(HERMES_TAGS, HermesTools, "<tool_call>", str),
    "glm45": ToolFormat(GLM_TAGS, GlmTools, "<tool_call>", lambda raw: ""),
    "kimi_k2": ToolFormat(KIMI_TAGS, KimiTools, "<|tool_call_begin|>", lambda raw: ""),
    "llama3": ToolFormat(LLAMA_TAGS, LlamaTools, "", lambda raw: ""),
}

# Where an answer begins, by the request's `thinking` (None: not given), unless its prompt tells.
# inside: in the thought, which the prompt has opened; maybe: in the thought if the text begins with `<think>`; outside:
# in the content.
REASONING_FORMATS: Mapping[str, Mapping[bool | None, str]] = {
    "deepseek-r1": {None: "inside", True: "inside", False: "inside"},
    "deepseek-v3": {None: "outside", True: "inside", False: "outside"},
    "qwen3": {None: "maybe", True: "maybe", False: "outside"},
    "glm45": {None: "maybe", True: "maybe", False: "outside"},
}

_THINK = literal_tags({"<think>": "think", "</think>": "/think"})


class AnswerParser:
    """Reads one answer. Never raises, whatever the text is.

    reasoning, tools: names of the formats, None for none. thinking: the request's choice. inside: overrides where the
    answer begins (see `is_in_thought`). functions: the request's functions, for parameter types. offered: the model may
    call functions; without that a call is text. hold: show a call only when it has ended, a malformed one as content;
    otherwise arguments stream. A call in which the text ends is not `complete`, and has the arguments that came.
    Raises UnsupportedConfig for an unknown format.
    """

    def __init__(
        self,
        reasoning: str | None = None,
        tools: str | None = None,
        *,
        thinking: bool | None = None,
        inside: bool | None = None,
        functions: Sequence[Mapping[str, Any]] = (),
        offered: bool = True,
        hold: bool = False,
        new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        self._builder = EventBuilder(hold, new_id)
        self.parts = self._builder.parts  # of the answer so far
        self._tools: ToolLayer | None = None
        self._plain: Callable[[str], str] | None = None
        syntaxes, begins = [], "outside"
        if reasoning is not None:
            begins = _named(REASONING_FORMATS, reasoning, "--reasoning-parser")[thinking]
            begins = begins if inside is None else "inside" if inside else "outside"
            syntaxes.append(_THINK)
        if tools is not None:
            schemas = {str(function["name"]): function.get("parameters") or {} for function in functions}
            form = _named(TOOL_FORMATS, tools, "--tool-call-parser")
            self._tools = form.layer(self._builder, schemas) if offered else None
            self._plain = None if offered else form.plain
            syntaxes.append(form.tags)
        self._lexer = Lexer(syntaxes)
        self._thought = TextSpacing(after_block=True)
        self._interrupted = False  # a call ended the thought, and its own end tag may still come
        self._state = {"inside": self._inside, "maybe": self._maybe, "outside": self._outside}[begins]
        self._space: list[str] = []

    @property
    def answer(self) -> ParsedAnswer:
        """The answer so far."""
        return answer_of(self.parts)

    def feed(self, text: str, finish: str | None = None) -> list[Event]:
        """finish: of the last text, its finish reason; a reason other than "stop" cut the answer off."""
        for token in self._lexer.feed(text):
            self._token(token)
        return self._builder.drain() if finish is None else self.finish(is_cut=finish != "stop")

    def finish(self, is_cut: bool = False) -> list[Event]:
        """is_cut: the text ended at a limit, so markup at its end that is not a call yet is no content."""
        held = self._lexer.finish()
        if held:
            self._token(held)
        if self._state == self._inside:
            self._builder.reasoning(self._thought.finish())
        if self._state == self._maybe:
            self._builder.text("".join(self._space))
        if self._tools is not None:
            self._tools.finish(is_cut)
        self._builder.finish()
        return self._builder.drain()

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends in the thought, or may begin with one."""
        return self._state in (self._inside, self._maybe)

    def _token(self, token: Token) -> None:
        if self._plain is not None and isinstance(token, Tag) and token.kind not in ("think", "/think"):
            token = self._plain(token.raw)
        if token:
            self._state(token)

    def _inside(self, token: Token) -> None:
        """In the thought. Space alone is no thought; a first `<think>` is dropped."""
        if isinstance(token, str):
            self._builder.reasoning(self._thought.feed(token))
        elif token.kind == "/think":
            self._builder.reasoning(self._thought.finish())
            self._state = self._outside
        elif token.kind == "think":
            if self._thought.after_block:
                self._thought = TextSpacing(after_block=True)
            else:
                self._builder.reasoning(self._thought.feed(token.raw))
        else:
            self._thought.cut()
            self._interrupted = True
            self._state = self._outside
            self._outside(token)

    def _maybe(self, token: Token) -> None:
        """Before the first word."""
        if isinstance(token, str) and token.isspace():
            self._space.append(token)
            return
        if isinstance(token, Tag) and token.kind == "think":
            self._state = self._inside
            return
        self._builder.text("".join(self._space))
        self._state = self._outside
        self._outside(token)

    def _outside(self, token: Token) -> None:
        """In the content. Thinking tags are text, except the end of a thought that a call interrupted."""
        if isinstance(token, Tag) and token.kind in ("think", "/think"):
            if self._interrupted and token.kind == "/think" and self._tools is not None and self._tools.call is None:
                self._interrupted = False
                return
            token = token.raw
        if self._tools is not None:
            self._tools.token(token)
        else:
            assert isinstance(token, str), "only a tool format brings other tags"
            self._builder.text(token)


def is_in_thought(prompt: str) -> bool | None:
    """Whether a prompt leaves the model inside a thought. None: it does not tell."""
    end = prompt.rstrip()
    return True if end.endswith("<think>") else False if end.endswith("</think>") else None


def _named(catalog: Mapping[str, FormatT], name: str, flag: str) -> FormatT:
    if name not in catalog:
        raise UnsupportedConfig(f"{flag} {name}: unknown; one of {', '.join(catalog)}")
    return catalog[name]
