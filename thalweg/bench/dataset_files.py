"""Data sets from files, gzipped or not: prompts (JSON lines or text) and ShareGPT's conversations."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar

import msgspec

from thalweg.bench.datasets import Message, OrdinaryTokens, SampleRequest
from thalweg.bench.errors import DatasetError

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
SHORTEST = 2  # tokens of a ShareGPT prompt and of its answer: SGLang leaves shorter ones out

L = TypeVar("L")
Limit = Annotated[int, msgspec.Meta(ge=1)]


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text file, gzipped or not. Raises DatasetError."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as raw:
            yield from io.TextIOWrapper(io.BytesIO(raw.read()), encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


def json_lines(path: Path, kind: type[L], needs: str) -> list[L]:
    """A value for each line that is not empty. Raises DatasetError that names the broken line and what it needs."""
    values = list[L]()
    for number, line in enumerate(lines_of(path), 1):
        if line.strip():
            try:
                values.append(msgspec.json.decode(line, type=kind))
            except (msgspec.DecodeError, UnicodeEncodeError) as error:
                raise DatasetError(f"{path}, line {number}: needs {needs}: {error}") from error
    if not values:
        raise DatasetError(f"{path}: nothing in it")
    return values


class PromptLine(msgspec.Struct):
    """A prompt, or a conversation in OpenAI's or ShareGPT's form."""

    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] = []
    conversations: list[dict[str, Any]] = []
    output_len: Limit | None = None
    max_tokens: Limit | None = None

    def __post_init__(self) -> None:
        if not (self.prompt or self.messages or self.conversations):
            raise ValueError("neither is there")


def file_prompts(path: Path, count: int, output_len: int, vocabulary: OrdinaryTokens) -> list[SampleRequest]:
    """The first `count` prompts (0: all) of a file: JSON lines with `prompt` or `messages` (and `output_len` where it
    differs), or plain text with one prompt a line. Fewer lines than prompts are repeated. Raises DatasetError.
    """
    prompts = list[SampleRequest]()
    if next(lines_of(path), "").lstrip().startswith("{"):
        needs = '"prompt" (text or token ids) or "messages" (a list of objects)'
        for line in json_lines(path, PromptLine, needs):
            limit = line.output_len or line.max_tokens or output_len
            if isinstance(line.prompt, list):
                prompts.append(vocabulary.prompt(line.prompt, limit))
            else:
                messages = tuple(map(_message, line.messages or line.conversations)) if not line.prompt else ()
                prompts.append(SampleRequest(limit, text=line.prompt, messages=messages))
    else:
        prompts = [SampleRequest(output_len, text=line.strip()) for line in lines_of(path) if line.strip()]
    if not prompts:
        raise DatasetError(f"{path}: no prompts in it")
    return [prompts[i % len(prompts)] for i in range(count or len(prompts))]


def _message(message: Message) -> Message:
    """In OpenAI's form; ShareGPT says "from" and "value"."""
    if "from" not in message:
        return message
    role = str(message["from"])
    return {"role": SHAREGPT_ROLES.get(role, role), "content": message.get("value", "")}


class _Turn(msgspec.Struct):
    value: str = ""


class _Talk(msgspec.Struct):
    conversations: list[_Turn]


def sharegpt_prompts(
    path: Path, count: int, lengths: tuple[int, int], vocabulary: OrdinaryTokens, seed: int
) -> list[SampleRequest]:
    """The first question of each conversation of a ShareGPT file (a JSON list), in random order, with the length of its
    first answer. count: 0 is all. lengths: tokens of every answer (0: as in the file), and of question and answer
    together at most (0: no limit). Raises DatasetError.
    """
    if vocabulary.encode is None:
        raise DatasetError("ShareGPT has text, and lengths are counted in tokens: give --tokenizer")
    try:
        talks = msgspec.json.decode("".join(lines_of(path)), type=list[_Talk])
    except msgspec.DecodeError as error:
        raise DatasetError(
            f'{path}: not a JSON list of objects with "conversations" ({error}); JSON lines are --dataset-name file'
        ) from error
    Random(seed).shuffle(talks)
    prompts, (fixed, context) = list[SampleRequest](), lengths
    for question, answer in (talk.conversations[:2] for talk in talks if len(talk.conversations) > 1):
        input_len, output_len = len(vocabulary.encode(question.value)), fixed or len(vocabulary.encode(answer.value))
        if min(input_len, output_len) >= SHORTEST and (not context or input_len + output_len <= context):
            prompts.append(SampleRequest(output_len, text=question.value, input_len=input_len))
        if len(prompts) == count > 0:
            break
    if not prompts:
        raise DatasetError(f"{path}: no conversation in it has a question and an answer of such lengths")
    return prompts
