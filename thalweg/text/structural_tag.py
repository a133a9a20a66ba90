"""Structural tags: free text with structures in it. Compiles xgrammar's two forms to a Lark grammar.

The new form is a tree of formats (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html), the old one a list of
structures that triggers begin. A lexeme of free text is lazy: it ends with the first text that may end it, so a format
without an end of its own must know what comes after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

SchemaRule = Callable[[Any, str], str]  # (schema, its path) → a term of the grammar
MAX_EXPRESSION = 1 << 14  # characters of a regex or EBNF, whose meaning grows faster than its text
MAX_FORMATS = 1000
MAX_DEPTH = 32
_TEXT = r"(.|\n)"
_NAME = re.compile(r'[^<>"\s]{1,128}')


class TagError(ValueError):
    """What is wrong with a structural tag. path: of the field, to be added to the tag's own."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


def to_lark(form: Any, schema_rule: SchemaRule) -> str:
    """The grammar of a format. Raises TagError."""
    compiler = _Compiler(schema_rule)
    start = compiler.term(form, ".format", None)
    return "\n".join(["%llguidance {}", f"start: {start}", *compiler.rules])


def old_form(tag: Mapping[str, Any], schema_rule: SchemaRule) -> str:
    """The grammar of {"structures": [{"begin", "schema", "end"}], "triggers": [text]}. Raises TagError."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise TagError("", "must have a format, or structures and triggers that are not empty")
    tags = []
    for i, structure in enumerate(structures):
        if not isinstance(structure, dict):
            raise TagError(f".structures[{i}]", "must be an object with begin, schema and end")
        schema = structure.get("schema", structure.get("parameters", {}))
        tags.append({**structure, "content": {"type": "json_schema", "json_schema": schema}})
    compiler = _Compiler(schema_rule)
    start = compiler.triggered({"triggers": triggers, "tags": tags}, "", None, "structures", "schema")
    return "\n".join(["%llguidance {}", f"start: {start}", *compiler.rules])


class _Compiler:
    """Collects the rules. `end`: texts of which one follows, which the term then includes; None: whatever follows."""

    def __init__(self, schema_rule: SchemaRule) -> None:
        self.schema_rule, self.rules, self.count = schema_rule, [], 0  # type: SchemaRule, list[str], int

    def rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def term(self, form: Any, path: str, end: Sequence[str] | None) -> str:
        self.count += 1
        if self.count > MAX_FORMATS or path.count(".") > MAX_DEPTH:
            raise TagError(path, f"has more than {MAX_FORMATS} formats, or more than {MAX_DEPTH} within each other")
        if not isinstance(form, dict):
            raise TagError(path, "must be a format, that is an object with a type")
        kind = str(form.get("type"))
        if kind in _OPEN_ENDED:
            return _OPEN_ENDED[kind](self, form, path, end)
        if kind not in _CLOSED:
            known = ", ".join(sorted({*_CLOSED, *_OPEN_ENDED}))
            raise TagError(f"{path}.type", f"is {kind!r}, which is not supported here; there is {known}")
        return _CLOSED[kind](self, form, path) + self.ends(end)

    def ends(self, end: Sequence[str] | None) -> str:
        return "" if not end else " (" + " | ".join(map(_literal, end)) + ")"

    def text(self, excludes: Sequence[str], end: Sequence[str] | None, repeat: str = "*") -> str:
        """Free text, up to the first of the texts that end it."""
        closing = "" if not end else "(" + "|".join(map(_escaped, end)) + ")"
        name = f"T{len(self.rules)}"
        without = "".join(f" & ~/{_TEXT}*{_escaped(text)}{_TEXT}*/" for text in excludes if text not in (end or ()))
        self.rules.append(f"{name}: /{_TEXT}{repeat}{closing}/{without}")
        return self.rule(name, "[lazy]") if end else name

    def const_string(self, form: Any, path: str) -> str:
        return _literal(_string(form, "value", path))

    def json_schema(self, form: Any, path: str) -> str:
        style = form.get("style", "json")
        if form["type"] == "qwen_xml_parameter" or style == "qwen_xml":
            return self.qwen_parameters(form, path)
        if style != "json":
            raise TagError(f"{path}.style", f"is {style!r}; there is json and qwen_xml")
        if form.get("any_order"):
            raise TagError(f"{path}.any_order", "is not supported: members come in the order of the schema")
        return self.rule(self.schema_rule(form.get("json_schema"), f"{path}.json_schema"))

    def qwen_parameters(self, form: Any, path: str) -> str:
        """`<parameter=name>value</parameter>` for each member: a string as it is, all else as JSON."""
        schema, where = form.get("json_schema"), f"{path}.json_schema"
        members = schema.get("properties") if isinstance(schema, dict) else None
        if not isinstance(members, dict) or not all(map(_NAME.fullmatch, members)):
            raise TagError(where, "must have properties whose names have no space, quotation mark, < or >")
        self.schema_rule(schema, where)  # for its errors and notes
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        terms, required, closing = [], schema.get("required") or (), "</parameter>"
        for name, member in members.items():
            if isinstance(member, dict) and member.get("type") == "string" and not isinstance(member.get("enum"), list):
                if constraint := next((key for key in member if key in _ON_STRINGS), None):
                    raise TagError(f"{where}.properties.{name}.{constraint}", "is not supported on a qwen_xml string")
                value = self.text((), [closing])
            elif isinstance(member, dict) and member.get("type") == "string":
                texts = [text for text in member["enum"] if isinstance(text, str)]
                value = f"({' | '.join(map(_literal, texts))}) {_literal(closing)}"
            else:
                whole = {**member, **shared} if isinstance(member, dict) else member
                rule = self.rule(self.schema_rule(whole, f"{where}.properties.{name}"))
                value = rf"/\s*/ {rule} /\s*/ {_literal(closing)}"
            term = self.rule(rf"{_literal(f'<parameter={name}>')} {value} /\s*/")
            terms.append(term if name in required else f"{term}?")
        return "(" + (" ".join(terms) or '""') + ")"

    def regex(self, form: Any, path: str) -> str:
        return self.rule(f"/{_slashed(_string(form, 'pattern', path))}/")

    def grammar(self, form: Any, path: str) -> str:
        """An EBNF grammar, whose rules get names of their own."""
        key = "ebnf" if "ebnf" in form else "grammar"
        try:
            source = any_to_lark(_string(form, key, path))
        except TagError:
            raise
        except Exception as error:  # the library raises nothing more precise
            raise TagError(f"{path}.{key}", "is not a grammar") from error
        if "%" in re.sub(r'"(\\.|[^"\\])*"|/(\\.|[^/\\\n])*/', "", source.replace("%llguidance {}", "")):
            raise TagError(f"{path}.{key}", "may have no % directives within a structural tag")
        return self._renamed(source)

    def _renamed(self, source: str) -> str:
        number = len(self.rules)
        names = set(re.findall(r"^([A-Za-z_][\w-]*)(?=(?:\[[^\]]*\])?\s*:)", source, re.MULTILINE))

        def rename(found: re.Match[str]) -> str:
            word = found[0]
            suffix = f"_g{number}" if word.islower() or not word[0].isupper() else f"_G{number}"
            return word + suffix if found[1] is None and word in names else word

        text = re.sub(
            r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/)|[A-Za-z_][\w-]*', rename, source.replace("%llguidance {}", "")
        )
        self.rules.append(text)
        return f"start_g{number}"

    def token(self, form: Any, path: str) -> str:
        token = form.get("token")
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return f"<[{token}]>"
        if isinstance(token, str) and re.fullmatch(r"<[^<>\s\[\]]+>", token):
            return token
        raise TagError(f"{path}.token", "must be a token id, or the name of a special token in angle brackets")

    def tag(self, form: Any, path: str) -> str:
        return self.after_begin(form, path, "", "content")

    def after_begin(self, form: Any, path: str, begun: str, content: str) -> str:
        """What follows the first `begun` of a tag. content: the field that has it, for messages."""
        begin, end = form.get("begin"), form.get("end")
        if isinstance(begin, str):
            head = _literal(begin.removeprefix(begun)) if begin != begun else ""
        else:
            head = self._token(begin, f"{path}.begin")
        ends = [end] if isinstance(end, str) else end
        place = f"{path}.{content}" if content else path
        if not isinstance(ends, list):
            tail = self._token(ends, f"{path}.end")
            return f"{head} {self.term(form.get('content'), place, None)} {tail}"
        if not ends or not all(isinstance(text, str) for text in ends):
            raise TagError(f"{path}.end", "must be a text, a list of texts or a token")
        if "" in ends:
            return f"{head} {self.term(form.get('content'), place, None)}"
        return f"{head} {self.term(form.get('content'), place, ends)}"

    def _token(self, value: Any, path: str) -> str:
        if not isinstance(value, dict) or value.get("type") != "token":
            raise TagError(path, "must be a text or a token")
        return self.token(value, path)

    def any_text(self, form: Any, path: str, end: Sequence[str] | None) -> str:
        if form.get("max_tokens") is not None:
            raise TagError(f"{path}.max_tokens", "is not supported: give max_chars")
        limit = form.get("max_chars")
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit < 1 << 20):
            raise TagError(f"{path}.max_chars", f"must be a number from 0 to {(1 << 20) - 1}")
        return self.text(_strings(form, "excludes", path), end, "*" if limit is None else f"{{0,{limit}}}")

    def triggered_tags(self, form: Any, path: str, end: Sequence[str] | None) -> str:
        return self.triggered(form, path, end, "tags", "content")

    def triggered(self, form: Any, path: str, end: Sequence[str] | None, field: str, content: str) -> str:
        """Text up to a trigger, the rest of one of its tags, and so on."""
        triggers, tags = _strings(form, "triggers", path), _list(form, "tags", path)
        bodies: dict[str, list[str]] = {}
        whole = []
        for i, tag in enumerate(tags):
            where = f"{path}.{field}[{i}]"
            if not isinstance(tag, dict) or not isinstance(tag.get("begin"), str):
                raise TagError(where, "must be an object with begin, end and what is between")
            trigger = next((text for text in triggers if text and tag["begin"].startswith(text)), None)
            if trigger is None:
                raise TagError(f"{where}.begin", "does not begin with any of the triggers")
            bodies.setdefault(trigger, []).append(self.rule(self.after_begin(tag, where, trigger, content)))
            whole.append(f"{_literal(trigger)} {bodies[trigger][-1]}")
        return self._dispatched(form, bodies, path, end, whole)

    def dispatch(self, form: Any, path: str, end: Sequence[str] | None) -> str:
        bodies: dict[str, list[str]] = {}
        for i, entry in enumerate(_list(form, "rules", path)):
            where = f"{path}.rules[{i}]"
            if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str) or not entry[0]:
                raise TagError(where, "must be a pair of a text and a format")
            bodies.setdefault(entry[0], []).append(self.rule(self.term(entry[1], f"{where}[1]", None)))
        stop = form.get("loop") is False
        return self._dispatched({**form, "stop_after_first": stop}, bodies, path, end, [])

    def _dispatched(
        self, form: Any, bodies: Mapping[str, list[str]], path: str, end: Sequence[str] | None, whole: Sequence[str]
    ) -> str:
        """whole: the tags with their triggers."""
        excludes, stops = _strings(form, "excludes", path), bool(form.get("stop_after_first"))
        calls = [f"{self.text(excludes, [trigger])} ({' | '.join(rest)})" for trigger, rest in bodies.items()]
        call = "(" + " | ".join(calls) + ")"
        text = self.text([*excludes, *bodies] if not end else excludes, end)
        first = f"({' | '.join(whole)})"
        if form.get("at_least_one"):
            return f"({first}{self.ends(end)})" if stops else f"({first} {call}* {text})"
        return f"({call}{self.ends(end)} | {text})" if stops else f"({call}* {text})"

    def tags_with_separator(self, form: Any, path: str) -> str:
        tags = _list(form, "tags", path)
        one = "(" + " | ".join(self.rule(self.tag(tag, f"{path}.tags[{i}]")) for i, tag in enumerate(tags)) + ")"
        separator = _string(form, "separator", path)
        more = "" if form.get("stop_after_first") else f" ({_literal(separator) if separator else ''} {one})*"
        return f"({one}{more})" + ("" if form.get("at_least_one") else "?")

    def sequence(self, form: Any, path: str, end: Sequence[str] | None) -> str:
        elements = _list(form, "elements", path)
        terms = []
        skip = False
        for i, element in enumerate(elements):
            where = f"{path}.elements[{i}]"
            is_last = i == len(elements) - 1
            if skip:
                skip = False
                if is_last:
                    terms.append(self.ends(end))
                continue
            ending = end if is_last else None
            if not is_last and isinstance(element, dict) and element.get("type") in _UNLIMITED:
                follower = elements[i + 1]
                if not isinstance(follower, dict) or follower.get("type") != "const_string":
                    raise TagError(where, "must come last, or before a const_string, which ends it")
                ending, skip = [_string(follower, "value", f"{path}.elements[{i + 1}]")], True
            terms.append(self.term(element, where, ending))
        return "(" + " ".join(filter(None, terms)) + ")"

    def either(self, form: Any, path: str, end: Sequence[str] | None) -> str:
        elements = _list(form, "elements", path)
        return "(" + " | ".join(self.term(one, f"{path}.elements[{i}]", end) for i, one in enumerate(elements)) + ")"

    def repeated(self, form: Any, path: str) -> str:
        counts = {"optional": (0, 1), "star": (0, -1), "plus": (1, -1)}.get(form["type"])
        low, high = counts or (form.get("min"), form.get("max"))
        if not all(isinstance(n, int) and -1 <= n <= 10_000 for n in (low, high)) or low < 0 or -1 < high < low:
            raise TagError(path, "needs min and max from 0 to 10000, max -1 for no limit")
        content = form.get("content")
        if isinstance(content, dict) and content.get("type") in _UNLIMITED:
            raise TagError(f"{path}.content", f"is {content['type']}, which cannot be repeated")
        inner = self.rule(self.term(content, f"{path}.content", None))
        return f"{inner}{{{low},{'' if high < 0 else high}}}"


_UNLIMITED = {"any_text", "triggered_tags", "dispatch"}
_ON_STRINGS = {"minLength", "maxLength", "pattern", "format", "const"}
_CLOSED: Mapping[str, Callable[[_Compiler, Any, str], str]] = {
    "const_string": _Compiler.const_string,
    "json_schema": _Compiler.json_schema,
    "qwen_xml_parameter": _Compiler.json_schema,
    "regex": _Compiler.regex,
    "grammar": _Compiler.grammar,
    "ebnf": _Compiler.grammar,
    "token": _Compiler.token,
    "tag": _Compiler.tag,
    "tags_with_separator": _Compiler.tags_with_separator,
    **dict.fromkeys(("optional", "star", "plus", "repeat"), _Compiler.repeated),
}
_OPEN_ENDED: Mapping[str, Callable[[_Compiler, Any, str, Sequence[str] | None], str]] = {
    "any_text": _Compiler.any_text,
    "triggered_tags": _Compiler.triggered_tags,
    "dispatch": _Compiler.dispatch,
    "sequence": _Compiler.sequence,
    "or": _Compiler.either,
}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    """An expression between slashes."""
    if "\n" in pattern:
        pattern = pattern.replace("\n", r"\n")
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern)


def _escaped(text: str) -> str:
    """A text within an expression between slashes."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _string(form: Mapping[str, Any], key: str, path: str) -> str:
    value = form.get(key)
    if not isinstance(value, str) or not value and key != "separator":
        raise TagError(f"{path}.{key}", "must be a text that is not empty")
    if len(value) > MAX_EXPRESSION:
        raise TagError(f"{path}.{key}", f"has {len(value)} characters; at most {MAX_EXPRESSION} are compiled")
    return value


def _strings(form: Mapping[str, Any], key: str, path: str) -> list[str]:
    values = form.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise TagError(f"{path}.{key}", "must be a list of texts that are not empty")
    return values


def _list(form: Mapping[str, Any], key: str, path: str) -> list[Any]:
    values = form.get(key)
    if not isinstance(values, list) or not values:
        raise TagError(f"{path}.{key}", "must be a list that is not empty")
    return values
