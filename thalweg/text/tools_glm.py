"""Tool calls of GLM-4.5 to GLM-5.

    <tool_call>F
    <arg_key>k</arg_key>
    <arg_value>v</arg_value>
    </tool_call>

The line breaks are optional. v is the string as it is if the schema says so; else it is JSON, or a string if it is not.
Behind the name there may be one JSON object with all arguments instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from thalweg.text.event_builder import CallReader, EventBuilder, ToolLayer
from thalweg.text.lexer import Tag, Token, literal_tags
from thalweg.text.partial_json import whole_object
from thalweg.text.tools_dsml import as_json, is_string, json_beginning

TAGS = literal_tags(
    {
        "<tool_call>": "call",
        "</tool_call>": "/call",
        "<arg_key>": "key",
        "</arg_key>": "/key",
        "<arg_value>": "value",
        "</arg_value>": "/value",
    }
)
_NAME = re.compile(r"[^\s<>{}]{1,256}")
_PLACES = {"key": ("name", "between"), "/key": ("key",), "value": ("after key",), "/value": ("value",)}  # of the tags


class GlmTools(ToolLayer):
    def token(self, token: Token) -> None:
        call = self.call
        if isinstance(call, _GlmCall):
            if call.text(token) if isinstance(token, str) else call.tag(token):
                return
            self.close(ended=isinstance(token, Tag) and not call.bad)
            if isinstance(token, str) or token.kind == "/call":
                return
        if isinstance(token, str):
            self.builder.text(token)
        elif token.kind == "call":
            self.call = _GlmCall(self.builder, self.schemas)
        else:
            self.builder.cut()


class _GlmCall(CallReader):
    """One call. `text` and `tag` return False when they end it: complete, or `bad`."""

    def __init__(self, builder: EventBuilder, schemas: Mapping[str, Mapping[str, object]]) -> None:
        super().__init__(builder)
        self.bad = False
        self._schemas, self._at = schemas, "name"  # "name", "key", "after key", "value", "between" arguments
        self._written = ""  # of the name, or of the key
        self._opening = ""  # of a value that is not a string: what comes before it
        self._value: list[str] = []
        self._keys: set[str] = set()

    def read(self, text: str) -> bool:
        if self._at in ("name", "key"):
            self._written += text
        elif self._at == "value" and self._opening:
            self._value.append(text)
        elif self._at == "value":
            self.pass_on(json.dumps(text, ensure_ascii=False)[1:-1])
        elif words := text if self.after else text.lstrip():  # between the arguments
            self.after.append(words)
        return True

    def tag(self, tag: Tag) -> bool:
        if tag.kind not in _PLACES:  # the end of this call, or the beginning of another
            self.bad = self._at in ("key", "after key", "value")
            return False
        if self._at not in _PLACES[tag.kind]:
            self.bad = True
        elif tag.kind == "key":
            self.bad = not self._name_is_known()
            self._at, self._written = "key", ""
        elif tag.kind == "/key":
            self._at = "after key"
        elif tag.kind == "value":
            self._begin_value(self._written.strip())
        else:
            self._end_value()
        return not self.bad

    def close(self, ended: bool) -> str:
        if ended and self._at == "name" and (arguments := self._object()):
            self.pass_on(arguments)
            return self.succeed()
        if ended and self._at in ("name", "between") and self._name_is_known():
            self.pass_on("}" if self._keys else "{}")
            return self.succeed()
        is_shown = self._at in ("name", "between") or (self._at == "value" and not self._opening)
        key = "" if is_shown else self._written
        return self.fail(left="".join((*self.after, key, *self._value)))

    def waiting(self) -> str:
        if self._at in ("key", "after key"):
            return self._before_key() + json.dumps(self._written.strip(), ensure_ascii=False)[:-1]
        return self._opening + json_beginning("".join(self._value))

    def _before_key(self) -> str:
        return ", " if self._keys else "{"

    def _object(self) -> str:
        """The JSON object behind the name; "" if there is none."""
        name, brace, rest = self._written.partition("{")
        try:
            arguments = whole_object(brace + rest) if brace and _NAME.fullmatch(name.strip()) else ""
        except ValueError:
            return ""
        self.name = name.strip()
        return arguments

    def _name_is_known(self) -> bool:
        self.name = self.name or self._written.strip()
        return _NAME.fullmatch(self.name) is not None

    def _begin_value(self, key: str) -> None:
        self._at, self.bad = "value", key in self._keys or not key
        opening = self._before_key() + json.dumps(key, ensure_ascii=False) + ": "
        self._keys.add(key)
        if is_string(self._schemas.get(self.name, {}), key):
            self.pass_on(opening + '"')
        else:
            self._opening = opening

    def _end_value(self) -> None:
        self._at = "between"
        self.pass_on(self._opening + as_json("".join(self._value)) if self._opening else '"')
        self._opening = ""
        self._value.clear()
