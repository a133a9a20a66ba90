"""Reasoning and tool parsers: golden cases at every split, bugs of other engines, random markup."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.core.errors import UnsupportedConfig
from thalweg.text.events import Event, ParsedAnswer, ParsedCall, PartKind
from thalweg.text.parser import AnswerParser, is_in_thought
from thalweg.text.partial_json import whole_members
from tools.fuzz_checks import collect, parse

CASES = json.loads((Path(__file__).parent / "data" / "parser_cases.json").read_text(encoding="utf-8"))["cases"]
SPECIAL = re.compile(r"<｜[^｜]*｜>|｜DSML｜|</?think>")


def run(pieces: Iterable[str], *formats: str | None, **options: Any) -> list[Event]:
    ids = (f"call_{i}" for i in itertools.count())
    parser = AnswerParser(*formats, new_id=lambda: next(ids), **options)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return events + parser.finish()


def deltas(events: Iterable[Event]) -> list[tuple[PartKind, str]]:
    return [(event.part.kind, event.text) for event in events if event.type == "delta"]


def split(pieces: Sequence[str], how: str) -> list[str]:
    text = "".join(pieces)
    if how == "as_is":
        return list(pieces)
    if how == "whole":
        return [text]
    if how == "char":
        return list(text)
    if how == "atomic":
        found = [(m.start(), m.end()) for m in SPECIAL.finditer(text)]
        edges = sorted({*range(len(text) + 1)} - {i for a, b in found for i in range(a + 1, b)})
        return [text[a:b] for a, b in itertools.pairwise(edges)]
    size = int(how.removeprefix("size:"))
    return [text[i : i + size] for i in range(0, len(text), size)]


def random_split(text: str, rng: random.Random) -> list[str]:
    edges = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def calls_of(message: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls if call.complete]


def options_of(case: dict[str, Any], mode: str) -> dict[str, Any]:
    functions = [tool["function"] for tool in case["tools"]]
    return {"thinking": case["thinking"], "functions": functions, "hold": mode == "nonstream"}


def check(case: dict[str, Any], mode: str, events: list[Event]) -> None:
    message, expect = collect(events), case["expect"]
    got, want = message.content or "", expect["content"] or ""
    if expect["content_match"] == "exact":
        assert got == want
    elif expect["content_match"] == "strip":
        assert got.strip() == want.strip()
    assert (message.reasoning or "") == (expect["reasoning_content"] or "")
    assert not [mark for mark in expect["never_in_content"] if mark in got]
    assert expect["finish_reason"] in ("any", "tool_calls" if message.calls else "stop")
    calls = calls_of(message)
    compare = expect["tool_calls_mode"]
    if mode == "stream":
        compare = expect.get("tool_calls_mode_stream", compare)
    wanted = [(call["name"], call["arguments"]) for call in expect["tool_calls"]]
    if compare == "exact":
        assert calls == wanted
    elif compare == "contains":
        assert all(call in calls for call in wanted)
    ids = [call.id for call in message.calls]
    assert all(ids) and len(set(ids)) == len(ids)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
@pytest.mark.parametrize("mode", ["nonstream", "stream"])
def test_golden_case_at_every_split(case: dict[str, Any], mode: str) -> None:
    formats = (case["reasoning_parser"], case["format"])
    text = "".join(case["chunks"])
    for how in (*case["splits"]["must"], *case["splits"]["should"]):
        check(case, mode, run(split(case["chunks"], how), *formats, **options_of(case, mode)))
    for at in range(1, len(text)):
        check(case, mode, run([text[:at], text[at:]], *formats, **options_of(case, mode)))
    whole = collect(run([text], *formats, **options_of(case, mode)))
    rng = random.Random(text)
    for _ in range(20):
        assert collect(run(random_split(text, rng), *formats, **options_of(case, mode))) == whole


DSML_CALL = (
    '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="q" string="true">a</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
V31_CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"q": "a"}<｜tool▁call▁end｜>'

# (name, format, text, content, calls), alike for both modes.
SHIPPED_BUGS = [
    ("bare invoke (sglang 14332)", "deepseekv32", DSML_CALL, None, [("f", {"q": "a"})]),
    (
        "unterminated section (sglang 40236)",
        "deepseekv32",
        "<｜DSML｜function_calls>\n" + DSML_CALL,
        None,
        [("f", {"q": "a"})],
    ),
    ("unterminated section", "deepseekv31", "<｜tool▁calls▁begin｜>" + V31_CALL, None, [("f", {"q": "a"})]),
    ("bare call", "deepseekv31", "so " + V31_CALL, "so ", [("f", {"q": "a"})]),
    (
        "two calls in one chunk keep their names (greedy name)",
        "deepseekv31",
        V31_CALL * 2,
        None,
        [("f", {"q": "a"})] * 2,
    ),
    ("ascii bars", "deepseekv32", DSML_CALL.replace("｜", "|"), None, [("f", {"q": "a"})]),
    ("ascii bars", "deepseekv31", V31_CALL.replace("｜", "|").replace("▁", "_"), None, [("f", {"q": "a"})]),
    (
        "leading marker without its bracket (vllm 36654, sglang 14695)",
        "deepseekv32",
        "<｜DSML｜function_calls\n" + DSML_CALL + "\n</｜DSML｜function_calls>",
        None,
        [("f", {"q": "a"})],
    ),
    (
        "whitespace of strings is significant",
        "deepseekv32",
        DSML_CALL.replace(">a<", ">  a\n\n b\t<"),
        None,
        [("f", {"q": "  a\n\n b\t"})],
    ),
    ("empty arguments", "deepseekv32", '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>', None, [("f", {})]),
    ("empty arguments", "deepseekv31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>", None, [("f", {})]),
    ("fences in the text", "deepseekv3", "```json\n{}\n```\nis empty", "```json\n{}\n```\nis empty", []),
    (
        "string='false' that is not JSON is the text itself",
        "deepseekv32",
        DSML_CALL.replace('string="true">a', 'string="false">NaN or so'),
        None,
        [("f", {"q": "NaN or so"})],
    ),
    (
        "quotes, markup and backslashes in a string",
        "deepseekv32",
        DSML_CALL.replace(">a<", '>"<b> & \\n </p> é漢<'),
        None,
        [("f", {"q": '"<b> & \\n </p> é漢'})],
    ),
    ("raw newlines in JSON", "deepseekv31", V31_CALL.replace('"a"', '"a\n\tb"'), None, [("f", {"q": "a\n\tb"})]),
    (
        "a malformed sibling does not kill a good call (sglang 40236)",
        "deepseekv31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{oops<｜tool▁call▁end｜>" + V31_CALL,
        "g{oops",
        [("f", {"q": "a"})],
    ),
    (
        "a malformed sibling does not kill a good call (sglang 40236)",
        "deepseekv32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="g">\n{oops}\n</｜DSML｜invoke>\n' + DSML_CALL,
        '<invoke name="g">\n{oops}\n</invoke>\n',
        [("f", {"q": "a"})],
    ),
    (
        "a forgotten end tag",
        "deepseekv31",
        V31_CALL.removesuffix("<｜tool▁call▁end｜>") + V31_CALL,
        None,
        [("f", {"q": "a"})] * 2,
    ),
    (
        "a forgotten end tag",
        "deepseekv32",
        DSML_CALL.replace("</｜DSML｜invoke>", "") + DSML_CALL,
        None,
        [("f", {"q": "a"})] * 2,
    ),
    (
        "text after the block",
        "deepseekv31",
        V31_CALL + "<｜tool▁calls▁end｜>\n\nDone.",
        "\n\nDone.",
        [("f", {"q": "a"})],
    ),
    ("a blank line, then no block", "deepseekv31", "a\n\n<｜tool▁calls▁begin｜>b", "a\n\nb", []),
    (
        "a parameter without its string flag, declared a string",
        "deepseekv32",
        DSML_CALL.replace(' string="true">a', ">5"),
        None,
        [("f", {"q": "5"})],
    ),
    (
        "v4 wrapper",
        "deepseekv32",
        f"x\n\n<｜DSML｜tool_calls>\n{DSML_CALL}\n</｜DSML｜tool_calls>",
        "x",
        [("f", {"q": "a"})],
    ),
]
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"q": "a"}}\n</tool_call>'
SHIPPED_BUGS += [
    ("one call", "qwen25", "So.\n" + HERMES_CALL, "So.", [("f", {"q": "a"})]),
    ("two calls", "qwen25", HERMES_CALL + "\n" + HERMES_CALL, None, [("f", {"q": "a"})] * 2),
    ("a forgotten end tag", "qwen25", HERMES_CALL.removesuffix("</tool_call>"), None, [("f", {"q": "a"})]),
    (
        "another order of keys",
        "qwen25",
        '<tool_call>{"arguments": {"q": "a<"}, "name": "f"}</tool_call>done',
        "done",
        [("f", {"q": "a<"})],
    ),
    ("arguments as a string", "qwen25", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, [("f", {})]),
    ("no arguments", "qwen25", '<tool_call>{"name": "f"}</tool_call>', None, [("f", {})]),
    ("not a call", "qwen25", 'a\n\n<tool_call>{"nome": 1}</tool_call>', 'a\n\n{"nome": 1}', []),
    ("not JSON", "qwen25", "<tool_call>x</tool_call>" + HERMES_CALL, "x", [("f", {"q": "a"})]),
]
F_SCHEMA = {"name": "f", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("bug", SHIPPED_BUGS, ids=lambda bug: f"{bug[1]}-{bug[0]}")
def test_parser_bugs_of_other_engines(bug: tuple[str, str, str, str | None, list[Any]], hold: bool) -> None:
    _, form, text, content, calls = bug
    for pieces in ([text], list(text)):
        message = collect(run(pieces, None, form, hold=hold, functions=[F_SCHEMA]))
        assert calls_of(message) == calls
        if content != '<invoke name="g">\n{oops}\n</invoke>\n':
            assert message.content == content
        else:  # where the newline behind a malformed call goes is nobody's business
            assert (message.content or "").strip() == content.strip()


def test_a_duplicate_parameter_is_malformed() -> None:
    twice = "<｜DSML｜function_calls>\n" + DSML_CALL.replace(
        "\n</｜DSML｜invoke>", '\n<｜DSML｜parameter name="q" string="true">b</｜DSML｜parameter>\n</｜DSML｜invoke>'
    )
    message = parse(twice, None, "deepseekv32")
    assert message.calls == () and message.content is not None and "｜DSML｜" not in message.content
    streamed = run([twice], None, "deepseekv32")
    assert collect(streamed).calls == (ParsedCall("call_0", "f", '{"q": "a"', complete=False),)


ARGUMENTS = '{"q": "R0/a", "n": [1, 23]}'
CALLS = {
    "deepseekv3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>",
    "deepseekv31": f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    "deepseekv32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="q" string="true">R0/a'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">[1, 23]</｜DSML｜parameter>\n</｜DSML｜invoke>',
    "qwen25": f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
}


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("form", CALLS)
def test_arguments_of_a_call_that_the_text_ends_in_stay_as_far_as_they_came(
    form: str, is_cut: bool, hold: bool
) -> None:
    """Malformed JSON in partial calls (sglang 21546): a shorter path, a missing argument, must not become a call."""
    text = "x " + CALLS[form]
    for at in range(3, len(text) + 1):
        parser = AnswerParser(None, form, hold=hold, new_id=lambda: "id")
        events = parser.feed(text[:at]) + parser.finish(is_cut)
        message = collect(events)
        assert (message.content or "").startswith("x")
        for call in message.calls:
            assert call.name == "f"
            if call.complete:
                assert json.loads(call.arguments) == json.loads(ARGUMENTS)
            else:
                came = re.sub(r"(<|</)?(<?[｜|]?D?S?M?L?)?$", "", call.arguments)
                assert ARGUMENTS.startswith(came) and came != ARGUMENTS, call
        if is_cut and form != "deepseekv32":
            assert "name" not in (message.content or "")
    assert message.calls[0].complete


def test_a_call_is_shown_where_the_text_was_cut_before_its_arguments() -> None:
    text = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    for is_cut, calls in ((True, (ParsedCall("call_0", "f", "", complete=False),)), (False, ())):
        ids = (f"call_{i}" for i in itertools.count())
        parser = AnswerParser(None, "deepseekv32", hold=True, new_id=lambda ids=ids: next(ids))  # type: ignore[misc]
        assert collect(parser.feed(text) + parser.finish(is_cut)).calls == calls
    for cut in ('<tool_call>\n{"name": "get_', "<tool_call>\n"):
        parser = AnswerParser(None, "qwen25")
        assert not parser.feed(cut, "length") and not parser.answer.calls


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("", {}), ("{", {}), ('{"a": "R', {}), ('{"a": 1', {}), ('{"a": 1,', {"a": 1}), ('{"a": "R0", "b": [1', {"a": "R0"}),
        ('{"a\\n": {"c": 2} , "b"', {"a\n": {"c": 2}}), ('{"a": "x" ', {}), ('{"a": tru', {}), ('{"a": null, "b": ', {"a": None}),
    ],
)  # fmt: skip
def test_whole_members(text: str, members: dict[str, Any]) -> None:
    assert whole_members(text) == members


def test_arguments_stream_before_the_call_ends() -> None:
    parser = AnswerParser(None, "deepseekv32")
    parser.feed('<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n')
    first = parser.feed('<｜DSML｜parameter name="q" string="true">Long ')
    assert [event.type for event in first] == ["open", "delta", "delta"]
    assert deltas(parser.feed("text")) == [(PartKind.CALL, "text")]
    parser = AnswerParser(None, "deepseekv31")
    parser.feed("<｜tool▁call▁begin｜>f<｜tool▁sep｜>")
    assert collect(parser.feed('{"q": "Lo')).calls[0].arguments == '{"q": "Lo'
    assert deltas(parser.feed('ng"}')) == [(PartKind.CALL, 'ng"}')]


def test_content_is_not_held_longer_than_needed() -> None:
    parser = AnswerParser("deepseek-v3", "deepseekv32", thinking=False)
    assert deltas(parser.feed("Hello")) == [(PartKind.TEXT, "Hello")]
    assert deltas(parser.feed(" a <")) == [(PartKind.TEXT, " a ")]
    assert deltas(parser.feed("b>\n\n\n")) == [(PartKind.TEXT, "<b>\n")]
    assert deltas(parser.finish()) == [(PartKind.TEXT, "\n\n")]


@pytest.mark.parametrize(
    "name, thinking, text, reasoning, content",
    [
        ("deepseek-r1", None, "never closed", "never closed", None),
        ("deepseek-r1", False, "a</think>b", "a", "b"),
        ("deepseek-r1", True, "\n<think>\na</think>\n\nb</think>c", "\na", "\n\nb</think>c"),
        ("deepseek-r1", True, "a <think> b</think>", "a <think> b", None),
        ("deepseek-v3", True, "a</think>b", "a", "b"),
        ("deepseek-v3", True, "<think>\n</think>b", None, "b"),
        ("deepseek-v3", None, "a</think>b", None, "a</think>b"),
        ("deepseek-v3", False, "<think>a</think>b", None, "<think>a</think>b"),
        ("qwen3", None, "\n<think>\na\n</think>\n\nb", "\na\n", "\n\nb"),
        ("qwen3", None, "a<think>b</think>", None, "a<think>b</think>"),
        ("qwen3", False, "<think>a", None, "<think>a"),
        ("qwen3", True, "\n ", None, "\n "),
    ],
)
def test_reasoning(name: str, thinking: bool | None, text: str, reasoning: str | None, content: str | None) -> None:
    for pieces in ([text], list(text), split([text], "size:3")):
        message = collect(run(pieces, name, None, thinking=thinking))
        assert (message.reasoning, message.content) == (reasoning, content)


def test_a_tool_call_ends_the_thought() -> None:
    for pieces in (["Hm.\n\n" + DSML_CALL], list("Hm.\n\n" + DSML_CALL)):
        message = collect(run(pieces, "deepseek-r1", "deepseekv32"))
        assert message.reasoning == "Hm." and message.content is None and calls_of(message) == [("f", {"q": "a"})]


def test_where_the_thought_begins_can_be_told_by_the_prompt() -> None:
    assert is_in_thought("<｜Assistant｜><think>\n") and is_in_thought("<｜Assistant｜></think>\n") is False
    assert is_in_thought("<think></think>Well") is None
    message = collect(run(["a</think>b"], "qwen3", None, inside=True))
    assert (message.reasoning, message.content) == ("a", "b")


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedConfig, match="deepseekv9.*deepseekv32"):
        AnswerParser(None, "deepseekv9")


SEP_PIECES = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
              "function", "\n```json\n", "\n```", '{"k": ', '"', "}", "{", ", ", "[1, 2]", "\\", "<|tool_sep|>", "\n", " "]  # fmt: skip
DSML_PIECES = ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>",
               '<｜DSML｜parameter name="k" string="true">', '<｜DSML｜parameter name="j" string="false">', "</｜DSML｜parameter>",
               "<｜DSML｜", "｜DSML｜", "</｜DSML｜", "<|DSML|invoke", ' name="', '"', ">", "\n", " ", '{"k": 1}', "{", "}"]  # fmt: skip
HERMES_PIECES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name": ', '"f"', "}", "}}", "{", '"', ": ", ", ",
                 '"arguments"', '{"k": 1}', "\\", "\n", "null"]  # fmt: skip
PIECES = {"deepseekv3": SEP_PIECES, "deepseekv32": DSML_PIECES, "qwen25": HERMES_PIECES}
INSIDE = {  # what stands around the value of an argument
    "deepseekv3": ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"q": "', '"}<｜tool▁call▁end｜>'),
    "deepseekv32": (DSML_CALL.partition("a</")[0], "</" + DSML_CALL.partition("a</")[2]),
    "qwen25": (HERMES_CALL.partition('a"')[0], '"' + HERMES_CALL.partition('a"')[2]),
}
THINK_PIECES = ["<think>", "</think>", "<", "</"]
WORD = re.compile(r"w\d+w")


@st.composite
def soup(draw: st.DrawFn) -> tuple[str, str]:
    """(tool format, text of markup pieces in any order with words between, each word once)."""
    form = draw(st.sampled_from(list(PIECES)))
    picked = draw(st.lists(st.sampled_from([*PIECES[form], *THINK_PIECES, "WORD", "WORD"]), max_size=24))
    text = "".join(f"w{i}w" if piece == "WORD" else piece for i, piece in enumerate(picked))
    if draw(st.booleans()):
        text = text.join(INSIDE[form])
    return form, text


@settings(max_examples=200, deadline=None)
@given(
    soup(),
    st.sampled_from([None, "deepseek-r1", "deepseek-v3", "qwen3"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_random_markup(case: tuple[str, str], reasoning: str | None, hold: bool, rng: random.Random) -> None:
    form, text = case
    options: dict[str, Any] = {"hold": hold, "thinking": True}
    message = collect(run([text], reasoning, form, **options))
    assert collect(run(list(text), reasoning, form, **options)) == message
    assert collect(run(random_split(text, rng), reasoning, form, **options)) == message
    calls = calls_of(message)
    content = message.content or ""
    assert not re.search("｜DSML｜|<｜tool▁|</?tool_call>", content)
    shown = content + (message.reasoning or "") + json.dumps(calls) + "".join(c.arguments for c in message.calls)
    lost = set(WORD.findall(text)) - set(WORD.findall(shown))
    assert not lost, f"{lost} of {text!r} are in neither content, reasoning nor calls: {message}"


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from('<>/｜|DSML▁tool{}[]":,\\u12eE.-+ntf \n'), max_size=60))
def test_any_text_is_parsed_without_an_error(text: str) -> None:
    for form in ("deepseekv3", "deepseekv32"):
        for body in (text, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{" + text, '<｜DSML｜invoke name="f">{' + text):
            for hold in (True, False):
                message = collect(run([body], "qwen3", form, hold=hold))
                assert collect(run(list(body), "qwen3", form, hold=hold)) == message
                calls_of(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.booleans(), st.booleans(), st.sampled_from([None, 1]))
def test_any_arguments_come_back(arguments: dict[str, Any], ascii_only: bool, hold: bool, indent: int | None) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    for body in (
        f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{text}\n```<｜tool▁call▁end｜>",
    ):
        for pieces in ([body], list(body)):
            message = collect(run(pieces, None, "deepseekv3", hold=hold))
            assert calls_of(message) == [("f", arguments)] and message.content is None
            assert message.calls[0].arguments == text
