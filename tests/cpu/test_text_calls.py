"""Tool calls that other parsers got wrong, by issue number; calls without tools; the fuzzer's checks on a few random
inputs.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.text.chat import BUILTIN_ENCODERS, EOS, builtin
from thalweg.text.events import ParsedAnswer, PartKind
from thalweg.text.parser import TOOL_FORMATS, AnswerParser
from tools.fuzz_checks import FRAMES, MARKS, check_answer, check_prompt, collect, cut, parse

F: dict[str, Any] = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
OPTIONAL: dict[str, Any] = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTIONS = [{"name": "f", "parameters": F}, {"name": "g", "parameters": OPTIONAL}]


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{flag}">{value}</｜DSML｜parameter>\n'
        for key, flag, value in parameters
    )
    return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n'


def block(*invokes: str) -> str:
    return "<｜DSML｜function_calls>\n" + "".join(invokes) + "</｜DSML｜function_calls>"


def sep(name: str, arguments: str) -> str:
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def messages(text: str, *formats: str | None, **options: Any) -> list[ParsedAnswer]:
    """Held and streamed, each in one piece and in characters, which must agree."""
    found = []
    for hold in (True, False):
        both = []
        for pieces in ([text], list(text)):
            parser = AnswerParser(*formats, hold=hold, new_id=lambda: "id", **({"functions": FUNCTIONS} | options))
            both.append(collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish()))
        assert both[0] == both[1]
        found.append(both[0])
    return found


def calls(message: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls if call.complete]


# name, format, text, content, calls
CASES: list[tuple[str, str, str, str | None, list[tuple[str, Any]]]] = [
    (
        "no start tag far into a context, but the end tag of the block (vllm 48931)",
        "deepseekv32",
        "I look.\n\n" + invoke("f", ("q", "true", "a")) + "</｜DSML｜function_calls>",
        "I look.",
        [("f", {"q": "a"})],
    ),
    (
        "prose that names the tag is no call (vllm 48931)",
        "deepseekv32",
        'Write <｜DSML｜invoke name="f"> and close it.',
        'Write <invoke name="f"> and close it.',
        [],
    ),
    (
        "a bare call without its required argument is no call (vllm 48931)",
        "deepseekv32",
        "x " + invoke("f", ("r", "true", "a")).strip(),
        'x <invoke name="f">\n<parameter name="r" string="true">a</parameter>\n</invoke>',
        [],
    ),
    (
        "a bare call without its required argument, as JSON",
        "deepseekv32",
        'x <｜DSML｜invoke name="f">{"r": 1}</｜DSML｜invoke>',
        'x <invoke name="f">{"r": 1}</invoke>',
        [],
    ),
    (
        "a bare call of a function that was not offered (vllm 48931)",
        "deepseekv32",
        "x " + invoke("h").strip(),
        'x <invoke name="h">\n</invoke>',
        [],
    ),
    (
        "between the outer tags the client decides on an unknown name",
        "deepseekv32",
        block(invoke("h", ("q", "true", "a"))),
        None,
        [("h", {"q": "a"})],
    ),
    (
        "bare calls behind one another (sglang 14332, 40236)",
        "deepseekv32",
        invoke("g") + invoke("f", ("q", "true", "a")),
        None,
        [("g", {}), ("f", {"q": "a"})],
    ),
    (
        "unterminated block (sglang 40236)",
        "deepseekv32",
        "<｜DSML｜function_calls>\n" + invoke("f", ("q", "true", "a")) + invoke("g"),
        None,
        [("f", {"q": "a"}), ("g", {})],
    ),
    (
        "two blocks and text between and behind",
        "deepseekv32",
        "a\n\n" + block(invoke("g")) + "\n\nb\n\n" + block(invoke("g")) + "\nc",
        "a\n\nb\nc",
        [("g", {}), ("g", {})],
    ),
    (
        "every type, and what only looks like JSON",
        "deepseekv32",
        block(
            invoke(
                "g",
                ("t", "false", " true\n"),
                ("n", "false", "-1.50e+3"),
                ("z", "false", "null"),
                ("l", "false", '[1, "é", {"b": []}]'),
                ("bad", "false", "01"),
                ("python", "false", "True"),
                ("empty", "false", ""),
                ("no", "true", ""),
            )
        ),
        None,
        [("g", {"t": True, "n": -1500.0, "z": None, "l": [1, "é", {"b": []}], "bad": "01", "python": "True", "empty": "", "no": ""})],
    ),
    (
        "markup, quotes and think tags inside a string",
        "deepseekv32",
        block(invoke("f", ("q", "true", '<b>"x" & \\n</think><think><｜DSML｜foo></｜DSML｜foo>```\n'))),
        None,
        [("f", {"q": '<b>"x" & \\n</think><think><｜DSML｜foo></｜DSML｜foo>```\n'})],
    ),
    (
        "the end tag of a parameter inside direct JSON",
        "deepseekv32",
        block('<｜DSML｜invoke name="f">\n{"q": "a</｜DSML｜parameter>b"}\n</｜DSML｜invoke>\n'),
        None,
        [("f", {"q": "a</｜DSML｜parameter>b"})],
    ),
    (
        "space of any kind before direct JSON",
        "deepseekv32",
        block('<｜DSML｜invoke name="f">\u2028\n {"q": "a"}</｜DSML｜invoke>'),
        None,
        [("f", {"q": "a"})],
    ),
    (
        "an invoke that closes itself",
        "deepseekv32",
        block('<｜DSML｜invoke name="g"/>\n', '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="q" string="true">a<｜DSML｜invoke name="g" />'),
        None,
        [("g", {}), ("f", {"q": "a"}), ("g", {})],
    ),
    (
        "a bare one that closes itself, and one that lacks its argument",
        "deepseekv32",
        '<｜DSML｜invoke name="g"/> <｜DSML｜invoke name="f"/>',
        '<invoke name="f"/>',
        [("g", {})],
    ),
    (
        "words between the parameters do not kill a call",
        "deepseekv32",
        block(invoke("f", ("q", "true", "a")).replace("<｜DSML｜parameter", "Now: <｜DSML｜parameter")),
        "Now:",
        [("f", {"q": "a"})],
    ),
    (
        "words alone do (smg)",
        "deepseekv32",
        block('<｜DSML｜invoke name="f">\nnot valid at all\n</｜DSML｜invoke>\n', invoke("g")),
        '<invoke name="f">\nnot valid at all\n</invoke>',
        [("g", {})],
    ),
    (
        "attributes in the other order, a name with space around it",
        "deepseekv32",
        block('<｜DSML｜invoke name=" f ">\n<｜DSML｜parameter string="true" name="q">a</｜DSML｜parameter></｜DSML｜invoke>'),
        None,
        [("f", {"q": "a"})],
    ),
    ("a brace too many", "deepseekv31", sep("f", '{"q": "a"}}'), None, [("f", {"q": "a"})]),
    ("words behind the JSON are not lost", "deepseekv31", sep("f", '{"q": "a"} so'), "so", [("f", {"q": "a"})]),
    ("NaN is not JSON, 1e999 is", "deepseekv31", sep("f", '{"q": NaN}') + sep("g", '{"n": 1e999}'), 'f{"q": NaN}', [("g", {"n": float("inf")})]),
    ("a fence inside a string", "deepseekv3", sep("function", 'f\n```json\n{"q": "```"}\n```'), None, [("f", {"q": "```"})]),
    ("arguments that are no object", "deepseekv3", sep("function", "f\n```json\n[1]\n```"), "functionf\n```json\n[1]\n```", []),
    ("a name and no end of it", "deepseekv3", "<｜tool▁call▁begin｜>" + "n" * 5000, "n" * 5000, []),
    ("numbers stay as they were written", "qwen25", hermes('{"arguments": {"n": 1.50}, "name": "f"}'), None, [("f", {"n": 1.5})]),
    ("a number beyond floats", "qwen25", hermes('{"arguments": {"n": 1e999}, "name": "f"}'), None, [("f", {"n": float("inf")})]),
    ("null for no arguments", "qwen25", hermes('{"name": "g", "arguments": null}'), None, [("g", {})]),
    ("a string of JSON", "qwen25", hermes('{"name": "f", "arguments": "{\\"q\\": \\"a\\\\nb\\"}"}'), None, [("f", {"q": "a\nb"})]),
    ("a brace too many", "qwen25", hermes('{"name": "f", "arguments": {"q": "a"}}}'), None, [("f", {"q": "a"})]),
    ("two objects in one call", "qwen25", hermes('{"arguments": {}, "name": "g"} {}'), '\n{"arguments": {}, "name": "g"} {}\n', []),
]  # fmt: skip


CASES += [
    ("all arguments in one parameter", "deepseekv32", block(invoke("f", ("arguments", "false", '{"q": "a"}'))), None, [("f", {"q": "a"})]),
    ("the same as text", "deepseekv32", block(invoke("f", ("input", "true", ' {"q": "a", "r": {}} '))), None, [("f", {"q": "a", "r": {}})]),
    ("the same and empty", "deepseekv32", block(invoke("f", ("arguments", "false", "{}"))), None, [("f", {})]),
    ("the same without outer tags", "deepseekv32", invoke("f", ("arguments", "false", '{"q": "a"}')), None, [("f", {"q": "a"})]),
    ("not alone", "deepseekv32", block(invoke("f", ("arguments", "false", '{"r": 1}'), ("q", "true", "a"))), None,
     [("f", {"arguments": {"r": 1}, "q": "a"})]),
    ("no object", "deepseekv32", block(invoke("f", ("input", "true", "a"))), None, [("f", {"input": "a"})]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}-{case[0]}")
def test_calls(case: tuple[str, str, str, str | None, list[tuple[str, Any]]]) -> None:
    _, form, text, content, wanted = case
    for message in messages(text, None, form):
        assert (message.content, calls(message)) == (content, wanted)
        assert "\\u" not in "".join(call.arguments for call in message.calls)


def test_a_bare_call_is_shown_when_it_is_one_and_no_sooner() -> None:
    """In a stream, too: nothing can be taken back (vllm 48931)."""
    parser = AnswerParser(None, "deepseekv32", functions=FUNCTIONS)
    text = invoke("f", ("q", "true", "long text")).strip()
    assert not parser.feed(text[:-1])
    assert [(call.name, call.arguments) for call in collect(parser.feed(text[-1:])).calls] == [
        ("f", '{"q": "long text"}')
    ]
    cut = AnswerParser(None, "deepseekv32", functions=FUNCTIONS)
    message = collect([*cut.feed(text[:-20]), *cut.finish()])
    assert not message.calls and message.content is not None and "long text" in message.content


def test_the_end_tag_never_leaks_into_arguments() -> None:
    """Wherever the stream is cut (vllm 45877)."""
    text = block(invoke("f", ("q", "true", "value")))
    for at in range(len(text)):
        parser = AnswerParser(None, "deepseekv32")
        events = parser.feed(text[:at])
        shown = "".join(event.text for event in events if event.part.kind is PartKind.CALL)
        assert not set("<｜/>") & set(shown)
        message = collect(events + parser.feed(text[at:]) + parser.finish())
        assert message.content is None and calls(message) == [("f", {"q": "value"})]


@pytest.mark.parametrize("reasoning", ["deepseek-r1", "deepseek-v3"])
@pytest.mark.parametrize("end", ["</think>\n\n", "", "\n\n"], ids=["closed", "never closed", "a blank line"])
@pytest.mark.parametrize("form", ["deepseekv3", "deepseekv31", "deepseekv32", "qwen25"])
def test_the_reasoning_layer_leaves_the_markup_to_the_tools(reasoning: str, end: str, form: str) -> None:
    """DSML markers eaten by the reasoning parser (sglang 21179); a call inside the thought ends it."""
    if form == "deepseekv3":
        text = "Hm." + end + FRAMES[form][0] + '{"q": "v"}' + FRAMES[form][1]
    else:
        text = "Hm." + end + "v".join(FRAMES[form])
    for message in messages(text, reasoning, form, thinking=True):
        assert (message.reasoning, message.content, calls(message)) == ("Hm.", None, [("f", {"q": "v"})])


def test_the_end_of_a_thought_that_a_call_interrupted_is_no_content() -> None:
    for message in messages(
        "Hm. " + invoke("g") + "Well.</think>So.</think>", "deepseek-v3", "deepseekv32", thinking=True
    ):
        assert (message.reasoning, message.content, calls(message)) == ("Hm. ", "\nWell.So.</think>", [("g", {})])
    for message in messages("Hm. " + block(invoke("f", ("q", "true", "a</think>b"))), "deepseek-r1", "deepseekv32"):
        assert calls(message) == [("f", {"q": "a</think>b"})]


def test_without_a_reasoning_parser_the_thought_is_text() -> None:
    for message in messages("<think>a</think>b" + block(invoke("g")), None, "deepseekv32"):
        assert (message.reasoning, message.content, calls(message)) == (None, "<think>a</think>b", [("g", {})])


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_where_no_tools_were_offered_nothing_is_a_call(form: str) -> None:
    """The words stay (vllm 48931); special tokens go, as from any answer; what a text may hold stays."""
    body = '{"q": "v"}'.join(FRAMES[form]) if form == "deepseekv3" else "v".join(FRAMES[form])
    for thought in ("", "I could: " + body + "</think>"):
        for message in messages(
            thought + "a\n\n" + body + "\nb", "deepseek-v3", form, offered=False, thinking=bool(thought)
        ):
            content = message.content or ""
            assert not message.calls and content.startswith("a\n\n") and content.endswith("\nb") and "v" in content
            assert (body in content) if form == "qwen25" else not MARKS[form].search(content)
            assert ("I could: " in (message.reasoning or "")) == bool(thought)


def test_a_held_call_that_breaks_off_is_text_without_its_marks_at_every_length() -> None:
    for form, (begin, end) in FRAMES.items():
        text = "x " + begin + ('{"q": "v"}' if form == "deepseekv3" else "v") + end
        for at in range(len(text)):
            message = parse(text[:at], None, form, functions=FUNCTIONS)
            assert calls(message) in ([], [("f", {"q": "v"})])
            assert (message.content or "").startswith("x "[: min(at, 1)]) and not MARKS[form].search(
                message.content or ""
            )


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEY = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters='"<>'), min_size=1, max_size=6)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.dictionaries(KEY, VALUE, max_size=4), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_any_arguments_come_back_from_what_the_encoder_writes(
    arguments: list[dict[str, Any]], rng: random.Random
) -> None:
    turn = [{"id": str(i), "function": {"name": "f", "arguments": one}} for i, one in enumerate(arguments)]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So:", "tool_calls": turn}]
    for name in ("deepseek-v3", "deepseek-v31", "deepseek-v32"):
        prompt = builtin(name).encode(messages, add_generation_prompt=False)
        text = prompt.rpartition("<｜Assistant｜>")[2].removeprefix("</think>").removesuffix(EOS)
        for pieces in ([text], list(text), cut(text, rng)):
            for hold in (True, False):
                parser = AnswerParser(None, BUILTIN_ENCODERS[name].formats.tools, hold=hold)
                message = collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
                assert message.content == "So:" and calls(message) == [("f", one) for one in arguments]


def test_what_the_fuzzer_checks_holds_on_random_inputs() -> None:
    rng = random.Random(7)
    for _ in range(80):
        check_answer(rng.randbytes(rng.randrange(8, 80)))
        check_prompt(rng.randbytes(rng.randrange(8, 60)))
