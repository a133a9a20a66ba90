"""Tool calls of Qwen2.5 and Qwen3 (the Hermes format).

    <tool_call>
    {"name": "F", "arguments": {…}}
    </tool_call>

Written in this order the arguments stream; in any other the call waits for its end tag. Arguments may be a string that
holds JSON.
"""

from __future__ import annotations

import json
import re

from thalweg.text.event_builder import CallBuilder, EventBuilder
from thalweg.text.lexer import Token, literal_marks
from thalweg.text.partial_json import JsonObject, after_json

MARKS = literal_marks({"<tool_call>": "call", "</tool_call>": "/call"})
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

_MARK = re.compile(r"[ \t\r\n]*([{}:,])[ \t\r\n]*")
_DECODER = json.JSONDecoder(strict=False, parse_int=float)
_LONGEST_HEAD = 4096  # characters: beyond it the call waits for its end: each piece matches the head again


class HermesTools:
    """The tool layer: takes the tokens of the content, writes to the answer."""

    def __init__(self, answer: EventBuilder) -> None:
        self._answer = answer
        self._call: _Call | None = None

    @property
    def in_call(self) -> bool:
        return self._call is not None

    def token(self, token: Token) -> None:
        call = self._call
        if isinstance(token, str):
            if call is None:
                self._answer.text(token)
            elif not call.text(token):
                self._close(call)
            return
        if call is not None:
            self._close(call)
        if token.kind == "call":
            self._call = _Call(self._answer.call())

    def finish(self) -> None:
        if self._call is not None:
            self._close(self._call)

    def _close(self, call: _Call) -> None:
        self._call = None
        self._answer.text(call.close())


class _Call:
    """One call between its tags."""

    def __init__(self, call: CallBuilder) -> None:
        self._call = call
        self._raw: list[str] = []
        self._head = ""  # as much of the text as may hold the name
        self._name = ""
        self._json = JsonObject()
        self._after: list[str] = []

    def text(self, text: str) -> bool:
        """Take text; False when the call turned out malformed."""
        self._raw.append(text)
        if self._json.done:
            self._after.append(text)
            return True
        return self._body(text)

    def close(self) -> str:
        """End the call, or give it up; returns the text around its JSON that is content after all."""
        if self._json.done:
            self._call.end(self._name)
            return after_json("".join(self._after))
        raw = "".join(self._raw)
        whole = None if self._name else _whole(raw)
        if whole is None:
            self._call.fail(self._json.closing(), raw, self._json.held + self._json.rest)
            return ""
        name, arguments = whole
        self._call.arguments(name, arguments)
        self._call.end(name)
        return ""

    def _body(self, text: str) -> bool:
        if not self._name:
            if len(self._head) >= _LONGEST_HEAD:
                return True
            self._head += text
            if self._head.lstrip()[:1] not in ("", "{"):
                return False
            head = _HEAD.match(self._head, 0, _LONGEST_HEAD)
            name = None if head is None else _name(head[1])
            if head is None or name is None:
                return True
            self._name, text = name, self._head[head.end() :]
        self._call.arguments(self._name, self._json.feed(text))
        if self._json.done:
            self._after.append(self._json.rest)
            self._json.rest = ""
        return not self._json.bad


def _name(literal: str) -> str | None:
    try:
        name = json.loads(literal)
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None


def _whole(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is one JSON object with its keys in any order; None when it is not."""
    try:
        members = _members(text)
        name = json.loads(members["name"])
        arguments = members.get("arguments", members.get("parameters", "{}"))
        arguments = json.loads(arguments, strict=False) if arguments.startswith('"') else arguments
    except (ValueError, KeyError, RecursionError):
        return None
    read = JsonObject()
    out = read.feed("{}" if arguments in ("", "null") else arguments)
    if not isinstance(name, str) or not name or not read.done or read.rest.strip():
        return None
    return name, out


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, their values as they were written. Raises ValueError, RecursionError."""
    members: dict[str, str] = {}
    mark, at = _mark(text, 0, "{")
    while mark != "}":
        key, at = _DECODER.raw_decode(text, at)
        _, start = _mark(text, at, ":")
        _, at = _DECODER.raw_decode(text, start)
        members[str(key)] = text[start:at]
        mark, at = _mark(text, at, ",}")
    if at != len(text):
        raise ValueError(f"more than one object: {text[at:]!r}")
    return members


def _mark(text: str, at: int, wanted: str) -> tuple[str, int]:
    """The mark of JSON that stands here, and where the space behind it ends. Raises ValueError when it is none of those
    wanted.
    """
    found = _MARK.match(text, at)
    if found is None or found[1] not in wanted:
        raise ValueError(f"none of {wanted} at {at}")
    return found[1], found.end()
