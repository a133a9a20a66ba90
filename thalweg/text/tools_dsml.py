"""Tool calls of DeepSeek V3.2 (DSML).

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="F">
    <｜DSML｜parameter name="k" string="true|false">v</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

string="true": v is the string as it stands. string="false": v is JSON, or a string where it is not. An invoke may hold one JSON object
instead of parameters, and may stand without the outer tags. `｜DSML｜` is one token inside the tags: nothing here looks at ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from thalweg.text.answer import Answer, Call
from thalweg.text.json_stream import JsonObject
from thalweg.text.lexer import Marks, Tag, Token

_BODY = re.compile(r'(?:[^<>\n"]|"[^"\n<]*")*')
_TAG = re.compile(r'\s*(function_calls|tool_calls|invoke|parameter)((?:\s+\w+\s*=\s*"[^"\n<]*")*)\s*')
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')
_NAME = re.compile(r"[^\s<>{}]{1,256}")
_OPEN_END = re.compile(r"[\n<]")  # what no quoted attribute goes across
_MARK = re.compile(r"[｜|]DSML[｜|]")
_LONGEST = 1024
_BLOCKS = ("function_calls", "/function_calls", "tool_calls", "/tool_calls")  # V4 says tool_calls
_ENDS_VALUE = ("parameter", "/parameter", "invoke", "/invoke", "/function_calls", "/tool_calls")


def _read(text: str, at: int) -> tuple[Tag, int] | None:
    """A tag ends at `>` outside quotes; a broken one at a newline, at the next `<`, or when it is too long to be one."""
    mark = _MARK.search(text, at)
    assert mark is not None, "the lexer found an opener here"
    limit = min(len(text), at + _LONGEST)
    body = _BODY.match(text, mark.end(), limit)
    assert body is not None, "the pattern matches the empty string"
    end = body.end()
    may_go_on = end == limit or (text[end] == '"' and not _OPEN_END.search(text, end, limit))
    if may_go_on and len(text) < at + _LONGEST:
        return None
    end += text[end : end + 1] == ">"
    return _tag(text[at:end], text[mark.end() : body.end()], closes="/" in text[at : mark.start()]), end


MARKS = Marks(("<｜DSML｜", "</｜DSML｜", "/｜DSML｜", "｜DSML｜"), _read, fold={ord("|"): ord("｜")})


class DsmlTools:
    """The tool layer: takes the tokens of the content, writes to the answer.

    is_string: (function, parameter) → the schema declares a string; asked only when a parameter has no `string` attribute.
    """

    def __init__(self, answer: Answer, is_string: Callable[[str, str], bool]) -> None:
        self._answer = answer
        self._is_string = is_string
        self._invoke: _Invoke | None = None

    def token(self, token: Token) -> None:
        invoke = self._invoke
        if invoke is not None:
            taken = invoke.text(token) if isinstance(token, str) else invoke.tag(token)
            if taken:
                return
            self._close(invoke, ended=not invoke.bad)
            if invoke.bad or (isinstance(token, Tag) and token.kind == "/invoke"):
                return
        if isinstance(token, str):
            self._answer.text(token)
        elif token.kind == "invoke" and _NAME.fullmatch(token.attributes.get("name", "")):
            self._invoke = _Invoke(self._answer.call(), token, self._is_string)
        elif token.kind in _BLOCKS:
            self._answer.cut()
        else:
            self._answer.text(_clean(token.raw))

    def finish(self) -> None:
        if self._invoke is not None:
            self._close(self._invoke, ended=False)

    def _close(self, invoke: _Invoke, *, ended: bool) -> None:
        self._invoke = None
        self._answer.text(invoke.close(ended=ended))


class _Invoke:
    """One call between its tags. `text` and `tag` return False when they end it: done, or `bad`."""

    def __init__(self, call: Call, begin: Tag, is_string: Callable[[str, str], bool]) -> None:
        self.bad = False
        self._call = call
        self._is_string = is_string
        self._name = begin.attributes["name"]
        self._raw = [begin.raw]
        self._left: list[str] = []  # raw text since the arguments were last passed on
        self._keys: set[str] = set()
        self._value: list[str] | None = None  # of the open parameter, unless it is a string
        self._in_string = False
        self._json: JsonObject | None = None
        self._after = ""

    def text(self, text: str) -> bool:
        self._raw.append(text)
        if self._in_string:
            self._pass(json.dumps(text, ensure_ascii=False)[1:-1])
        elif self._value is not None:
            self._value.append(text)
            self._left.append(text)
        elif self._json is not None and self._json.done:
            self._after += text
        elif self._json is not None or (not self._keys and text.lstrip().startswith("{")):
            self._object(text)
        else:
            self._left.append(text)
            self.bad = not text.isspace()
        return not self.bad

    def tag(self, tag: Tag) -> bool:
        if tag.kind in ("partial", "broken") and self._json is not None and self._json.done:
            self._after += "" if tag.kind == "partial" and _begins_tag(tag.raw) else _clean(tag.raw)
            return True
        if tag.kind == "partial":  # the text ended inside a tag: no part of a value
            self._raw.append(tag.raw)
            self._left.append("" if _begins_tag(tag.raw) else tag.raw)
            return True
        if self._open and tag.kind not in _ENDS_VALUE:
            return self.text(tag.raw)  # no structure of ours: part of the value as it stands
        if self._open:
            self._close_parameter()
        if tag.kind in ("parameter", "/parameter", "/invoke", "broken"):
            self._raw.append(tag.raw)
        if tag.kind == "parameter":
            self._left.append(tag.raw)
            self._parameter(tag)
            return not self.bad
        if tag.kind == "broken":
            self._left.append(tag.raw)
            self.bad = True
        return tag.kind == "/parameter"

    def close(self, *, ended: bool) -> str:
        """End the call, or give it up; returns text inside the invoke that is content after all."""
        json_object = self._json
        if json_object.done if json_object is not None else ended:
            if json_object is None:
                self._pass("}" if self._keys else "{}")
            self._call.end(self._name)
            return self._after.strip()
        left = "".join(self._left) if json_object is None else json_object.held + json_object.rest
        closing = ('"}' if self._in_string else "}") if json_object is None else json_object.closing()
        self._call.fail(closing, _clean("".join(self._raw)), _clean(left))
        return ""

    @property
    def _open(self) -> bool:
        return self._in_string or self._value is not None

    def _parameter(self, tag: Tag) -> None:
        key = tag.attributes.get("name")
        if key is None or key in self._keys or self._json is not None:
            self.bad = True
            return
        declared = tag.attributes.get("string")
        self._in_string = declared == "true" or (declared is None and self._is_string(self._name, key))
        self._keys.add(key)
        opening = ("{" if len(self._keys) == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        if self._in_string:
            self._pass(opening + '"')
        else:
            self._value = [opening]

    def _close_parameter(self) -> None:
        if self._value is None:
            self._in_string = False
            self._pass('"')
        else:
            opening, *parts = self._value
            self._value = None
            self._pass(opening + _as_json("".join(parts)))

    def _object(self, text: str) -> None:
        self._json = self._json or JsonObject()
        self._call.arguments(self._name, self._json.feed(text))
        self.bad = self._json.bad
        if self._json.done:
            self._after, self._json.rest = self._json.rest, ""

    def _pass(self, text: str) -> None:
        self._left.clear()
        self._call.arguments(self._name, text)


def _tag(raw: str, body: str, *, closes: bool) -> Tag:
    found = _TAG.fullmatch(body)
    if found is None:
        return Tag("broken", raw)
    return Tag(("/" if closes else "") + found[1], raw, dict(_ATTRIBUTE.findall(found[2])))


def _begins_tag(raw: str) -> bool:
    word = _MARK.split(raw, maxsplit=1)[-1].split(maxsplit=1)
    return not word or any(kind.startswith(word[0]) for kind in ("function_calls", "tool_calls", "invoke", "parameter"))


def _clean(raw: str) -> str:
    """Malformed markup as text: every character but the special tokens."""
    return _MARK.sub("", raw)


def _as_json(text: str) -> str:
    """The value of a parameter with string="false": itself where it is JSON, else a string."""
    try:
        json.loads(text, parse_constant=_no_constant, parse_int=float)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def string_parameters(functions: Mapping[str, Mapping[str, object]]) -> Callable[[str, str], bool]:
    """From function name → JSON schema of its parameters, whether a parameter is declared a string."""

    def is_string(function: str, parameter: str) -> bool:
        properties = functions.get(function, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return isinstance(schema, Mapping) and schema.get("type") == "string"

    return is_string
