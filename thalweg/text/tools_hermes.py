"""Tool calls of Qwen2.5 and Qwen3 (the Hermes format).

    <tool_call>
    {"name": "F", "arguments": {…}}
    </tool_call>

Written in this order the arguments stream; in any other the call waits for its end tag. Arguments may be a string that holds JSON.
"""

from __future__ import annotations

import json
import re

from thalweg.text.answer import Answer, Call
from thalweg.text.json_stream import JsonObject
from thalweg.text.lexer import Token, literal_marks

MARKS = literal_marks({"<tool_call>": "call", "</tool_call>": "/call"})
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

_LONGEST_HEAD = 4096  # beyond it the call waits for its end: each piece matches the head again


class HermesTools:
    """The tool layer: takes the tokens of the content, writes to the answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._call: _Call | None = None

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

    def __init__(self, call: Call) -> None:
        self._call = call
        self._raw = ""
        self._name = ""
        self._json = JsonObject()
        self._after = ""

    def text(self, text: str) -> bool:
        """Take text; False when the call turned out malformed."""
        self._raw += text
        if self._json.done:
            self._after += text
            return True
        return self._body(text)

    def close(self) -> str:
        """End the call, or give it up; returns the text around its JSON that is content after all."""
        if self._json.done:
            self._call.end(self._name)
            return self._after.strip().removeprefix("}").strip()
        whole = None if self._name else _whole(self._raw)
        if whole is None:
            self._call.fail(self._json.closing(), self._raw, self._json.held + self._json.rest)
            return ""
        name, arguments = whole
        self._call.arguments(name, arguments)
        self._call.end(name)
        return ""

    def _body(self, text: str) -> bool:
        if not self._name:
            head = _HEAD.match(self._raw, 0, _LONGEST_HEAD)
            name = None if head is None else _name(head[1])
            if head is None or name is None:
                return True
            self._name, text = name, self._raw[head.end() :]
        self._call.arguments(self._name, self._json.feed(text))
        if self._json.done:
            self._after, self._json.rest = self._json.rest, ""
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
        call = json.loads(text, parse_constant=_no_constant)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(arguments, parse_constant=_no_constant) if isinstance(arguments, str) else arguments
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
