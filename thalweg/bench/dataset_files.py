"""Data sets from files: prompts (JSON lines or text), ShareGPT, and recorded traces (Mooncake, Azure), gzipped or not.

A Mooncake hash id becomes the same tokens wherever it occurs, so prefixes are shared as they were when it was recorded.
An Azure trace has no contents: its prompts share nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import msgspec

from thalweg.bench.datasets import Message, OrdinaryTokens, Prompt
from thalweg.bench.errors import DatasetError

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
SHORTEST = 2  # tokens of a ShareGPT prompt and of its answer: SGLang leaves shorter ones out
BLOCK = 512  # tokens of a Mooncake hash id
LONGEST = 10_000_000  # tokens; a row with more is broken
MOONCAKE = "a Mooncake trace has timestamp, input_length, output_length, hash_ids"
AZURE = "an Azure trace has TIMESTAMP, ContextTokens, GeneratedTokens"


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text file, gzipped or not. Raises DatasetError."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as raw:
            yield from io.TextIOWrapper(io.BytesIO(raw.read()), encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number from 1, object) of each line that is not empty. Raises DatasetError."""
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DatasetError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:60]}")
        yield number, value


def file_prompts(path: Path, count: int, output_len: int, vocabulary: OrdinaryTokens) -> list[Prompt]:
    """The first `count` prompts (0: all) of a file: JSON lines with `prompt` or `messages` (and `output_len` where it
    differs), or plain text with one prompt a line. Fewer lines than prompts are repeated. Raises DatasetError.
    """
    if next(lines_of(path), "").lstrip().startswith("{"):
        prompts = [_line_prompt(path, number, row, output_len, vocabulary) for number, row in json_lines(path)]
    else:
        prompts = [Prompt(output_len, text=line.strip()) for line in lines_of(path) if line.strip()]
    if not prompts:
        raise DatasetError(f"{path}: no prompts in it")
    return [prompts[i % len(prompts)] for i in range(count or len(prompts))]


def _line_prompt(path: Path, number: int, row: Message, output_len: int, vocabulary: OrdinaryTokens) -> Prompt:
    limit = row.get("output_len", row.get("max_tokens", output_len))
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise DatasetError(f"{path}, line {number}: output_len is a number of tokens from 1 on, got {limit!r}")
    prompt, messages = row.get("prompt"), row.get("messages", row.get("conversations"))
    if isinstance(prompt, str) and prompt:
        return Prompt(limit, text=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return vocabulary.prompt(prompt, limit)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Prompt(limit, messages=tuple(map(_message, messages)))
    raise DatasetError(f'{path}, line {number}: needs "prompt" (text or token ids) or "messages" (a list of objects)')


def _message(message: Message) -> Message:
    """In OpenAI's form; ShareGPT says "from" and "value"."""
    if "from" not in message:
        return message
    role = str(message["from"])
    return {"role": SHAREGPT_ROLES.get(role, role), "content": message.get("value", "")}


def _first_exchange(path: Path, number: int, row: object) -> tuple[str, str] | None:
    """The first question and its answer; None for a conversation without an answer."""
    turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
    if not isinstance(turns, list):
        raise DatasetError(f'{path}, entry {number}: needs "conversations", a list of {{"from": …, "value": …}}')
    texts = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns[:2]]
    question, answer = (*texts, None, None)[:2]
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None


def sharegpt_prompts(
    path: Path, count: int, lengths: tuple[int, int], vocabulary: OrdinaryTokens, seed: int
) -> list[Prompt]:
    """The first question of each conversation of a ShareGPT file (a JSON list), in random order, with the length of its
    first answer. count: 0 is all. lengths: tokens of every answer (0: as in the file), and of question and answer
    together at most (0: no limit). Raises DatasetError.
    """
    if vocabulary.encode is None:
        raise DatasetError("ShareGPT has text, and lengths are counted in tokens: give --tokenizer")
    try:
        rows = json.loads("".join(lines_of(path)))
    except ValueError as error:
        raise DatasetError(f"{path}: not a JSON list of conversations ({error})") from error
    if not isinstance(rows, list):
        raise DatasetError(
            f"{path}: expected a JSON list of conversations; a file with a JSON object a line is --dataset-name file"
        )
    exchanges = list(filter(None, (_first_exchange(path, number, row) for number, row in enumerate(rows, 1))))
    Random(seed).shuffle(exchanges)
    prompts, (fixed, context) = list[Prompt](), lengths
    for question, answer in exchanges:
        input_len, output_len = len(vocabulary.encode(question)), fixed or len(vocabulary.encode(answer))
        if min(input_len, output_len) >= SHORTEST and (not context or input_len + output_len <= context):
            prompts.append(Prompt(output_len, text=question, input_len=input_len))
        if len(prompts) == count > 0:
            break
    if not prompts:
        raise DatasetError(f"{path}: no conversation in it has a question and an answer of such lengths")
    return prompts


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """How a trace is cut and scaled."""

    max_input: int = 0  # tokens; 0 is no limit
    max_output: int = 0
    slowdown: float = 1.0  # times are multiplied by it
    begin: float = 0.0  # seconds of the recording: rows at begin <= time < end are taken
    end: float = math.inf
    scale: float = 1.0  # multiplies lengths and the tokens of a hash id, which keeps the share of the prefixes
    jitter: float = 0.0  # seconds of the recording that times move at most (Mooncake's are multiples of 3 s)

    def check(self) -> None:
        """Raises DatasetError that names the flag."""
        if not 0 < self.slowdown < math.inf:
            raise DatasetError(f"--trace-slowdown-factor must be above 0, got {self.slowdown}")
        if not 0 < self.scale <= 1:
            raise DatasetError(f"--trace-length-scale must be above 0 and at most 1, got {self.scale}")
        if not 0 <= self.begin < self.end:
            raise DatasetError(f"--trace-begin {self.begin:g} and --trace-end {self.end:g} leave nothing between them")
        if not 0 <= self.jitter < math.inf:
            raise DatasetError(f"--trace-jitter is a number of seconds from 0 on, got {self.jitter}")

    def cut(self, length: int, limit: int) -> int:
        scaled = max(1, round(length * self.scale))
        return min(scaled, limit or scaled)


class TraceRow(NamedTuple):
    """A request as recorded."""

    at: float  # seconds after the start of the recording
    input_len: int
    output_len: int
    hashes: tuple[int, ...] = ()  # ids of its prefix blocks


Count = Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]


class MooncakeRow(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    hash_ids: tuple[int, ...]
    input_length: Count
    output_length: Count


class AzureRow(
    msgspec.Struct, rename={"timestamp": "TIMESTAMP", "inputs": "ContextTokens", "outputs": "GeneratedTokens"}
):
    timestamp: str
    inputs: Count
    outputs: Count


def _mooncake(path: Path) -> Iterator[TraceRow]:
    for number, row in json_lines(path):
        try:
            known = msgspec.convert(row, MooncakeRow)
        except msgspec.ValidationError as error:
            raise DatasetError(f"{path}, line {number}: {error} ({MOONCAKE})") from error
        yield TraceRow(known.timestamp / 1000, known.input_length, known.output_length, known.hash_ids)


def _azure(path: Path) -> Iterator[TraceRow]:
    first: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines_of(path)), 2):
        try:
            known = msgspec.convert(row, AzureRow, strict=False)
            at = datetime.fromisoformat(known.timestamp[:26])  # seven digits of a second: Python reads six
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: {error} ({AZURE})") from error
        first = first or at
        yield TraceRow((at - first).total_seconds(), known.inputs, known.outputs)


def _trace_rows(path: Path) -> Iterator[TraceRow]:
    start = next(lines_of(path), "").lstrip("\ufeff").lstrip()
    if start.startswith("{"):
        return _mooncake(path)
    if start.startswith("TIMESTAMP"):
        return _azure(path)
    if not start.strip():
        raise DatasetError(f"{path}: empty, or its first line is")
    raise DatasetError(
        f"{path}: neither a Mooncake trace (JSON lines) nor an Azure one (CSV that starts with TIMESTAMP)"
    )


def prompts_of(rows: Sequence[TraceRow], vocabulary: OrdinaryTokens, limits: TraceLimits, seed: int) -> list[Prompt]:
    """The rows with tokens, cut and scaled."""
    own, jitter = Random(f"{seed}/rows"), Random(f"{seed}/jitter")
    block, blocks, prompts = max(1, round(BLOCK * limits.scale)), dict[int, list[int]](), list[Prompt]()
    for row in rows:
        length, ids = limits.cut(row.input_len, limits.max_input), list[int]()
        for name in row.hashes[: -(-length // block)]:
            if name not in blocks:
                blocks[name] = vocabulary.draw(Random(f"{seed}/{name}"), block)
            ids += blocks[name]
        ids += vocabulary.draw(own, max(length - len(ids), 0))  # fewer hash ids than tokens: the rest is its own
        at = limits.slowdown * (row.at + jitter.uniform(0.0, limits.jitter))
        prompts.append(vocabulary.prompt(ids[:length], limits.cut(row.output_len, limits.max_output), at))
    return prompts


def trace_prompts(path: Path, vocabulary: OrdinaryTokens, count: int, limits: TraceLimits, seed: int) -> list[Prompt]:
    """The first `count` rows (0: all) of the limits' part of a trace, in the order of the file. Every row is checked
    before anything is sent. Raises DatasetError that names file, line and field.
    """
    limits.check()
    rows = [row for row in _trace_rows(path) if limits.begin <= row.at < limits.end]
    if not rows:
        part = " in the part asked for" if limits.begin or limits.end < math.inf else ""
        raise DatasetError(f"{path}: a trace without requests{part}")
    return prompts_of(rows[: count or len(rows)], vocabulary, limits, seed)
