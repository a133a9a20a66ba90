"""What must hold of every answer that a parser reads and every prompt that an encoder writes, on requests made of
bytes.

`tools.fuzz.parsers` runs it under a fuzzer, the tests on a few random inputs. Both checks raise AssertionError with the
reason.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from thalweg.core.errors import InvalidRequest
from thalweg.text.chat import BUILTIN_ENCODERS, builtin
from thalweg.text.events import Event, ParsedAnswer, ParsedCall, PartKind, answer_of
from thalweg.text.parser import AnswerParser

SEP = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
       "function", "\n```json\n", "\n```", "<|tool_sep|>", "<|tool▁call_begin|>", "<｜tool▁", "f", "g"]  # fmt: skip
DSML = ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="q" string="true">', '<｜DSML｜parameter name="n" string="false">', "</｜DSML｜parameter>",
        '<｜DSML｜parameter name="o">', '<｜DSML｜parameter name="input">', '<｜DSML｜invoke name="g">',
        '<｜DSML｜invoke name="h">', "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>", "<｜DSML｜", "｜DSML｜", "</｜DSML｜", "<|DSML|invoke", ' name="', ' string="true"',
        '<｜DSML｜invoke name="g"/>']  # fmt: skip
HERMES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name": ', '"f"', '"arguments"', '"parameters": ',
          '{"arguments": {"q": 1}, "name": "g"}', '"{\\"q\\": 1}"', "<tool_", "</tool"]  # fmt: skip
JSON = ["{", "}", "[", "]", '"', ": ", ", ", "\\", "\\u00e9", "\\ud83d", '"q"', '{"q": ', '{"q": "', '"}', "1.5e3", "-0", "01", "1e999",
        "true", "null", "NaN", "\x00", '{"q": 1, "q": 2}', "{}"]  # fmt: skip
PROSE = ["WORD", "WORD", "\n", "\n\n", " ", "\t", "<", "</", ">", "<think>", "</think>", "</thi", "é", "漢😀", "```", "\r\n", "\u2028"]  # fmt: skip
GLM = [
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "f",
    "g",
    "q",
    "n",
    "\n",
    "<arg_",
]
KIMI = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>", "functions.f:0", "functions.g:1", "f", "<|tool_call"]  # fmt: skip
LLAMA = [
    "<|python_tag|>",
    '{"name": "f", "parameters": ',
    '{"name": "g", "arguments": {',
    '{"type": "function", ',
    "; ",
    "}",
    "}}",
]
PIECES = {
    "deepseekv3": SEP, "deepseekv31": SEP, "deepseekv32": DSML, "qwen25": HERMES, "glm45": GLM, "kimi_k2": KIMI, "llama3": LLAMA,
}  # fmt: skip
FRAMES = {
    "deepseekv3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "deepseekv31": ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"q": "', '"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    "deepseekv32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="q" string="true">',
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "qwen25": ('<tool_call>\n{"name": "f", "arguments": {"q": "', '"}}\n</tool_call>'),
    "glm45": ("<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    "kimi_k2": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"q": "',
        '"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "llama3": ('<|python_tag|>{"name": "f", "parameters": {"q": "', '"}}'),
}  # fmt: skip
MARKS = {
    "deepseekv3": re.compile("<[｜|]tool[▁_](?:calls?[▁_](?:begin|end)|sep)[｜|]>"),
    "deepseekv31": re.compile("<[｜|]tool[▁_](?:calls?[▁_](?:begin|end)|sep)[｜|]>"),
    "deepseekv32": re.compile("[｜|]DSML[｜|]"),
    "qwen25": re.compile("</?tool_call>"),
    "glm45": re.compile("</?tool_call>|</?arg_(?:key|value)>"),
    "kimi_k2": re.compile(r"<\|tool_calls?_[a-z_]+\|>"),
    "llama3": re.compile(r"<\|python_tag\|>"),
}
SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}, "required": ["q"]},
    {"properties": {"o": {"type": "string"}, "q": True}, "required": "q"},
    {"type": "object", "required": ["q", 1, "z"], "properties": []},
    {"properties": {"q": {"type": ["string", "null"]}, "n": {"enum": [1]}}, "additionalProperties": False},
]
REASONING = [None, "deepseek-r1", "deepseek-v3", "qwen3"]
VALUES = [
    "WORD",
    "\n",
    " ",
    '"',
    "\\",
    "<",
    ">",
    "</",
    "é",
    "漢",
    "😀",
    "{",
    "}",
    "[",
    "]",
    "'",
    "&amp;",
    "\t",
    "`",
    "\\n",
    "\\u0041",
]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
WORD = re.compile(r"w\d+w")


class Bytes:
    """Decisions out of bytes; when they are used up, each is the first choice."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.byte() % len(options)]

    @property
    def more(self) -> bool:
        return self.at < len(self.data)


def text_of(source: Bytes, pieces: Sequence[str], longest: int) -> str:
    """Pieces by index; 255 brings one character of any kind, 254 four thousand of one. Each word stands once."""
    parts: list[str] = []
    while source.more and len(parts) < longest:
        byte = source.byte()
        if byte == 255:
            code = source.byte() << 8 | source.byte()
            parts.append("" if 0xD800 <= code < 0xE000 else chr(code))
        elif byte == 254:
            parts.append(source.pick(' \n{}x"<1') * 4000 if len(parts) < 4 else " ")
        else:
            piece = pieces[byte % len(pieces)]
            parts.append(f"w{len(parts)}w" if piece == "WORD" else piece)
    return "".join(parts)


def cut(text: str, rng: random.Random) -> list[str]:
    edges = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def collect(events: Iterable[Event]) -> ParsedAnswer:
    """The answer of all events since its beginning."""
    return answer_of([event.part for event in events if event.type == "open"])


def parse(text: str, reasoning: str | None, tools: str | None, **options: Any) -> ParsedAnswer:
    """A whole answer at once; `options` as for AnswerParser."""
    parser = AnswerParser(reasoning, tools, **{"hold": True, **options})
    parser.feed(text)
    parser.finish()
    return parser.answer


def check_answer(data: bytes) -> None:
    """One answer, read in one piece, in characters and in other pieces, held and streamed. Raises AssertionError."""
    source = Bytes(data)
    form = source.pick(list(PIECES))
    functions = [{"name": name, "parameters": source.pick(SCHEMAS)} for name in source.pick([(), ("f",), ("f", "g")])]
    reasoning, thinking, inside = (
        source.pick(REASONING),
        source.pick([None, True, False]),
        source.pick([None, True, False]),
    )
    offered, framed, seed = source.byte() % 4 != 3, source.byte() % 2 == 1, source.byte()
    text = text_of(source, [*PIECES[form], *JSON, *PROSE], 60)
    if framed:
        text = text.join(FRAMES[form])
    options = {"thinking": thinking, "inside": inside, "functions": functions, "offered": offered}
    seen = []
    for hold in (True, False):
        message, whole = read([text], reasoning, form, hold, options)
        splits = [list(text) if len(text) < 3000 else [text[:7], text[7:]], cut(text, random.Random(seed))]
        for pieces in splits:
            assert read(pieces, reasoning, form, hold, options) == (message, whole), "the split matters"
        shown = (
            (message.content or "") + (message.reasoning or "") + "".join(c.name + c.arguments for c in message.calls)
        )
        if offered or form != "qwen25":
            assert not MARKS[form].search(message.content or ""), "markup in the content"
        assert offered or not message.calls, "a call though no tools were offered"
        # Words inside a tag that the end of the text cut off go with the tag.
        lost = set(WORD.findall(re.sub("[｜|]DSML[｜|][^>]*$", "", text))) - set(WORD.findall(shown))
        assert not lost, f"{lost} are lost"
        seen.append([(call.name, json.loads(call.arguments, parse_int=float)) for call in whole])
    assert same(seen[0], seen[1]), "held and streamed answers have other calls"


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # NaN cannot be, and -0.0 is not 0.0


def read(
    pieces: Iterable[str], reasoning: str | None, form: str, hold: bool, options: dict[str, Any]
) -> tuple[ParsedAnswer, list[ParsedCall]]:
    """The message, and its complete calls. Checks the order of the events and that their arguments are JSON objects."""
    ids = itertools.count()
    parser = AnswerParser(reasoning, form, hold=hold, new_id=lambda: f"call_{next(ids)}", **options)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    whole: list[bool] = []
    is_open = False
    for event in events:
        if event.part.kind is not PartKind.CALL:
            continue
        if event.type == "open":
            assert event.part.number == len(whole) and not is_open, "calls begin one after the other and count from 0"
            is_open = True
        else:
            assert is_open and event.part.number == len(whole), "arguments belong to the open call"
            if event.type == "close":
                is_open = False
                whole.append(event.part.complete)
    assert not is_open, "a call without its end"
    message = collect(events)
    complete = [call for call in message.calls if call.complete]
    for call in complete:
        value = json.loads(call.arguments, parse_constant=_no_constant, parse_int=float)
        assert isinstance(value, dict), "arguments that are no object"
    assert [call.complete for call in message.calls] == whole and all(call.name and call.id for call in message.calls)
    return message, complete


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def check_prompt(data: bytes) -> None:
    """A conversation through each of our encoders: one BOS, and what the assistant said is read back from the
    prompt.
    """
    source = Bytes(data)
    name, thinking = source.pick(list(BUILTIN_ENCODERS)), source.pick([None, True, False])
    messages: list[dict[str, Any]] = [_message(source) for _ in range(source.byte() % 5)]
    tools = source.pick(
        [None, [], [{"type": "function", "function": {"name": "f", "parameters": source.pick(SCHEMAS)}}]]
    )
    encoder = builtin(name)
    options = {"thinking": thinking, "add_generation_prompt": source.byte() % 2 == 0}
    try:
        prompt = encoder.encode(messages, tools, **options)
        assert prompt.startswith(BOS) and prompt.count(BOS) == 1, "not one BOS"
    except InvalidRequest as error:
        assert str(error).startswith(("messages", "tools")), "an error that does not name its message"
    text, value = text_of(source, VALUES, 12), text_of(source, VALUES, 12)
    arguments = {"q": value, "n": source.pick([1, -2.5e-7, True, None, [1, "a"], {"k": {}}]), "w1w é": "x"}
    calls = [
        {"id": f"c{i}", "function": {"name": "f", "arguments": given}} for i, given in enumerate((arguments, "{}"))
    ]
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": text, "tool_calls": calls},
    ]
    written = encoder.encode(turn, thinking=False, add_generation_prompt=False)
    written = written.rpartition("<｜Assistant｜>")[2].removeprefix("</think>").removesuffix(EOS)
    message = parse(written, None, BUILTIN_ENCODERS[name].formats.tools)
    assert [json.loads(call.arguments) for call in message.calls] == [arguments, {}], (
        f"the calls are not read back: {name} {written!r} {message}"
    )
    assert (message.content or "").strip() == text.strip(), f"the text is not read back: {name} {written!r} {message}"


def _message(source: Bytes) -> dict[str, Any]:
    text = text_of(source, [*VALUES, "</think>"], source.byte() % 6)
    message: dict[str, Any] = {
        "role": source.pick(["user", "assistant", "tool", "system", "developer", "king"]),
        "content": text,
    }
    if source.byte() % 4 == 0:
        message["tool_calls"] = [
            {
                "id": "a",
                "function": {"name": "f", "arguments": source.pick(["{}", {"q": text}, "", "oops", "[1]", None])},
            }
        ]
    if source.byte() % 8 == 0:
        message |= source.pick(
            [{"reasoning_content": text}, {"content": None}, {"tool_call_id": "a"}, {"content": [1]}]
        )
    return message
