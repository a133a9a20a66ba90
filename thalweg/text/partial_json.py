"""A JSON object that comes in pieces: passes on only text that a JSON object can begin with.

Keys, commas and numbers wait until their value has begun (or ended), so that a malformed call shows as little as it
can; the text of strings passes at once.
"""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_SCALAR = re.compile(r"[^\s,\]}\[{:\"]+")
_VALID_SCALAR = re.compile(r"(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)\Z", re.ASCII)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_MEMBER = re.compile(r'[\s,]*("(?:[^"\\\x00-\x1f]|\\.)*")\s*:\s*')
_DECODER = json.JSONDecoder()
_DEPTH = 128

# What may come next.
_OBJECT, _KEY_OR_END, _KEY, _IN_KEY, _COLON, _VALUE, _VALUE_OR_END, _IN_STRING, _IN_SCALAR, _NEXT, _DONE = range(11)


class PartialJson:
    """`feed` text until `done` or `bad`."""

    __slots__ = ("_pending", "_scalar", "_stack", "_state", "_text", "bad", "rest")

    def __init__(self) -> None:
        self._state = _OBJECT
        self._stack: list[str] = []
        self._text = ""  # part of an escape or of a number
        self._pending: list[str] = []  # complete, but its value has not begun
        self._scalar: list[str] = []
        self.rest = ""  # text after the object, or from the malformed position on
        self.bad = False

    @property
    def done(self) -> bool:
        return self._state == _DONE

    @property
    def in_string(self) -> bool:
        """Inside a string value."""
        return self._state == _IN_STRING

    @property
    def held(self) -> str:
        """Text taken in but not passed on (nor part of `rest`)."""
        return "".join((*self._pending, *self._scalar, self._text))

    def feed(self, text: str) -> str:
        text, self._text = self._text + text, ""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.done and not self.bad:
            step = self._step(text, at, out)
            if step < 0:  # needs more text
                self._text = text[at:]
                return "".join(out)
            at = step
        self.rest += text[at:]
        return "".join(out)

    def _step(self, text: str, at: int, out: list[str]) -> int:
        """Reads one piece at `at`. Returns the position after it, or -1 if more text may belong to it."""
        state = self._state
        if state in (_IN_STRING, _IN_KEY):
            return self._string(text, at, out)
        if state == _IN_SCALAR:
            return self._continue_scalar(text, at, out)
        space = _SPACE.match(text, at)
        if space:
            # Space before the object is dropped; elsewhere it waits with what it belongs to.
            if self._stack:
                self._pending.append(space.group())
            return space.end()
        return self._token(text[at], at, out)

    def _token(self, char: str, at: int, out: list[str]) -> int:
        state = self._state
        if char == '"' and state in (_KEY, _KEY_OR_END):
            self._hold(char, _IN_KEY)
        elif char == '"' and state in (_VALUE, _VALUE_OR_END):
            self._release(char, _IN_STRING, out)
        elif char == ":" and state == _COLON:
            self._hold(char, _VALUE)
        elif char == "," and state == _NEXT:
            self._hold(char, _KEY if self._stack[-1] == "}" else _VALUE)
        elif char == "{" and state == _OBJECT:
            # The outermost brace waits too: a call of which only `{` was right must not reach the client.
            self._stack.append("}")
            self._hold(char, _KEY_OR_END)
        elif char in "{[" and state in (_VALUE, _VALUE_OR_END) and len(self._stack) < _DEPTH:
            self._stack.append("}" if char == "{" else "]")
            self._release(char, _KEY_OR_END if char == "{" else _VALUE_OR_END, out)
        elif char in "}]" and state in (_NEXT, _KEY_OR_END, _VALUE_OR_END) and self._stack[-1] == char:
            self._stack.pop()
            self._release(char, _NEXT if self._stack else _DONE, out)
        elif state in (_VALUE, _VALUE_OR_END) and char not in ",:{}[]":
            self._state = _IN_SCALAR
            return at
        else:
            self.bad = True
            return at
        return at + 1

    def _string(self, text: str, at: int, out: list[str]) -> int:
        is_key = self._state == _IN_KEY
        plain = _PLAIN.match(text, at) or _ESCAPE.match(text, at)
        if plain:
            piece, end = plain.group(), plain.end()
        elif text[at] == '"':
            self._state = _COLON if is_key else _NEXT
            piece, end = '"', at + 1
        elif text[at] == "\\":
            if _PARTIAL_ESCAPE.match(text, at):
                return -1
            self.bad = True
            return at
        else:  # a raw newline or tab, which JSON wants escaped and models forget to
            piece, end = json.dumps(text[at])[1:-1], at + 1
        if is_key:
            self._pending.append(piece)
        else:
            out.append(piece)
        return end

    def _continue_scalar(self, text: str, at: int, out: list[str]) -> int:
        more = _SCALAR.match(text, at)
        if more:
            self._scalar.append(more.group())
            return more.end()
        scalar = "".join(self._scalar)
        if not _VALID_SCALAR.match(scalar):
            self.bad = True
            return at
        self._scalar.clear()
        self._release(scalar, _NEXT, out)
        return at

    def _hold(self, piece: str, state: int) -> None:
        self._pending.append(piece)
        self._state = state

    def _release(self, piece: str, state: int, out: list[str]) -> None:
        out += (*self._pending, piece)
        self._pending.clear()
        self._state = state


def whole_object(text: str) -> str:
    """One JSON object, with control characters escaped. Raises ValueError."""
    reader = PartialJson()
    out = reader.feed(text)
    if not reader.done or reader.rest.strip():
        raise ValueError("not one JSON object")
    return out


def whole_members(text: str) -> dict[str, object]:
    """The members of a JSON object that ended within `text`, the beginning of one."""
    members: dict[str, object] = {}
    at = text.find("{") + 1
    while at and (match := _MEMBER.match(text, at)):
        try:
            value, at = _DECODER.raw_decode(text, match.end())
        except ValueError:
            break
        if not text[at:].strip():  # a number may have had more digits
            break
        members[json.loads(match[1])] = value
    return members


def words_after_json(text: str) -> str:
    """The words between a JSON object and the end of its call: without a fence and surplus brackets."""
    return text.lstrip(" \t\r\n`}]").rstrip(" \t\r\n`")
