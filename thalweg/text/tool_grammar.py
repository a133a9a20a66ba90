"""Grammars of tool calls: the markup of each format around arguments that match the function's schema.

Marks that are single tokens are tokens in a grammar, so that text never contains one; the others are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.text.grammar import MAX_SOURCE, json_rule, literal, read_schema

MarkId = Callable[[str], int | None]
Function = Mapping[str, Any]

_MARK = re.compile(r"(<｜[^<>]*｜>|｜DSML｜|</?tool_call>|</?arg_(?:key|value)>|<\|[a-z_]+\|>)")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_KEY = re.compile(r'[^"<>\s]{1,128}')
# Schema keywords of an object whose members become DSML parameters. With any other keyword the call holds one JSON
# object.
_APART = {"type", "properties", "required", "additionalProperties", "$defs"}
_TEXT = r"(.|\n)*"
_LARK = "%lark"  # a string's own grammar, as a keyword of its schema
_PLAIN_STRINGS = ("deepseekv32", "glm45")  # formats that write strings as they are
_OPENING = re.compile(r'start: (?:"(?:[^"\\]|\\.)*" )?<\[(\d+)\]> ?')


class ToolGrammarSpec(NamedTuple):
    functions: Sequence[Function]  # as OpenAI's clients send them (name, parameters)
    forced: bool  # only calls; otherwise also text, or what `content` allows
    single: bool  # at most one call
    mark_id: MarkId  # mark → token id, or None
    content: str = ""  # rule of an answer without calls; "": any text
    only: Collection[str] = ()  # names of the functions that may be called; empty: all
    lark: Mapping[str, str] = {}  # function → Lark grammar of its only argument, a string

    def mark(self, text: str) -> str:
        """Text with marks in it, as terms of a Lark grammar."""
        terms = []
        for part in _MARK.split(text):
            token = self.mark_id(part) if part else None
            if part:
                terms.append(literal(part) if token is None else f"<[{token}]>")
        return " ".join(terms)


def tool_grammar(form: str, tools: ToolGrammarSpec) -> Grammar:
    """The grammar of an answer. form: of `thalweg.text.parser.TOOL_FORMATS`. Raises InvalidRequest."""
    functions: list[Function] = []
    unenforced: list[str] = []
    size = 0
    for i, function in enumerate(tools.functions):
        name = function["name"]
        if tools.only and name not in tools.only:
            continue
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"tools[{i}].function.name", "may have letters, digits and _.:/- only, at most 128")
        source = json.dumps(function.get("parameters") or {})
        field = f"tools[{i}].function.parameters"
        size += len(source)
        if size > MAX_SOURCE:
            raise InvalidRequest("tools", f"have schemas of more than {MAX_SOURCE} characters together")
        schema, notes = read_schema(source, field, function.get("strict") is True, name)
        if name in tools.lark:
            if form not in _PLAIN_STRINGS:
                raise InvalidRequest(field, f"has a Lark grammar: {form} calls are JSON, which has regex grammars only")
            schema["properties"] = {key: {"type": "string", _LARK: tools.lark[name]} for key in schema["properties"]}
        functions.append({"name": name, "parameters": _closed(schema)})
        unenforced += notes
    source = "\n".join(_FORMATS[form](tools._replace(functions=functions)))
    return Grammar("lark", source, field="tools", unenforced=tuple(unenforced))


def after_trigger(grammar: Grammar) -> Grammar:
    """Forced calls as a grammar that holds once the model has begun a call. NO_GRAMMAR if no token begins it."""
    opening = _OPENING.match(grammar.source)
    if opening is None:
        return NO_GRAMMAR
    return structs.replace(grammar, source="start: " + grammar.source[opening.end() :], trigger_id=int(opening[1]))


def _sep(tools: ToolGrammarSpec, before: str, after: str, closing: str) -> list[str]:
    """DeepSeek V3 to V3.1. before, after: text around the name; closing: text before the call's end mark."""
    begin, end = tools.mark("<｜tool▁calls▁begin｜>"), tools.mark("<｜tool▁calls▁end｜>")
    rules = [_block(tools, begin, f"calls {end}", '"\\n"?')]
    for i, function in enumerate(tools.functions):
        head = tools.mark(f"<｜tool▁call▁begin｜>{before}{function['name']}{after}")
        rules += [f"call{i}: {head} json{i} {tools.mark(f'{closing}<｜tool▁call▁end｜>')}", _arguments(i, function)]
    return rules


def _hermes(tools: ToolGrammarSpec) -> list[str]:
    rules = [_block(tools, tools.mark("<tool_call>"), "", '"\\n"')]
    for i, function in enumerate(tools.functions):
        head = tools.mark('\n{"name": ' + json.dumps(function["name"]) + ', "arguments": ')
        rules += [f"call{i}: {head} json{i} {tools.mark('}' + chr(10) + '</tool_call>')}", _arguments(i, function)]
    return rules


def _kimi(tools: ToolGrammarSpec) -> list[str]:
    begin, end = (tools.mark(f"<|tool_calls_section_{word}|>") for word in ("begin", "end"))
    rules = [_block(tools, begin, f"calls {end}", '"\\n"?')]
    for i, function in enumerate(tools.functions):
        head = tools.mark(f"<|tool_call_begin|>functions.{function['name']}:")
        json_begin, json_end = tools.mark("<|tool_call_argument_begin|>"), tools.mark("<|tool_call_end|>")
        rules += [f"call{i}: {head} /[0-9]{{1,3}}/ {json_begin} json{i} {json_end}", _arguments(i, function)]
    return rules


def _llama(tools: ToolGrammarSpec) -> list[str]:
    """An answer that begins with a brace is calls; any other is text."""
    call = "(" + " | ".join(f"call{i}" for i in range(len(tools.functions))) + ")"
    rest = "" if tools.forced else " | content" if tools.content else " | TEXT"
    rules = [f"start: calls{rest}", f"calls: {call}" + ("" if tools.single else f' ("; " {call})*')]
    if rest:
        rules.append(f"content: {tools.content}" if tools.content else f"TEXT: /([^{{]{_TEXT})?/")
    for i, function in enumerate(tools.functions):
        head = literal('{"name": ' + json.dumps(function["name"]) + ', "parameters": ')
        rules += [f'call{i}: {head} json{i} "}}"', _arguments(i, function)]
    return rules


def _glm(tools: ToolGrammarSpec) -> list[str]:
    rules = [_block(tools, tools.mark("<tool_call>"), "", '"\\n"?')]
    for i, function in enumerate(tools.functions):
        body, more = _parameters(tools, i, function, _glm_parameter)
        rules += [f'call{i}: {literal(function["name"])} "\\n"? {body} {tools.mark("</tool_call>")}', *more]
    return [*rules, f"TEXT_VALUE: /{_TEXT}/ & ~/{_TEXT}<\\/arg_value>{_TEXT}/"]


def _block(tools: ToolGrammarSpec, begin: str, rest: str, between: str) -> str:
    """The rules `start` and `calls`. rest "": the block is only its calls, with `begin` before each."""
    call = "(" + " | ".join(f"call{i}" for i in range(len(tools.functions))) + ")"
    more = f"({between} {call})*" if rest else f"({between} {begin} {call})*"
    calls = f"calls: {call}" if tools.single else f"calls: {call} {more}"
    block = f"{begin} {rest or 'calls'}"
    if tools.forced:
        return f"start: {block}\n{calls}"
    if tools.content:
        return f"start: {block} | content\ncontent: {tools.content}\n{calls}"
    if begin.startswith("<["):  # a token, which no text contains: text goes on up to it
        return f"start: TEXT | TEXT {block}\nTEXT: /{_TEXT}/\n{calls}"
    # The beginning of the block is text: after its first word comes either a block or text.
    word, _, tail = begin.partition(" ")
    head = f"head[lazy]: /{_TEXT}{re.escape(json.loads(word))}/"
    if not tail:
        return f"start: TEXT | head {rest or 'calls'}\nTEXT: /{_TEXT}/\n{head}\n{calls}"
    return f"start: head* TEXT | head+ {tail} {rest}\nTEXT: /{_TEXT}/\n{head}\n{calls}"


def _dsml(tools: ToolGrammarSpec) -> list[str]:
    begin, end = tools.mark("<｜DSML｜function_calls>\n"), tools.mark("</｜DSML｜function_calls>")
    rules = [_block(tools, begin, f"calls {end}", "")]
    for i, function in enumerate(tools.functions):
        head = tools.mark(f'<｜DSML｜invoke name="{function["name"]}">\n')
        body, more = _parameters(tools, i, function, _parameter)
        rules += [f"call{i}: {head} {body} {tools.mark('</｜DSML｜invoke>' + chr(10))}", *more]
    # A text ends with the first `</` before a mark; any other is part of it.
    return [*rules, f"text: chunk+\nchunk[lazy]: /{_TEXT}<\\//"]


MakeParameter = Callable[[ToolGrammarSpec, str, str, Any, Mapping[str, Any]], list[str]]


def _parameters(tools: ToolGrammarSpec, i: int, function: Function, parameter: MakeParameter) -> tuple[str, list[str]]:
    """The content of a call: parameters, one rule each, or one JSON object."""
    schema = function["parameters"]
    members = schema.get("properties", {})
    required = schema.get("required", ())
    apart = schema.keys() <= _APART and isinstance(members, dict) and isinstance(required, list | tuple)
    apart = apart and all(name in list(members) for name in required) and all(map(_KEY.fullmatch, members))
    if parameter is _glm_parameter:  # a string is written as it is, so no rule of JSON can hold it to more
        apart = apart and not any(_is_constrained_string(member) for member in members.values())
    if not apart:
        return f"json{i}", [_arguments(i, function)]
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs",) if key in schema}
    terms, rules = [], []
    for k, (name, member) in enumerate(members.items()):
        terms.append(f"p{i}x{k}" if name in required else f"p{i}x{k}?")
        rules += parameter(tools, f"p{i}x{k}", name, member, shared)
    return " ".join(terms), rules


def _parameter(tools: ToolGrammarSpec, rule: str, name: str, member: Any, shared: Mapping[str, Any]) -> list[str]:
    """The rule of one parameter: a string as it is, anything else as JSON."""
    ending = tools.mark("｜DSML｜parameter>\n")
    extra: list[str] = []
    texts = _texts(member)
    if isinstance(member, dict) and member.keys() <= {"type"} and member.get("type") == "string":
        string, value = "true", "text"
    elif isinstance(member, dict) and _LARK in member:  # a terminal of the grammar may have taken the `</`
        string, value, extra = "true", f'{rule}v "</"?', [_nested(rule, member)]
    elif texts:
        string, value = "true", "(" + " | ".join(map(literal, texts)) + ') "</"'
    else:
        schema = {**member, **shared} if isinstance(member, dict) else member
        string, value, extra = "false", f'{rule}v "</"', [f"{rule}v: {json_rule(schema)}"]
    head = tools.mark(f'<｜DSML｜parameter name="{name}" string="{string}">')
    return [f"{rule}: {head} {value} {ending}", *extra]


def _texts(member: Any) -> list[str]:
    """The values of an enumeration, if all are texts that can be written as they are."""
    texts = member.get("enum") if isinstance(member, dict) else None
    are_plain = isinstance(texts, list) and all(isinstance(text, str) and text and "<" not in text for text in texts)
    return texts if texts and are_plain else []


def _is_constrained_string(member: Any) -> bool:
    return isinstance(member, dict) and member.get("type") == "string" and not member.keys() <= {"type", "enum", _LARK}


def _nested(rule: str, member: Mapping[str, Any]) -> str:
    return f"{rule}v: %lark {{\n{member[_LARK]}\n}}"


def _glm_parameter(tools: ToolGrammarSpec, rule: str, name: str, member: Any, shared: Mapping[str, Any]) -> list[str]:
    """The same for GLM, whose reader takes a declared string as it is and all else as JSON."""
    head = f'{tools.mark(f"<arg_key>{name}</arg_key>")} "\\n"? {tools.mark("<arg_value>")}'
    end = tools.mark("</arg_value>")
    if not isinstance(member, dict) or member.get("type") != "string":
        schema = {**member, **shared} if isinstance(member, dict) else member
        return [f'{rule}: {head} {rule}v {end} "\\n"?', f"{rule}v: {json_rule(schema)}"]
    if _LARK in member:
        return [f'{rule}: {head} {rule}v {end} "\\n"?', _nested(rule, member)]
    if texts := _texts(member):
        return [f'{rule}: {head} ({" | ".join(map(literal, texts))}) {end} "\\n"?']
    return [f'{rule}: {head} TEXT_VALUE {end} "\\n"?']


def _arguments(i: int, function: Function) -> str:
    return f"json{i}: {json_rule({**function['parameters'], 'type': 'object'})}"


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which allows no others unless it says otherwise."""
    return {"properties": {}, "additionalProperties": False} | schema if schema.keys() <= _APART else schema


_FORMATS: Mapping[str, Callable[[ToolGrammarSpec], list[str]]] = {
    "deepseekv3": lambda tools: _sep(tools, "function<｜tool▁sep｜>", "\n```json\n", "\n```"),
    "deepseekv31": lambda tools: _sep(tools, "", "<｜tool▁sep｜>", ""),
    "deepseekv32": _dsml,
    "qwen25": _hermes,
    "glm45": _glm,
    "kimi_k2": _kimi,
    "llama3": _llama,
}
