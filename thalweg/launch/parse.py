"""`thalweg parse`: what became of a model's raw output: reasoning, content, tool calls. No model, no torch."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from thalweg.config.args import OptionsParser
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.jsonfile import read_json, read_text, run_cases
from thalweg.text.events import ParsedAnswer
from thalweg.text.messages import read_tools
from thalweg.text.parser import REASONING_FORMATS, TOOL_FORMATS, AnswerParser

EPILOG = """\
FILE holds one raw output of a model with its special tokens (an end token is dropped); - is standard input. Text before
</think> is the thought, unless --reasoning-parser says otherwise.

examples:
  thalweg parse --format deepseekv32 output.txt
  thalweg parse --format deepseekv31 --tools tools.json --stream - < output.txt
  thalweg parse --cases cases.json"""

MODES = ("nonstream", "stream")
SPLITS = ("as_is", "whole", "atomic", "char", "size:3", "size:7")
_END = re.compile(r"(?:<｜end▁of▁sentence｜>|<\|im_end\|>|<\|endoftext\|>)\s*\Z")  # which a server hides
_SPECIAL = re.compile(r"<｜[^｜]*｜>|｜DSML｜|</?(?:think|tool_call)>")


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 when a case could not be run. Raises UnsupportedConfig, InvalidRequest naming the tool."""
    found = _parser().parse_args(list(argv))
    if found.cases is not None:
        if found.file is not None:
            raise UnsupportedConfig(f"unexpected {found.file!r}: --cases names the file")
        return run_cases(found.cases, parse_case)
    if found.file is None or (found.format is None and found.reasoning_parser is None):
        raise UnsupportedConfig("give --format and a FILE, or --cases FILE; thalweg parse --help shows how")
    text = _END.sub("", read_text(found.file))
    reasoning, inside = found.reasoning_parser, None
    if reasoning is None and "</think>" in text:
        reasoning, inside = "deepseek-v3", True
    functions = None if found.tools is None else read_tools(read_json(found.tools))
    parser = AnswerParser(
        reasoning,
        None if found.format == "none" else found.format,
        thinking=found.thinking or None,
        inside=inside,
        functions=functions or (),
        offered=functions != (),
        hold=not found.stream,
    )
    print(json.dumps(_message(_feed(parser, [text])), ensure_ascii=False, indent=2))
    return 0


def parse_case(case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A case in each of its modes and splits. Raises UnsupportedConfig for an unknown format or split, InvalidRequest
    for a wrong tool.
    """
    splits, chunks = case.get("splits") or {"must": SPLITS}, _shown(case.get("chunks"))
    functions = read_tools(case.get("tools"))
    for mode in case.get("modes") or MODES:
        if mode not in MODES:
            raise UnsupportedConfig(f"unknown mode {mode!r}; there is {', '.join(MODES)}")
        for how in dict.fromkeys((*splits.get("must", ()), *splits.get("should", ()))):
            parser = AnswerParser(
                case.get("reasoning_parser"),
                case.get("format"),
                thinking=case.get("thinking"),
                functions=functions,
                offered=bool(functions) or case.get("tools") is None,
                hold=mode == "nonstream",
            )
            yield {"mode": mode, "split": how, **_message(_feed(parser, split(chunks, how)))}


def _shown(chunks: Any) -> list[str]:
    """The chunks as a server would read them: without the token that ended the answer."""
    if not isinstance(chunks, list) or not all(isinstance(chunk, str) for chunk in chunks):
        raise UnsupportedConfig("chunks must be a list of texts")
    left = len(_END.sub("", "".join(chunks)))
    ends = itertools.accumulate(map(len, chunks))
    return [
        chunk[: max(0, len(chunk) + left - end)] if end > left else chunk
        for chunk, end in zip(chunks, ends, strict=True)
    ]


def split(chunks: Sequence[str], how: str) -> list[str]:
    """The same text cut in another way: `as_is`, `whole`, `char`, `atomic` (special tokens whole, else characters),
    `size:N`.
    """
    text = "".join(chunks)
    name, _, size = how.partition(":")
    if how == "as_is":
        return list(chunks)
    if how == "whole":
        return [text]
    if how == "char":
        return list(text)
    if how == "atomic":
        inside = {i for found in _SPECIAL.finditer(text) for i in range(found.start() + 1, found.end())}
        edges = [i for i in range(len(text) + 1) if i not in inside]
        return [text[a:b] for a, b in itertools.pairwise(edges)]
    if name == "size" and size.isdecimal() and int(size):
        return [text[i : i + int(size)] for i in range(0, len(text), int(size))]
    raise UnsupportedConfig(f"unknown split {how!r}; there is as_is, whole, atomic, char, size:N")


def _feed(parser: AnswerParser, deltas: Iterable[str]) -> ParsedAnswer:
    for delta in deltas:
        parser.feed(delta)
    parser.finish()
    return parser.answer


def _message(parsed: ParsedAnswer) -> dict[str, Any]:
    return {
        "content": parsed.content,
        "reasoning_content": parsed.reasoning,
        "tool_calls": [call._asdict() for call in parsed.calls],
        "finish_reason": "tool_calls" if parsed.has_calls else "stop",
    }


def _parser() -> OptionsParser:
    parser = OptionsParser(
        "thalweg parse",
        "Reads a model's raw output as the server would: reasoning, content, tool calls, as JSON.",
        EPILOG,
        "thalweg parse --format NAME FILE [--flag value ...]\n       thalweg parse --cases FILE",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--format", choices=[*TOOL_FORMATS, "none"], help="the tool calls' markup")
    parser.add_argument("--reasoning-parser", choices=[*REASONING_FORMATS], help="what reads the thought")
    parser.add_argument("--thinking", action="store_true", help="the request enabled thinking")
    parser.add_argument("--tools", metavar="FILE", help="the request's tools, as JSON: their schemas tell the types")
    parser.add_argument(
        "--stream", action="store_true", help="as a stream would give it: a malformed call is a call, not text"
    )
    parser.add_argument(
        "--cases", metavar="FILE", help="parser cases; prints a JSON object a line for each case, mode and split"
    )
    return parser
