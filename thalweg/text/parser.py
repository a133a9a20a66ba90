"""Reads a model's answer as it comes: reasoning, content and tool calls, as events.

One machine for all formats. The lexer cuts the text into tags and text; the reasoning layer takes tokens until the
thought has ended (by its end tag, or by a tool call); the tool layer takes the rest. So how the two play together is
written once, here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from thalweg.core.errors import UnsupportedConfig
from thalweg.text import tools_dsml, tools_hermes, tools_sep
from thalweg.text.event_builder import EventBuilder, TextSpacing
from thalweg.text.events import Event, ParsedAnswer, collect
from thalweg.text.lexer import Lexer, Tag, TagSyntax, Token, literal_marks

_Format = TypeVar("_Format")


class ToolLayer(Protocol):
    """What a tool format adds to the machine: takes the tokens of the content, writes to its Answer."""

    @property
    def in_call(self) -> bool:
        """Inside the tags of a call."""

    def token(self, token: Token) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class ToolFormat:
    """A row of the catalog: the tags, and the layer that reads them.

    layer: (answer, function name → parameter schema) → layer. plain: what is left of a tag where no tools were offered;
    the marks that are special tokens go, as they do from any answer, what a text may hold stays.
    """

    marks: TagSyntax
    layer: Callable[[EventBuilder, Mapping[str, Mapping[str, object]]], ToolLayer]
    plain: Callable[[str], str]


def _sep(answer: EventBuilder, schemas: Mapping[str, Mapping[str, object]]) -> ToolLayer:
    return tools_sep.SepTools(answer)


def _hermes(answer: EventBuilder, schemas: Mapping[str, Mapping[str, object]]) -> ToolLayer:
    return tools_hermes.HermesTools(answer)


def _dsml(answer: EventBuilder, schemas: Mapping[str, Mapping[str, object]]) -> ToolLayer:
    return tools_dsml.DsmlTools(answer, schemas)


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseekv3": ToolFormat(tools_sep.MARKS, _sep, lambda raw: ""),
    "deepseekv31": ToolFormat(tools_sep.MARKS, _sep, lambda raw: ""),
    "deepseekv32": ToolFormat(tools_dsml.MARKS, _dsml, tools_dsml.without_marks),
    "qwen25": ToolFormat(tools_hermes.MARKS, _hermes, lambda raw: raw),
}

# Where an answer begins, by the request's `thinking` (None: not given). inside: in the thought, which the prompt has
# opened; maybe: in the thought if the text begins with `<think>`; outside: in the content.
REASONING_FORMATS: Mapping[str, Mapping[bool | None, str]] = {
    "deepseek-r1": {None: "inside", True: "inside", False: "inside"},
    "deepseek-v3": {None: "outside", True: "inside", False: "outside"},
    "qwen3": {None: "maybe", True: "maybe", False: "outside"},
}

_THINK = literal_marks({"<think>": "think", "</think>": "/think"})


class AnswerParser:
    """One answer. `feed` text deltas and get events; `finish` when the text has ended. Never raises, whatever the text
    is.

    reasoning, tools: names of the catalogs, None for none. thinking: the request's wish. inside: overrides where the
    answer begins (`opens_thought(prompt)` knows it when the prompt is at hand). functions: the request's functions, for
    parameter types. offered: the request let the model call functions; without that nothing is a call, and its text is
    text. hold: show a call only once it is complete (what a reply in one piece wants: a malformed call is then
    content); otherwise arguments stream, and a call that breaks off midway is closed into valid JSON and marked
    `whole=False`. Raises UnsupportedConfig for an unknown format.
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
        marks = []
        self._answer = EventBuilder(hold, new_id)
        self._tools: ToolLayer | None = None
        self._plain: Callable[[str], str] | None = None
        begins = "outside"
        if reasoning is not None:
            form = _named(REASONING_FORMATS, reasoning, "--reasoning-parser")
            begins = form[thinking] if inside is None else "inside" if inside else "outside"
            marks.append(_THINK)
        if tools is not None:
            schemas = {str(function["name"]): function.get("parameters") or {} for function in functions}
            tool_form = _named(TOOL_FORMATS, tools, "--tool-call-parser")
            self._tools = tool_form.layer(self._answer, schemas)
            self._plain = None if offered else tool_form.plain
            marks.append(tool_form.marks)
        self._lexer = Lexer(marks)
        self._thought = TextSpacing(skips_space=True)
        self._interrupted = False  # a call ended the thought, and its own end tag may still come
        self._state = {"inside": self._inside, "maybe": self._maybe, "outside": self._outside}[begins]
        self._space: list[str] = []

    def feed(self, text: str) -> list[Event]:
        for token in self._lexer.feed(text):
            self._token(token)
        return self._answer.drain()

    def finish(self) -> list[Event]:
        held = self._lexer.finish()
        if held:
            self._token(held)
        if self._state == self._inside:
            self._answer.reasoning(self._thought.finish())
        if self._state == self._maybe:
            self._answer.text("".join(self._space))
        if self._tools is not None:
            self._tools.finish()
        self._answer.finish()
        return self._answer.drain()

    def _token(self, token: Token) -> None:
        if self._plain is not None and isinstance(token, Tag) and token.kind not in ("think", "/think"):
            token = self._plain(token.raw)
        if token:
            self._state(token)

    def _inside(self, token: Token) -> None:
        """In the thought. Space alone is no thought; one `<think>` in front is dropped."""
        if isinstance(token, str):
            self._answer.reasoning(self._thought.feed(token))
        elif token.kind == "/think":
            self._answer.reasoning(self._thought.finish())
            self._state = self._outside
        elif token.kind == "think":
            if self._thought.empty:
                self._thought = TextSpacing(skips_space=True)
            else:
                self._answer.reasoning(self._thought.feed(token.raw))
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
        self._answer.text("".join(self._space))
        self._state = self._outside
        self._outside(token)

    def _outside(self, token: Token) -> None:
        """In the content: thinking tags are text here, but for the end of a thought that a call interrupted."""
        if isinstance(token, Tag) and token.kind in ("think", "/think"):
            if self._interrupted and token.kind == "/think" and self._tools is not None and not self._tools.in_call:
                self._interrupted = False
                return
            token = token.raw
        if self._tools is not None:
            self._tools.token(token)
        else:
            assert isinstance(token, str), "only a tool format brings other tags"
            self._answer.text(token)


def parse(text: str, reasoning: str | None, tools: str | None, **options: Any) -> ParsedAnswer:
    """A whole answer at once; `options` as for Parser."""
    parser = AnswerParser(reasoning, tools, **{"hold": True, **options})
    return collect([*parser.feed(text), *parser.finish()])


def opens_thought(prompt: str) -> bool:
    """Whether a prompt leaves the model inside a thought."""
    return prompt.rstrip().endswith("<think>")


def _named(catalog: Mapping[str, _Format], name: str, flag: str) -> _Format:
    if name not in catalog:
        raise UnsupportedConfig(f"{flag} {name}: unknown; one of {', '.join(catalog)}")
    return catalog[name]
