"""Tool calls whose arguments are written as JSON.

DeepSeek V3, R1 (a fenced block) and V3.1, V3.2-Exp (bare JSON):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\nARGS\\n```<｜tool▁call▁end｜>…
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>

A call without the outer tags counts, and so does one without its end tag, if its JSON is complete.

Qwen2.5 and Qwen3 (the Hermes format):

    <tool_call>
    {"name": "F", "arguments": {…}}
    </tool_call>

Written in this order the arguments stream; in any other the call waits for its end tag. Arguments may be a string that
holds JSON.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod

import msgspec

from thalweg.text.event_builder import CallReader, EventBuilder, ToolLayer
from thalweg.text.lexer import Tag, Token, literal_tags
from thalweg.text.partial_json import PartialJson

# Models also write ASCII bars and underscores.
SEP_TAGS = literal_tags(
    {
        "<｜tool▁calls▁begin｜>": "calls",
        "<｜tool▁calls▁end｜>": "/calls",
        "<｜tool▁call▁begin｜>": "call",
        "<｜tool▁call▁end｜>": "/call",
        "<｜tool▁sep｜>": "sep",
    },
    fold={ord("|"): ord("｜"), ord("_"): ord("▁")},
)
HERMES_TAGS = literal_tags({"<tool_call>": "call", "</tool_call>": "/call"})
_BEFORE_JSON = re.compile(r"\s*([^\s`<>{}]*)\s*(?:```(?:json)?)?\s*(?:```)?\s*")
_NAME = re.compile(r"[^\s`<>{}]{1,256}")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD = 4096  # characters before the arguments


class _JsonTools(ToolLayer):
    def token(self, token: Token) -> None:
        if isinstance(token, Tag):
            self.tag(token)
        elif self.call is None:
            self.builder.text(token)
        elif not self.call.text(token):
            self.close(ended=False)

    @abstractmethod
    def tag(self, tag: Tag) -> None: ...


class SepTools(_JsonTools):
    """DeepSeek V3 to V3.2-Exp."""

    def tag(self, tag: Tag) -> None:
        if tag.kind == "sep" and isinstance(self.call, _SepCall) and not self.call.separated:
            self.call.separated = True
            return
        self.close(ended=True)
        if tag.kind == "call":
            self.call = _SepCall(self.builder)
        elif tag.kind in ("calls", "/calls"):
            self.builder.cut()


class _SepCall(CallReader):
    def __init__(self, builder: EventBuilder) -> None:
        super().__init__(builder)
        self.separated = False  # the separator came
        self._header = ""  # before the separator
        self._before = ""  # between the separator and the JSON: the name and the fence of V3

    def read(self, text: str) -> bool:
        if not self.separated:
            self._header += text
            return len(self._header) <= _MAX_HEAD
        if not self.name:
            self._before += text
            at = self._before.find("{", 0, _MAX_HEAD)
            if at < 0:
                return len(self._before) < _MAX_HEAD
            name = self._parsed_name(self._before[:at])
            if name is None:
                return False
            self.name, text = name, self._before[at:]
        return self.feed_json(text)

    def close(self, ended: bool) -> str:
        if self.json.done:
            return self.succeed()
        name = self._parsed_name(self._before) if self.separated and not self.name else None
        if not ended or not name:
            return self.fail()
        self.name = name
        self.pass_on("{}")
        return self.succeed()

    def _parsed_name(self, before: str) -> str | None:
        """V3.1 puts the name before the separator; V3 writes `function` there and the name after it."""
        match, header = _BEFORE_JSON.fullmatch(before), self._header.strip()
        if match is None or (match[1] and header not in ("function", "")):
            return None
        name = match[1] or header
        return name if _NAME.fullmatch(name) else None


class HermesTools(_JsonTools):
    """Qwen2.5 and Qwen3."""

    def tag(self, tag: Tag) -> None:
        self.close(ended=True)
        if tag.kind == "call":
            self.call = _HermesCall(self.builder)


class _HermesCall(CallReader):
    def __init__(self, builder: EventBuilder) -> None:
        super().__init__(builder)
        self._head = ""  # text that may hold the name

    def read(self, text: str) -> bool:
        if not self.name:
            if len(self._head) >= _MAX_HEAD:  # each piece matches the head again: from here on, wait for the end
                return True
            self._head += text
            if self._head.lstrip()[:1] not in ("", "{"):
                return False
            head = _HEAD.match(self._head, 0, _MAX_HEAD)
            name = None if head is None else _json_name(head[1])
            if head is None or name is None:
                return True
            self.name, text = name, self._head[head.end() :]
        return self.feed_json(text)

    def close(self, ended: bool) -> str:
        if self.json.done:
            return self.succeed()
        whole = None if self.name else _whole_call("".join(self.raw))
        if whole is None:
            return self.fail()
        self.name, arguments = whole
        self.pass_on(arguments)
        return self.succeed()


def _json_name(literal: str | bytes) -> str | None:
    try:
        name = json.loads(literal)
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call with its keys in any order; None when it is not one JSON object."""
    try:
        members = msgspec.json.decode(_whole_object(text), type=dict[str, msgspec.Raw])
        arguments = bytes(members.get("arguments", members.get("parameters", b"{}"))).decode()
        arguments = json.loads(arguments) if arguments.startswith('"') else arguments
        arguments = _whole_object("{}" if arguments in ("", "null") else arguments)
        name = _json_name(bytes(members["name"]))
    except (ValueError, KeyError, msgspec.DecodeError):
        return None
    return None if name is None else (name, arguments)


def _whole_object(text: str) -> str:
    """One JSON object, with control characters escaped. Raises ValueError."""
    reader = PartialJson()
    out = reader.feed(text)
    if not reader.done or reader.rest.strip():
        raise ValueError("not one JSON object")
    return out
