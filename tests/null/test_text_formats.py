"""Tool calls of GLM, Kimi-K2 and Llama 3.1: their published markup, at every split, held and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from thalweg.text.chat import ParserNames, formats_of
from thalweg.text.events import ParsedAnswer
from thalweg.text.parser import TOOL_FORMATS, AnswerParser
from thalweg.text.tool_grammar import ToolGrammarSpec, tool_grammar
from tools.fuzz_checks import collect

FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
            "required": ["city"],
        },
    },
    {"name": "stop", "parameters": {"type": "object", "properties": {}}},
]


def glm(name: str, *arguments: tuple[str, str], line: str = "\n") -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in arguments)
    return f"<tool_call>{name}{line}{inner}</tool_call>"


def kimi(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" for id, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


KOELN = {"city": "Köln", "days": 2}
# name, format, text, content, calls
CASES: list[tuple[str, str, str, str | None, list[tuple[str, Any]]]] = [
    ("a call", "glm45", "So.\n" + glm("weather", ("city", "Köln"), ("days", "2")), "So.", [("weather", KOELN)]),
    ("one line", "glm45", glm("weather", ("city", "Köln"), ("days", "2"), line=""), None, [("weather", KOELN)]),
    ("two calls", "glm45", glm("stop") + "\n" + glm("stop"), None, [("stop", {}), ("stop", {})]),
    ("a string that looks like JSON", "glm45", glm("weather", ("city", '{"a": 1}')), None, [("weather", {"city": '{"a": 1}'})]),
    ("an array, and an unknown key", "glm45", glm("weather", ("tags", "[1, 2]"), ("x", "y z")), None,
     [("weather", {"tags": [1, 2], "x": "y z"})]),
    ("an unknown function", "glm45", glm("other", ("n", "1"), ("s", "zwei")), None, [("other", {"n": 1, "s": "zwei"})]),
    ("lines in a string", "glm45", glm("weather", ("city", 'a\n"b"\n')), None, [("weather", {"city": 'a\n"b"\n'})]),
    ("text behind a call", "glm45", glm("stop") + "\nDone.", "\nDone.", [("stop", {})]),
    ("a call", "kimi_k2", "So. " + kimi(("functions.weather:0", '{"city": "Köln", "days": 2}')), "So. ", [("weather", KOELN)]),
    ("two calls", "kimi_k2", kimi(("functions.stop:0", "{}"), ("functions.weather:1", '{"city": "a"}')), None,
     [("stop", {}), ("weather", {"city": "a"})]),
    ("a plain name", "kimi_k2", kimi(("stop", "{}")), None, [("stop", {})]),
    ("a call", "llama3", '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}', None, [("weather", KOELN)]),
    ("a type", "llama3", '{"type": "function", "name": "stop", "parameters": {}}', None, [("stop", {})]),
    ("two calls", "llama3", '{"name": "stop", "parameters": {}}; {"name": "weather", "parameters": {"city": "}"}}', None,
     [("stop", {}), ("weather", {"city": "}"})]),
    ("behind its token", "llama3", '<|python_tag|>{"name": "stop", "parameters": {}}', None, [("stop", {})]),
    ("text", "llama3", 'It is {"name": "stop", "parameters": {}}.', 'It is {"name": "stop", "parameters": {}}.', []),
    ("JSON that is no call", "llama3", ' {"answer": {"name": 1}}', ' {"answer": {"name": 1}}', []),
    ("space before a call", "llama3", '\n {"name": "stop", "parameters": {}}', None, [("stop", {})]),
]  # fmt: skip


def read(pieces: list[str], form: str, **options: Any) -> ParsedAnswer:
    parser = AnswerParser(None, form, **{"functions": FUNCTIONS, "new_id": lambda: "id", **options})
    return collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def calls_of(message: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls if call.complete]


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}-{case[0]}")
def test_calls_at_every_split(case: tuple[str, str, str, str | None, list[tuple[str, Any]]], hold: bool) -> None:
    _, form, text, content, wanted = case
    splits = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in splits:
        message = read(pieces, form, hold=hold)
        assert (message.content, calls_of(message)) == (content, wanted), pieces
    for at in range(len(text)):
        parser = AnswerParser(None, form, functions=FUNCTIONS, hold=hold)
        cut = collect(parser.feed(text[:at]) + parser.finish(is_cut=True))
        shown = re.sub(r"<[|/a-z_]*$", "", cut.content or "")  # the beginning of a mark, which no token is
        assert (content or "").strip().startswith(shown.strip())
        for call, (name, arguments) in zip(cut.calls, wanted, strict=False):
            written, came = (
                "".join(one.split()) for one in (json.dumps(arguments, ensure_ascii=False), call.arguments)
            )
            assert call.name == name and (call.complete or written.startswith(came.partition("<")[0]))


def test_arguments_stream() -> None:
    parser = AnswerParser(None, "glm45", functions=FUNCTIONS)
    parser.feed("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>")
    assert [event.text for event in parser.feed("Long ")] == ["Long "]
    parser = AnswerParser(None, "llama3")
    assert collect(parser.feed('{"name": "f", "parameters": {"q": "Lo')).calls[0].arguments == '{"q": "Lo'
    parser = AnswerParser(None, "llama3")
    assert [event.text for event in parser.feed('{"answer"') if event.text] == ['{"answer"'], "JSON is not held"


def test_kimis_ids_come_back_as_written() -> None:
    message = read([kimi(("functions.stop:3", "{}"), ("functions.stop:3", "{}"))], "kimi_k2")
    assert [call.id for call in message.calls] == ["functions.stop:3", "id"], "ids of an answer are distinct"


@pytest.mark.parametrize("form", ["glm45", "kimi_k2", "llama3"])
def test_without_tools_a_call_is_text_without_its_marks(form: str) -> None:
    text = next(case[2] for case in CASES if case[1] == form and case[0] == "a call")
    message = read([text], form, offered=False)
    assert not message.calls and "Köln" in (message.content or "") and "arg_key" not in (message.content or "")
    assert "<|" not in (message.content or "")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("<think></think> enable_thinking <tool_call> <arg_key>", ParserNames("glm45", "glm45")),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", ParserNames(None, "kimi_k2")),
        ("<think>{{ x }}</think><|tool_call_begin|>", ParserNames("qwen3", "kimi_k2")),
        ('<|python_tag|> {"name": function name, "parameters": …}', ParserNames(None, "llama3")),
        ('Respond in the format {"name": function name, "parameters": dictionary}.', ParserNames(None, "llama3")),
        ("<|im_start|> <tool_call>\n<function=", ParserNames(None, None)),
        ("<|im_start|><tool_call> </think> enable_thinking", ParserNames("qwen3", "qwen25")),
        ("[TOOL_CALLS]", ParserNames(None, None)),
    ],
)
def test_a_template_tells_the_formats(text: str, names: ParserNames) -> None:
    assert formats_of(text) == names


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_grammar_has_the_names_of_all_functions(form: str) -> None:
    source = tool_grammar(form, ToolGrammarSpec(FUNCTIONS, True, False, lambda mark: None)).source
    assert "weather" in source and "stop" in source
