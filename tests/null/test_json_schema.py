"""JSON schemas as grammars: what is enforced, what is named instead, and what is refused. With tokens of one byte."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.text.ecma_regex import UnsupportedPattern, to_rust
from thalweg.text.grammar import check
from tools.schema_suite import COMPILER, walk

INTERNALS = "coerce_one_of", "(in regex)", "lark", "NoExtension", "llguidance", "lexer", "\n"
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}


def accepts(grammar: Grammar, text: str) -> bool:
    state = COMPILER.compile(grammar)
    return state.accept(list(text.encode())) and state.state.is_accepting()


def of(schema: Any, strict: bool = False) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), field="schema", strict=strict)


# schema, texts that match, texts that do not
ENFORCED: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string", "format": "made-up"}, ['"anything"'], ["1"]),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2023-12-31"'], ['"2023-02-29"', '"1900-02-29"']),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"', '"24:00:00Z"']),
    ({"type": "string", "format": "date-time"}, ['"2000-02-29T01:02:03.5+01:00"'], ['"2023-02-29T01:02:03Z"']),
    ({"type": "string", "format": "json-pointer"}, ['""', '"/a~0/b"'], ['"a"', '"/~2"']),
    ({"type": "string", "format": "uri-reference"}, ['"../a?b#c"', '"https://a.b/c"', '"x:y"'], ['"a b"', '"%zz"']),
    ({"type": "string", "pattern": r"^\d+-[\w.]+$"}, ['"12-a.b"'], ['"१-a"', '"12-é"']),
    ({"type": "string", "pattern": "^a.c$"}, ['"abc"'], ['"a\\rc"', '"a\\nc"']),
    ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
    ({"oneOf": [CAT, DOG]}, ['{"kind":"cat"}', '{"kind":"wolf"}'], ['{"kind":"cow"}']),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["1.5", "null"]),
    (
        {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
        ['{"kind":"dog"}'],
        ['{"kind":1}', "{}"],
    ),
    # a key that is escaped is the same key
    ({"properties": {"a": {"type": "integer"}}}, ['{"a":1}', '{"b":"x"}'], ['{"\\u0061":"x"}', '{"a":"x"}']),
    # older drafts
    ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, ["4"], ["3"]),
    (
        {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
        ["[]", "[null]"],
        ["[1]", "[null,null]"],
    ),
    ({"$ref": "#/definitions/a%25", "definitions": {"a%": {"type": "null"}}}, ["null"], ["1"]),
    ({"$ref": "#node", "$defs": {"n": {"$anchor": "node", "type": "null"}}}, ["null"], ["1"]),
    ({"$ref": "#node", "definitions": {"n": {"id": "#node", "type": "null"}}}, ["null"], ["1"]),
    (
        {"$id": "http://a.b/c", "properties": {"x": {"$ref": "d"}}, "$defs": {"d": {"$id": "d", "type": "null"}}},
        ['{"x":null}'],
        ['{"x":1}'],
    ),
    (
        {"properties": {"a": {"$ref": "#/oneOf/0"}}, "oneOf": [{"type": "object"}, {"type": "null"}]},
        ['{"a":{}}'],
        ['{"a":1}'],
    ),
    # an applicator between the keywords of objects
    (
        {"patternProperties": {"^x": {"type": "null"}}, "anyOf": [{}], "additionalProperties": False},
        ['{"xy":null}', "{}"],
        ['{"a":null}', '{"x":1}'],
    ),
    ({"prefixItems": [{"type": "null"}], "additionalItems": False}, ["[null,1]", '"a"'], ["[1]"]),
    ({"items": [{}], "unevaluatedItems": False}, ["[1]"], ["[1,2]"]),
    ({"properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
    ({"type": "array", "maxItems": 1_000_000}, ["[1,2]"], ["1"]),
    (
        {"type": "object", "properties": {"me": {"$ref": "#"}}, "additionalProperties": False},
        ['{"me":{"me":{}}}'],
        ['{"me":1}'],
    ),
    ({"type": "number", "minimum": 0.1 + 0.2, "maximum": 1e15}, ["0.4", "1"], ["0.3", "-1"]),
    ({"const": {"a": [1, None]}}, ['{"a":[1,null]}'], ['{"a":[1]}']),
    (True, ["1", "{}"], ["x"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda case: json.dumps(case)[:60])
def test_a_schema_is_enforced_in_full(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = of(schema, strict=True)
    assert check(grammar) == ()
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


# schema, the place that is named, a text that breaks it and passes, a text that breaks the rest and does not
NAMED: list[tuple[Any, str, str, str]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "/uniqueItems", "[1,1]", '["a"]'),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "/propertyNames", '{"b":1}', "1"),
    ({"type": "integer", "not": {"const": 1}}, "/not", "1", '"a"'),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "/dependencies", '{"a":1}', "1"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "/dependentRequired", '{"a":1}', "1"),
    ({"type": "string", "pattern": "^(?=.*a).*$"}, "/pattern", '"b"', "1"),
    ({"type": "string", "pattern": r"^(a|b)\1$"}, "/pattern", '"ab"', "1"),
    ({"type": "integer", "oneOf": [{"minimum": 1}, {"minimum": 2}]}, "/oneOf", "3", "0"),
    ({"type": "integer", "if": {"minimum": 1}, "then": {"multipleOf": 2}}, "/if", "3", '"a"'),
    ({"type": "array", "contains": {"const": 1}}, "/contains", "[]", "1"),
    ({"type": "string", "const": "a\0b"}, "/const", '"ab"', "1"),
    ({"type": "string", "pattern": "^a\0b$"}, "/pattern", '"ab"', "1"),
    ({"type": "string", "pattern": r"^a[\x00]b$"}, "/pattern", '"ab"', "1"),
    ({"type": "string", "format": "iri"}, "/format", '"a b"', "1"),
    (
        {"properties": {"a/b c": {"type": "array", "uniqueItems": True}}},
        "/properties/a~1b%20c/uniqueItems",
        '{"a/b c":[1,1]}',
        '{"a/b c":1}',
    ),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer", "not": {}}}}, "/$defs/x/not", "1", '"a"'),
    ({"type": "integer", "maximum": 2**63}, "/maximum", str(2**63 + 1), '"a"'),
    ({"type": "integer", "const": -(2**63)}, "/const", "1", '"a"'),
    ({"properties": {"a": {}, "b": {}}, "minProperties": 1, "type": "object"}, "/minProperties", "{}", "1"),
    (
        {"additionalProperties": {"type": "null"}, "minProperties": 2},
        "/minProperties",
        '{"a":null,"a":null}',
        '{"a":1}',
    ),
    ({"type": "object", "$ref": "http://elsewhere/schema"}, "/$ref", "{}", "1"),
    (
        {"patternProperties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False},
        "/patternProperties",
        '{"a":1}',
        '{"c":null}',
    ),
]


@pytest.mark.parametrize(("schema", "place", "passes", "fails"), NAMED, ids=lambda case: json.dumps(case)[:60])
def test_what_is_not_enforced_is_named(schema: Any, place: str, passes: str, fails: str) -> None:
    (note,) = check(of(schema))
    assert note.startswith(f"schema#{place} ") and not any(word in note for word in INTERNALS), note
    assert accepts(of(schema), passes) and not accepts(of(schema), fails)
    with pytest.raises(InvalidRequest, match="strict") as refused:
        check(of(schema, strict=True))
    assert refused.value.field == "schema" and f"#{place} " in refused.value.message


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a": {"type": "objec"}}}, "#/properties/a/type"),
    ({"items": {"required": True}}, "#/items/required"),
    ({"properties": {"a": 1}}, "#/properties/a"),
    ({"anyOf": []}, "#/anyOf"),
    ({"$ref": "#/nowhere"}, "#/$ref"),
    ({"type": "object", "properties": {"a": {"enum": [1], "type": "string"}}, "required": ["a"]}, "#/properties/a"),
    ({"minLength": -1}, "#/minLength"),
    ({"multipleOf": 0}, "#/multipleOf"),
    ({"minimum": "1"}, "#/minimum"),
    (False, "JSON schema"),
]


@pytest.mark.parametrize(("schema", "place"), REFUSED, ids=lambda case: json.dumps(case)[:60])
def test_an_error_names_the_place_in_the_schema(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(of(schema))
    assert place in refused.value.message, refused.value.message
    assert not any(word in refused.value.message for word in INTERNALS)


def test_a_reference_is_followed_once_however_often_it_is_written() -> None:
    defs: dict[str, Any] = {
        f"d{i}": {"properties": {n: {"$ref": f"#/$defs/d{i + 1}"} for n in "abcd"}} for i in range(40)
    }
    started = time.thread_time()
    check(of({"$ref": "#/$defs/d0", "$defs": defs | {"d40": {"uniqueItems": True}}}))
    assert time.thread_time() - started < 2.0


def test_a_schema_that_grows_behind_references_is_refused_quickly() -> None:
    node: dict[str, Any] = {}
    for _ in range(24):  # a reference names each level, so each level's members count again for all above it
        node = {"properties": {"a": node} | {f"m{i}": {} for i in range(200)}}
    levels = {f"p{i}": {"$ref": "#/$defs/x" + "/properties/a" * i} for i in range(24)}
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match="too large"):
        check(of({"properties": levels, "$defs": {"x": node}}))
    assert time.thread_time() - started < 2.0


SCHEMAS = [schema for schema, *_ in ENFORCED if schema is not True] + [
    {
        "type": "object",
        "properties": {"a": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25}},
        "required": ["a"],
    },
    {
        "type": "array",
        "items": {"type": "integer", "multipleOf": 3, "minimum": -20, "maximum": 20},
        "minItems": 1,
        "maxItems": 3,
    },
    {"type": "string", "format": "email"},
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "duration"},
    {"type": "string", "format": "ipv6"},
    {
        "allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"], "properties": {"a": {"maximum": 9}}}],
        "type": "object",
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda case: json.dumps(case)[:60])
def test_a_random_output_is_valid(schema: Any) -> None:
    matcher, rng = COMPILER.compile(of(schema)), random.Random(5)
    validator = jsonschema.Draft202012Validator(
        schema | {"exclusiveMinimum": 3} if schema.get("exclusiveMinimum") is True else schema
    )
    if isinstance(schema.get("items"), list):
        validator = jsonschema.Draft7Validator(schema)
    elif schema.get("$ref") == "#node" and "definitions" in schema:
        validator = jsonschema.Draft4Validator(schema)
    for _ in range(20):
        text = walk(matcher, rng)
        if text is not None:
            validator.validate(json.loads(text))


def test_patterns_are_read_as_ecma_262_has_them() -> None:
    assert to_rust(r"^[\w-.]{2}{x}\/\u0041(?<n>a)??$") == r"^[\w\x{2d}\x{2e}]{2}\x{7b}x\x{7d}\x{2f}A(?:a)?$"
    assert to_rust(r"[]|[^]|[a&&[b]]") == r"[^\x{0}-\x{10ffff}]|(?s:.)|[a\x{26}\x{26}\x{5b}b]\x{5d}"
    assert to_rust(r"\ud83d\ude00") == "😀"
    for pattern in r"(?=a)", r"(?!a)", r"(?<=a)", r"\b", r"(a)\1", r"\k<n>", "a\\", "[a", r"\ud83d", "[z-a]", "(?i)a":
        with pytest.raises(UnsupportedPattern):
            to_rust(pattern)


OBJECT = {
    "type": "json_schema",
    "json_schema": {"type": "object", "properties": {"c": {"type": "string"}}, "required": ["c"]},
}
TAG = {"type": "tag", "begin": "<f=w>", "content": OBJECT, "end": "</f>"}
CALL = '<f=w>{"c": "Rome"}</f>'
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG]}
QWEN = {
    "type": "json_schema",
    "style": "qwen_xml",
    "json_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 5}},
        "required": ["city"],
    },
}
TAGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": 'Hi "x"!'}, ['Hi "x"!'], ["Hi"]),
    (OBJECT, ['{"c":"x"}'], ["{}"]),
    (THINK, ["<think>a < b</think>"], ["<think>a", "<think></think>x"]),
    ({**TAG, "end": ["</f>", "</g>"]}, ['<f=w>{"c":""}</g>'], ['<f=w>{"c":""}</h>']),
    (TRIGGERED, ["text", f"a {CALL} b {CALL}", "a <f"], ["<f=z>", '<f=w>{"c":1}</f>']),
    ({**TRIGGERED, "at_least_one": True}, [CALL, f"{CALL} and {CALL}!"], ["", f"x{CALL}"]),
    ({**TRIGGERED, "stop_after_first": True}, [f"x{CALL}", "x"], [f"{CALL}x"]),
    ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, [CALL], ["x", f"{CALL}x"]),
    ({**TRIGGERED, "excludes": ["bad"]}, [f"good{CALL}"], ["bad", f"bad{CALL}"]),
    ({"type": "tags_with_separator", "tags": [TAG], "separator": ","}, ["", CALL, f"{CALL},{CALL}"], [f"{CALL}{CALL}"]),
    ({"type": "sequence", "elements": [THINK, TRIGGERED]}, [f"<think>hm</think>yes{CALL}"], ["yes"]),
    (
        {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"}, OBJECT]},
        ['xEND{"c":""}'],
        ["x"],
    ),
    ({"type": "or", "elements": [{"type": "const_string", "value": "no"}, OBJECT]}, ["no", '{"c":""}'], ["yes"]),
    ({**THINK, "content": TRIGGERED}, [f"<think>a{CALL}b</think>"], ["<think>a</think>b"]),
    ({"type": "grammar", "grammar": 'root ::= "a" x\nx ::= [0-9]'}, ["a1"], ["ax"]),
    ({"type": "regex", "pattern": "[0-9]/[0-9]"}, ["1/2"], ["12"]),
    ({"type": "any_text", "max_chars": 3, "excludes": ["z"]}, ["abc"], ["abcd", "z"]),
    (
        {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "ab"}},
        ["ab", "abab"],
        ["", "ababab"],
    ),
    (
        {
            "type": "sequence",
            "elements": [{"type": "optional", "content": {"type": "const_string", "value": "p"}}, OBJECT],
        },
        ['p{"c":""}'],
        ["p"],
    ),
    (
        {"type": "dispatch", "rules": [["<a>", OBJECT], ["<b>", {"type": "const_string", "value": "k"}]]},
        ["x <b>k y"],
        ["<b>z"],
    ),
    (
        QWEN,
        ["<parameter=city>\nRome <b>\n</parameter>\n<parameter=days>\n3\n</parameter>"],
        ["<parameter=city>x</parameter><parameter=days>9</parameter>"],
    ),
    (
        {"type": "qwen_xml_parameter", "json_schema": QWEN["json_schema"]},
        ["<parameter=city>x</parameter>"],
        ["<parameter=days>1</parameter>"],
    ),
    ({**TAG, "begin": {"type": "token", "token": 256}}, [], [CALL]),
]


@pytest.mark.parametrize(("form", "good", "bad"), TAGS, ids=lambda case: json.dumps(case)[:50])
def test_a_structural_tag_of_the_new_form(form: Any, good: list[str], bad: list[str]) -> None:
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    assert check(grammar) == ()
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


WRONG_TAGS: list[tuple[Any, str]] = [
    ({"type": "poem"}, "tag.format.type"),
    ({"type": "any_tokens"}, "tag.format.type"),
    ({**QWEN, "style": "kimi_k3_xml"}, "tag.format.style"),
    ({"type": "sequence", "elements": [{**TAG, "end": 1}]}, "tag.format.elements[0].end"),
    ({"type": "or", "elements": []}, "tag.format.elements"),
    ({"type": "any_text", "max_tokens": 3}, "tag.format.max_tokens"),
    ({**TRIGGERED, "triggers": ["x"]}, "tag.format.tags[0].begin"),
    ({"type": "sequence", "elements": [{"type": "any_text"}, OBJECT]}, "tag.format.elements[0]"),
    ({"type": "grammar", "grammar": 'start: %json {"type": "null"}'}, "tag.format.grammar"),
    ({**TAG, "content": {"type": "json_schema", "json_schema": {"type": "objec"}}}, "tag.format.content.json_schema"),
    (7, "tag.format"),
]


@pytest.mark.parametrize(("form", "field"), WRONG_TAGS, ids=[field for _, field in WRONG_TAGS])
def test_what_is_wrong_with_a_structural_tag_is_named(form: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(Grammar("structural_tag", json.dumps({"format": form}), field="tag"))
    assert refused.value.field == field


def test_a_structural_tag_names_what_it_does_not_enforce() -> None:
    form = {**TAG, "content": {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}}
    (note,) = check(Grammar("structural_tag", json.dumps({"format": form}), field="tag"))
    assert note.startswith("tag.format.content.json_schema#/uniqueItems ")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(a"),
        ("regex", r"a\b"),
        ("regex", "a$b"),
        ("ebnf", "root ::= ("),
        ("ebnf", 'start: "a'),
        ("lark", "start: x"),
    ],
)
def test_an_error_in_an_expression_has_none_of_the_library_in_it(kind: str, source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(Grammar(kind, source))
    assert not any(word in refused.value.message for word in INTERNALS), refused.value.message


def test_a_grammar_that_no_text_matches_is_said_to_be_so() -> None:
    with pytest.raises(InvalidRequest, match="no text matches it"):
        COMPILER.compile(Grammar("ebnf", 'root ::= root "a"'))
