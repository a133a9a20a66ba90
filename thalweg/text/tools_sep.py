"""Tool calls of DeepSeek V3, R1 (a fenced block) and V3.1, V3.2-Exp (bare JSON): one reader for both.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\nARGS\\n```<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>

A call without the outer tags counts, and so does one whose end tag was forgotten, if its JSON is complete.
"""

from __future__ import annotations

import re

from thalweg.text.event_builder import CallBuilder, EventBuilder
from thalweg.text.lexer import Token, literal_marks
from thalweg.text.partial_json import JsonObject, after_json

# Models also write ASCII bars and underscores.
MARKS = literal_marks(
    {
        "<｜tool▁calls▁begin｜>": "calls",
        "<｜tool▁calls▁end｜>": "/calls",
        "<｜tool▁call▁begin｜>": "call",
        "<｜tool▁call▁end｜>": "/call",
        "<｜tool▁sep｜>": "sep",
    },
    fold={ord("|"): ord("｜"), ord("_"): ord("▁")},
)
_BEFORE_JSON = re.compile(r"\s*([^\s`<>{}]*)\s*(?:```(?:json)?)?\s*(?:```)?\s*")
_NAME = re.compile(r"[^\s`<>{}]{1,256}")
_LONGEST_HEAD = 4096  # characters before the JSON: beyond it there is no call


class SepTools:
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
            if call is None or not call.text(token):
                self._answer.text(token if call is None else self._lost(call))
            return
        if call is not None and token.kind == "sep" and call.separate():
            return
        if call is not None:
            self._close(call, ended=True)
        if token.kind == "call":
            self._call = _Call(self._answer.call())
        elif token.kind in ("calls", "/calls"):
            self._answer.cut()

    def finish(self) -> None:
        if self._call is not None:
            self._close(self._call, ended=False)

    def _close(self, call: _Call, *, ended: bool) -> None:
        self._call = None
        self._answer.text(call.close(ended=ended))

    def _lost(self, call: _Call) -> str:
        self._call = None
        return call.close(ended=False)


class _Call:
    """One call between its tags."""

    def __init__(self, call: CallBuilder) -> None:
        self._call = call
        self._raw: list[str] = []
        self._header = ""
        self._before = ""  # between the separator and the JSON: the name and the fence of V3
        self._name = ""
        self._separated = False
        self._json = JsonObject()
        self._after: list[str] = []

    def separate(self) -> bool:
        """The separator came; False for a second one."""
        fresh = not self._separated
        self._separated = True
        return fresh

    def text(self, text: str) -> bool:
        """Take text; False when the call turned out malformed."""
        self._raw.append(text)
        if not self._separated:
            self._header += text
            return len(self._header) <= _LONGEST_HEAD
        elif self._json.done:
            self._after.append(text)
        else:
            return self._body(text)
        return True

    def close(self, *, ended: bool) -> str:
        """End the call, or give it up; returns the text around its JSON that is content after all."""
        if self._json.done:
            self._call.end(self._name)
            return after_json("".join(self._after))
        name = _name(self._header, self._before) if self._separated and not self._name else None
        if ended and name:
            self._call.arguments(name, "{}")
            self._call.end(name)
        else:
            self._call.fail(self._json.closing(), "".join(self._raw), self._json.held + self._json.rest)
        return ""

    def _body(self, text: str) -> bool:
        if not self._name:
            self._before += text
            at = self._before.find("{", 0, _LONGEST_HEAD)
            if at < 0:
                return len(self._before) < _LONGEST_HEAD
            name = _name(self._header, self._before[:at])
            if name is None:
                return False
            self._name, text = name, self._before[at:]
        self._call.arguments(self._name, self._json.feed(text))
        if self._json.done:
            self._after.append(self._json.rest)
            self._json.rest = ""
        return not self._json.bad


def _name(header: str, before: str) -> str | None:
    """The function's name: V3.1 puts it before the separator, V3 writes `function` there and the name on the next
    line.
    """
    found = _BEFORE_JSON.fullmatch(before)
    header = header.strip()
    if found is None or (found[1] and header not in ("function", "")):
        return None
    name = found[1] or header
    return name if _NAME.fullmatch(name) else None
