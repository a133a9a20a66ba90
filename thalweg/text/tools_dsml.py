"""Tool calls of DeepSeek V3.2 (DSML).

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="F">
    <｜DSML｜parameter name="k" string="true|false">v</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

string="true": v is the string as it is. string="false": v is JSON, or a string if it is not. An invoke may hold one
JSON object instead of parameters; without parameters it may close itself, `<｜DSML｜invoke name="F"/>`. `｜DSML｜` is one
token inside the tags, but only text is read here.

An invoke may come without the outer tags: models forget them far into a long context, and also write such a tag in
text. So it counts only when it was closed, calls an offered function, and has the arguments that the schema requires;
until then nothing of it is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from thalweg.text.event_builder import CallReader, EventBuilder, Schemas, ToolLayer
from thalweg.text.lexer import Tag, TagSyntax, Token

_BODY = re.compile(r'(?:[^<>\n"]|"[^"\n<]*")*')
_TAG = re.compile(r'\s*(function_calls|tool_calls|invoke|parameter)((?:\s+\w+\s*=\s*"[^"\n<]*")*)\s*(/?)')
_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')
_NAME = re.compile(r"[^\s<>{}]{1,256}")
_OPEN_END = re.compile(r"[\n<]")  # what a quoted attribute does not contain
_MARK = re.compile(r"[｜|]DSML[｜|]")
_MAX_TAG = 1024
_BLOCKS = ("function_calls", "/function_calls", "tool_calls", "/tool_calls")  # V4 says tool_calls
_WRAPPERS = ("arguments", "input")  # parameters in which models write all arguments as one object
_ENDS_CALL = ("invoke", "invoke/", "/invoke", "/function_calls", "/tool_calls")
_ENDS_VALUE = ("parameter", "/parameter", *_ENDS_CALL)


def _read(text: str, at: int) -> tuple[Tag, int] | None:
    """A tag ends at `>` outside quotes. A broken one ends at a newline, at the next `<`, or at _MAX_TAG."""
    mark = _MARK.search(text, at)
    assert mark is not None, "the lexer found an opener here"
    limit = min(len(text), at + _MAX_TAG)
    body = _BODY.match(text, mark.end(), limit)
    assert body is not None, "the pattern matches the empty string"
    end = body.end()
    may_go_on = end == limit or (text[end] == '"' and not _OPEN_END.search(text, end, limit))
    if may_go_on and len(text) < at + _MAX_TAG:
        return None
    end += text[end : end + 1] == ">"
    return _tag(text[at:end], text[mark.end() : body.end()], "/" in text[at : mark.start()]), end


TAGS = TagSyntax(("<｜DSML｜", "</｜DSML｜", "/｜DSML｜", "｜DSML｜"), _read, fold={ord("|"): ord("｜")})


class DsmlTools(ToolLayer):
    def __init__(self, builder: EventBuilder, schemas: Schemas) -> None:
        super().__init__(builder, schemas)
        self._wrapped = False  # inside the outer tags

    def token(self, token: Token) -> None:
        call = self.call
        if isinstance(call, _Invoke):
            if call.text(token) if isinstance(token, str) else call.tag(token):
                return
            self.close(ended=not call.bad)
            if call.bad or (isinstance(token, Tag) and token.kind == "/invoke"):
                return
        if isinstance(token, str):
            self.builder.text(token)
        elif token.kind in ("invoke", "invoke/") and self._is_offered(_name(token)):
            self.call = _Invoke(self.builder, token, self.schemas.get(_name(token), {}), bare=not self._wrapped)
            if token.kind == "invoke/":
                self.close(ended=True)
        elif token.kind in _BLOCKS:
            self._wrapped = not token.kind.startswith("/")
            self.builder.cut()
        else:
            self.builder.text(without_marks(token.raw))

    def _is_offered(self, name: str) -> bool:
        known = self._wrapped or not self.schemas or name in self.schemas
        return known and _NAME.fullmatch(name) is not None


class _Invoke(CallReader):
    """One call. `text` and `tag` return False when they end it: complete, or `bad`.

    bare: no outer tag is before it, so the call is held until `close` has checked it.
    """

    def __init__(self, builder: EventBuilder, begin: Tag, schema: Mapping[str, object], *, bare: bool) -> None:
        super().__init__(builder, hold=bare)
        self.name = _name(begin)
        self.raw = [begin.raw]
        self.bad = False
        self._schema, self._bare = schema, bare
        self._left: list[str] = []  # raw text since the arguments were last passed on
        self._keys: set[str] = set()
        self._value: list[str] | None = None  # of the open parameter, unless it is a string
        self._in_string = False
        self._has_object = False  # a JSON object instead of parameters
        self._wraps = ""  # of an open parameter that may hold all arguments: its attribute `string`
        self._wrapper = ""  # the first parameter, if it may hold all arguments: what is written of it, as JSON

    def read(self, text: str) -> bool:
        if self._in_string:
            self._pass_on(json.dumps(text, ensure_ascii=False)[1:-1])
        elif self._value is not None:
            self._value.append(text)
            self._left.append(text)
        elif self._has_object or (not self._keys and not self.after and text.lstrip().startswith("{")):
            text = text if self._has_object else text.lstrip()
            self._has_object = True
            self.bad = not self.feed_json(text)
        else:  # words between the parameters
            words = text if self.after else text.lstrip()
            self.after += [words] if words else []
        return not self.bad

    def tag(self, tag: Tag) -> bool:
        if tag.kind in ("partial", "broken") and self.json.done:
            self.raw.append(tag.raw)
            self.after.append("" if tag.kind == "partial" and _begins_tag(tag.raw) else without_marks(tag.raw))
            return True
        if tag.kind == "partial":  # the text ended inside a tag, which is no part of a value
            self.raw.append(tag.raw)
            self._left.append("" if _begins_tag(tag.raw) else tag.raw)
            return True
        in_value = self._in_string or self._value is not None
        if tag.kind not in (_ENDS_CALL if self._has_object else _ENDS_VALUE):
            if self.json.in_string if self._has_object else in_value:
                return self.text(tag.raw)  # part of the value
        if in_value:
            self._close_parameter()
        if tag.kind in ("parameter", "/parameter", "/invoke", "broken"):
            self.raw.append(tag.raw)
        if tag.kind == "parameter":
            self._left.append(tag.raw)
            self._parameter(tag)
            return not self.bad
        if tag.kind == "broken":
            self._left.append(tag.raw)
            self.bad = True
        return tag.kind == "/parameter"

    def close(self, ended: bool) -> str:
        if ended and self._wrapper and (inner := _object_in(self._wrapper)) is not None:
            self._wrapper, self._keys = "", set(json.loads(inner, parse_int=float))
            if self._keys:
                self._pass_on(inner.removesuffix("}"))
        self._write_wrapper()
        only_words = bool(self.after) and not self._keys
        complete = self.json.done if self._has_object else ended and not only_words
        if complete and not (self._bare and (not ended or self._lacks_arguments())):
            if not self._has_object:
                self._pass_on("}" if self._keys else "{}")
            return self.succeed()
        left = (self.json.held + self.json.rest if self._has_object else "") + "".join((*self.after, *self._left))
        return self.fail(without_marks("".join(self.raw)), without_marks(left))

    def waiting(self) -> str:
        opening, *parts = self._value or [""]
        return self.json.held + opening + json_beginning("".join(parts))

    def _lacks_arguments(self) -> bool:
        required = self._schema.get("required")
        keys = json.loads(self.held, parse_int=float) if self._has_object else self._keys
        return isinstance(required, list) and any(isinstance(key, str) and key not in keys for key in required)

    def _parameter(self, tag: Tag) -> None:
        key = tag.attributes.get("name")
        if key is None or key in self._keys or self._has_object:
            self.bad = True
            return
        self._write_wrapper()
        declared = tag.attributes.get("string")
        others = _properties(self._schema)
        if not self._keys and key in _WRAPPERS and others and key not in others:
            self._keys.add(key)
            self._value, self._wraps = ["{" + json.dumps(key) + ": "], declared or "false"
            return
        self._in_string = declared == "true" or (declared is None and is_string(self._schema, key))
        self._keys.add(key)
        opening = ("{" if len(self._keys) == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        if self._in_string:
            self._pass_on(opening + '"')
        else:
            self._value = [opening]

    def _close_parameter(self) -> None:
        if self._value is None:
            self._in_string = False
            self._pass_on('"')
        else:
            opening, *parts = self._value
            self._value = None
            text, is_text = "".join(parts), self._wraps == "true"
            value = opening + (json.dumps(text, ensure_ascii=False) if is_text else as_json(text))
            if self._wraps:
                self._wrapper, self._wraps = value, ""
                self._left.clear()
            else:
                self._pass_on(value)

    def _write_wrapper(self) -> None:
        """The parameter did not hold all arguments."""
        if self._wrapper:
            self.pass_on(self._wrapper)
            self._wrapper = ""

    def _pass_on(self, text: str) -> None:
        self._left.clear()
        self.pass_on(text)


def _tag(raw: str, body: str, closes: bool) -> Tag:
    match = _TAG.fullmatch(body)
    if match is None or (match[3] and (closes or match[1] != "invoke")):
        return Tag("broken", raw)
    closes = closes or (match[1] == "parameter" and not match[2])  # without a name it can only be the end
    return Tag(("/" if closes else "") + match[1] + match[3], raw, dict(_ATTRIBUTE.findall(match[2])))


def _name(tag: Tag) -> str:
    return tag.attributes.get("name", "").strip()


def _begins_tag(raw: str) -> bool:
    word = _MARK.split(raw, maxsplit=1)[-1].split(maxsplit=1)
    return not word or any(kind.startswith(word[0]) for kind in ("function_calls", "tool_calls", "invoke", "parameter"))


def without_marks(raw: str) -> str:
    """Markup that is no call as text: without the special tokens."""
    return _MARK.sub("", raw)


def _object_in(wrapper: str) -> str | None:
    """The JSON object that is the only member of an object, as it is or as text; None if it is something else.
    wrapper: the object without its closing brace.
    """
    (value,) = json.loads(wrapper + "}", parse_int=float).values()
    inner = (value if isinstance(value, str) else wrapper.partition(": ")[2]).strip()
    try:
        return inner if isinstance(json.loads(inner, parse_constant=_refuse_constant, parse_int=float), dict) else None
    except (ValueError, RecursionError):
        return None


def _properties(schema: Mapping[str, object]) -> Mapping[str, object]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def is_string(schema: Mapping[str, object], key: str) -> bool:
    """Whether the schema of a function declares the parameter as a string."""
    member = _properties(schema).get(key)
    return isinstance(member, Mapping) and member.get("type") == "string"


def as_json(text: str) -> str:
    """The value of a parameter that is not declared as a string: a string if it is not JSON."""
    try:
        json.loads(text, parse_constant=_refuse_constant, parse_int=float)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def json_beginning(text: str) -> str:
    """The beginning of a value for `as_json` as the beginning of JSON."""
    start = text.lstrip()
    is_json = start[:1] in ("", *'"{[-0123456789') or any(word.startswith(start) for word in ("true", "false", "null"))
    return text if is_json else json.dumps(text, ensure_ascii=False)[:-1]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
