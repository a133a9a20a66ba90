"""Tool calls of DeepSeek V3.2 (DSML).

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="F">
    <｜DSML｜parameter name="k" string="true|false">v</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

string="true": v is the string as it stands. string="false": v is JSON, or a string where it is not. An invoke may hold
one JSON object instead of parameters; without parameters it may close itself, `<｜DSML｜invoke name="F"/>`. `｜DSML｜` is
one token inside the tags: nothing here looks at ids.

An invoke may stand without the outer tags: models forget them far into a long context, and write such a tag in prose,
too. So it counts only when it was closed, calls a function that was offered, and has the arguments that the schema
requires; until then nothing of it is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from thalweg.text.event_builder import CallBuilder, EventBuilder
from thalweg.text.lexer import Tag, TagSyntax, Token
from thalweg.text.partial_json import JsonObject, after_json

_BODY = re.compile(r'(?:[^<>\n"]|"[^"\n<]*")*')
_TAG = re.compile(r'\s*(function_calls|tool_calls|invoke|parameter)((?:\s+\w+\s*=\s*"[^"\n<]*")*)\s*(/?)')
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')
_NAME = re.compile(r"[^\s<>{}]{1,256}")
_OPEN_END = re.compile(r"[\n<]")  # what no quoted attribute goes across
_MARK = re.compile(r"[｜|]DSML[｜|]")
_LONGEST = 1024
_BLOCKS = ("function_calls", "/function_calls", "tool_calls", "/tool_calls")  # V4 says tool_calls
_ENDS_CALL = ("invoke", "invoke/", "/invoke", "/function_calls", "/tool_calls")
_ENDS_VALUE = ("parameter", "/parameter", *_ENDS_CALL)


def _read(text: str, at: int) -> tuple[Tag, int] | None:
    """A tag ends at `>` outside quotes; a broken one at a newline, at the next `<`, or when it is too long to be
    one.
    """
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


MARKS = TagSyntax(("<｜DSML｜", "</｜DSML｜", "/｜DSML｜", "｜DSML｜"), _read, fold={ord("|"): ord("｜")})


class DsmlTools:
    """The tool layer: takes the tokens of the content, writes to the answer.

    schemas: function name → JSON schema of its parameters; empty when the functions are not known.
    """

    def __init__(self, answer: EventBuilder, schemas: Mapping[str, Mapping[str, object]]) -> None:
        self._answer = answer
        self._schemas = schemas
        self._wrapped = False
        self._invoke: _Invoke | None = None

    @property
    def in_call(self) -> bool:
        return self._invoke is not None

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
        elif token.kind in ("invoke", "invoke/") and self._offered(_name(token)):
            schema = self._schemas.get(_name(token), {})
            self._invoke = _Invoke(self._answer.call(hold=not self._wrapped), token, schema, bare=not self._wrapped)
            if token.kind == "invoke/":
                self._close(self._invoke, ended=True)
        elif token.kind in _BLOCKS:
            self._wrapped = not token.kind.startswith("/")
            self._answer.cut()
        else:
            self._answer.text(without_marks(token.raw))

    def finish(self) -> None:
        if self._invoke is not None:
            self._close(self._invoke, ended=False)

    def _close(self, invoke: _Invoke, *, ended: bool) -> None:
        self._invoke = None
        self._answer.text(invoke.close(ended=ended))

    def _offered(self, name: str) -> bool:
        known = self._wrapped or not self._schemas or name in self._schemas
        return known and _NAME.fullmatch(name) is not None


class _Invoke:
    """One call between its tags. `text` and `tag` return False when they end it: done, or `bad`.

    bare: no outer tag precedes it, and the call is held: `close` looks whether it is one.
    """

    def __init__(self, call: CallBuilder, begin: Tag, schema: Mapping[str, object], *, bare: bool) -> None:
        self.bad = False
        self._call = call
        self._schema = schema
        self._bare = bare
        self._name = _name(begin)
        self._raw = [begin.raw]
        self._left: list[str] = []  # raw text since the arguments were last passed on
        self._keys: set[str] = set()
        self._value: list[str] | None = None  # of the open parameter, unless it is a string
        self._in_string = False
        self._json: JsonObject | None = None
        self._after: list[str] = []  # text beside the arguments

    def text(self, text: str) -> bool:
        self._raw.append(text)
        if self._in_string:
            self._pass(json.dumps(text, ensure_ascii=False)[1:-1])
        elif self._value is not None:
            self._value.append(text)
            self._left.append(text)
        elif self._json is not None and self._json.done:
            self._after.append(text)
        elif self._json is not None or (not self._keys and not self._after and text.lstrip().startswith("{")):
            self._object(text)
        else:  # words between the parameters
            words = text if self._after else text.lstrip()
            self._after += [words] if words else []
        return not self.bad

    def tag(self, tag: Tag) -> bool:
        if tag.kind in ("partial", "broken") and self._json is not None and self._json.done:
            self._raw.append(tag.raw)
            self._after.append("" if tag.kind == "partial" and _begins_tag(tag.raw) else without_marks(tag.raw))
            return True
        if tag.kind == "partial":  # the text ended inside a tag: no part of a value
            self._raw.append(tag.raw)
            self._left.append("" if _begins_tag(tag.raw) else tag.raw)
            return True
        if tag.kind not in (_ENDS_VALUE if self._json is None else _ENDS_CALL) and self._in_text:
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
        done = (ended and not self._only_words) if json_object is None else json_object.done
        if done and not (self._bare and (not ended or self._lacks_arguments())):
            if json_object is None:
                self._pass("}" if self._keys else "{}")
            self._call.end(self._name)
            return after_json("".join(self._after))
        left = ("" if json_object is None else json_object.held + json_object.rest) + "".join(
            (*self._after, *self._left)
        )
        closing = ('"}' if self._in_string else "}") if json_object is None else json_object.closing()
        self._call.fail(closing, without_marks("".join(self._raw)), without_marks(left))
        return ""

    def _lacks_arguments(self) -> bool:
        required = self._schema.get("required")
        keys = self._keys if self._json is None else json.loads(self._call.held, parse_int=float)
        return isinstance(required, list) and any(isinstance(key, str) and key not in keys for key in required)

    @property
    def _only_words(self) -> bool:
        return bool(self._after) and not self._keys

    @property
    def _open(self) -> bool:
        return self._in_string or self._value is not None

    @property
    def _in_text(self) -> bool:
        return self._open if self._json is None else self._json.in_string

    def _parameter(self, tag: Tag) -> None:
        key = tag.attributes.get("name")
        if key is None or key in self._keys or self._json is not None:
            self.bad = True
            return
        declared = tag.attributes.get("string")
        self._in_string = declared == "true" or (declared is None and self._declares_string(key))
        self._keys.add(key)
        opening = ("{" if len(self._keys) == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        if self._in_string:
            self._pass(opening + '"')
        else:
            self._value = [opening]

    def _declares_string(self, key: str) -> bool:
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return isinstance(schema, Mapping) and schema.get("type") == "string"

    def _close_parameter(self) -> None:
        if self._value is None:
            self._in_string = False
            self._pass('"')
        else:
            opening, *parts = self._value
            self._value = None
            self._pass(opening + _as_json("".join(parts)))

    def _object(self, text: str) -> None:
        if self._json is None:
            self._json, text = JsonObject(), text.lstrip()
        self._call.arguments(self._name, self._json.feed(text))
        self.bad = self._json.bad
        if self._json.done:
            self._after.append(self._json.rest)
            self._json.rest = ""

    def _pass(self, text: str) -> None:
        self._left.clear()
        self._call.arguments(self._name, text)


def _tag(raw: str, body: str, *, closes: bool) -> Tag:
    found = _TAG.fullmatch(body)
    if found is None or (found[3] and (closes or found[1] != "invoke")):
        return Tag("broken", raw)
    return Tag(("/" if closes else "") + found[1] + found[3], raw, dict(_ATTRIBUTE.findall(found[2])))


def _name(tag: Tag) -> str:
    return tag.attributes.get("name", "").strip()


def _begins_tag(raw: str) -> bool:
    word = _MARK.split(raw, maxsplit=1)[-1].split(maxsplit=1)
    return not word or any(kind.startswith(word[0]) for kind in ("function_calls", "tool_calls", "invoke", "parameter"))


def without_marks(raw: str) -> str:
    """Markup that is no call as text: every character but the special tokens."""
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
