"""Forced tool calls without a model: any random text that the grammar allows is a call that the parser reads and the
schema accepts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.text.grammar import GrammarCompiler, GrammarMatcher
from thalweg.text.parser import TOOL_FORMATS
from thalweg.text.tokenizer import Tokenizer
from thalweg.text.tool_grammar import ToolGrammarSpec, after_trigger, tool_grammar
from tools.fuzz_checks import parse

TOKENIZER = Tokenizer(Path(__file__).resolve().parents[2] / "models" / "tiny")
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_ids)
MEMBERS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "^[a-c<]{1,3}$"},
    {"type": ["string", "null"]},
    {"type": "integer", "minimum": -5, "maximum": 99},
    {"type": "boolean"},
    {"enum": ["a", "<", 1, None]},
    {"enum": ["two words", "<b>"]},
    {"const": "</think>"},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 0, "maximum": 5}]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    {"type": "object", "properties": {"a<b": {"type": "boolean"}}, "required": ["a<b"], "additionalProperties": False},
]


def parameters(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(["a", "name", "größe", "x y", 'qu"ote', "a.b-c"], rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: rng.choice(MEMBERS) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    return schema | rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "boolean"}}])


def write(matcher: GrammarMatcher, rng: random.Random, most: int = 400) -> str | None:
    """An output, each token at random among those that the mask allows; None when it is not complete after `most`
    tokens.
    """
    ids: list[int] = []
    bits = np.zeros((1, (TOKENIZER.vocab_size + 31) // 32), np.int32)
    for _ in range(most):
        bits[:] = 0
        COMPILER.fill([(matcher, 0)], bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        assert allowed, "nothing may come next, and the output is not complete"
        ends = set(TOKENIZER.eos_ids) & set(allowed)
        if ends and (len(allowed) == len(ends) or rng.random() < 0.7):
            return TOKENIZER.decode(ids, False)
        allowed = [i for i in allowed if i not in ends]
        closing = [i for i in allowed if set(b'"<') & set(TOKENIZER.token_bytes(i))]  # or a string would go on for long
        ids.append(rng.choice(closing if closing and rng.random() < 0.35 else allowed))
        matcher.accept(ids[-1:])
        assert not matcher.error, matcher.error
    return None


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("mark_id", [TOKENIZER.mark_id, lambda text: None], ids=["marks are tokens", "marks are text"])
def test_whatever_a_grammar_lets_through_is_a_valid_call(form: str, mark_id: Callable[[str], int | None]) -> None:
    rng = random.Random(11)
    complete = 0
    for i in range(25):
        tools = [{"name": "f", "parameters": parameters(rng)}, {"name": "ns.g-1"}]
        grammar = tool_grammar(form, ToolGrammarSpec(tools, True, i % 3 > 0, mark_id))
        text = write(COMPILER.compile(grammar), rng)
        if text is None:
            continue
        complete += 1
        message = parse(text, None, form, functions=tools)
        assert message.content is None and message.calls and (len(message.calls) == 1 or i % 3 == 0), text
        for call in message.calls:
            wanted = tools[0]["parameters"] if call.name == "f" else {"maxProperties": 0}
            jsonschema.Draft202012Validator(wanted).validate(json.loads(call.arguments))
    assert complete > 15


TERMS = 'start: term ("+" term)*\nterm: NUM | "(" term "<" term ")"\nNUM: /[0-9]+/'
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@pytest.mark.parametrize("form", ["deepseekv32", "glm45"])
@pytest.mark.parametrize("mark_id", [TOKENIZER.mark_id, lambda text: None], ids=["marks are tokens", "marks are text"])
def test_an_input_matches_its_lark_grammar(form: str, mark_id: Callable[[str], int | None]) -> None:
    tools, complete = [{"name": "f", "parameters": INPUT}], 0
    grammar = tool_grammar(form, ToolGrammarSpec(tools, True, True, mark_id, lark={"f": TERMS}))
    for seed in range(12):
        text = write(COMPILER.compile(grammar), random.Random(seed))
        if text is None:
            continue
        complete += 1
        (call,) = parse(text, None, form, functions=tools).calls
        value = json.loads(call.arguments)["input"]
        while "(" in value:  # a pair is a term
            value, found = re.subn(r"\([0-9]+<[0-9]+\)", "1", value)
            assert found, text
        assert re.fullmatch(r"[0-9]+(\+[0-9]+)*", value), text
    assert complete > 3


@pytest.mark.parametrize("mark_id", [TOKENIZER.mark_id, lambda text: None], ids=["marks are tokens", "marks are text"])
def test_a_call_can_end_where_its_grammar_takes_any_text(mark_id: Callable[[str], int | None]) -> None:
    """The terminal takes the `</` of the end tag too."""
    spec = ToolGrammarSpec([{"name": "f", "parameters": INPUT}], True, True, mark_id, lark={"f": "start: /(.|\\n)+/"})
    matcher = COMPILER.compile(tool_grammar("deepseekv32", spec))
    text = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="input" string="true">a</b'
    text += "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    assert mark_id("｜DSML｜") is None or matcher.accept(TOKENIZER.encode(text, False)), matcher.error


@pytest.mark.parametrize("form", ["deepseekv31", "qwen25", "kimi_k2", "llama3"])
def test_a_lark_grammar_is_refused_where_arguments_are_json(form: str) -> None:
    spec = ToolGrammarSpec([{"name": "f", "parameters": INPUT}], True, True, TOKENIZER.mark_id, lark={"f": TERMS})
    with pytest.raises(InvalidRequest, match=r"tools\[0\].*Lark"):
        tool_grammar(form, spec)


@pytest.mark.parametrize("form", ["deepseekv3", "deepseekv31", "deepseekv32"])
def test_from_its_first_mark_on_a_call_is_valid(form: str) -> None:
    rng, opening = random.Random(5), "<" if form == "deepseekv32" else ""
    complete = 0
    for _ in range(10):
        tools = [{"name": "f", "parameters": parameters(rng)}, {"name": "ns.g-1"}]
        grammar = after_trigger(tool_grammar(form, ToolGrammarSpec(tools, True, False, TOKENIZER.mark_id)))
        text = write(COMPILER.compile(grammar), rng)
        if text is None:
            continue
        complete += 1
        message = parse(
            f"Well: {opening}{TOKENIZER.decode([grammar.trigger_id], False)}{text}", None, form, functions=tools
        )
        assert (message.content or "").strip() == "Well:" and message.calls, text
        for call in message.calls:
            wanted = tools[0]["parameters"] if call.name == "f" else {"maxProperties": 0}
            jsonschema.Draft202012Validator(wanted).validate(json.loads(call.arguments))
    assert complete > 5


def test_a_mark_that_is_no_token_triggers_nothing() -> None:
    spec = ToolGrammarSpec([{"name": "f"}], True, False, lambda text: None)
    assert not any(after_trigger(tool_grammar(form, spec)).is_set for form in TOOL_FORMATS)


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_json_has_whitespace_only_where_it_is_asked_for(kind: str) -> None:
    for text, is_compact in ('{"a":[1,2],"b":"x y"}', True), ('{"a": [1,\n 2], "b": "x y"}', False):
        for any_whitespace in (False, True):
            matcher = COMPILER.compile(Grammar(kind, "{}", any_whitespace=any_whitespace))
            assert matcher.accept(TOKENIZER.encode(text, False)) == (is_compact or any_whitespace)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("choice", '["<think>", "</think> so"]'),
        Grammar("json_schema", '{"enum": ["｜DSML｜", "<｜tool▁calls▁begin｜>"]}'),
        Grammar("regex", "<｜DSML｜invoke>"),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_value_that_spells_a_mark_is_text_and_not_the_token(grammar: Grammar) -> None:
    for seed in range(6):
        text = write(COMPILER.compile(grammar), random.Random(seed))
        assert text and text.strip('"') in grammar.source
