"""Prompts from files: JSON lines or plain text, and ShareGPT's list of conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from thalweg.bench.datasets import Prompt, Vocabulary, json_lines, lines_of
from thalweg.bench.errors import DatasetError

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
SHORTEST = 2  # tokens of a prompt and of an answer: SGLang leaves shorter ones out


def _from_object(path: Path, number: int, row: Mapping[str, object], output_len: int, words: Vocabulary) -> Prompt:
    limit = row.get("output_len", row.get("max_tokens", output_len))
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise DatasetError(f"{path}, line {number}: output_len is a number of tokens from 1 on, got {limit!r}")
    prompt, messages = row.get("prompt"), row.get("messages", row.get("conversations"))
    if isinstance(prompt, str) and prompt:
        return Prompt(limit, text=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return words.prompt(prompt, limit)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Prompt(limit, messages=tuple(_message(message) for message in messages))
    raise DatasetError(f'{path}, line {number}: needs "prompt" (text or token ids) or "messages" (a list of objects)')


def _message(given: Mapping[str, object]) -> Mapping[str, object]:
    """As OpenAI writes it; ShareGPT says "from" and "value"."""
    if "from" not in given:
        return given
    who = str(given["from"])
    return {"role": ROLES.get(who, who), "content": given.get("value", "")}


def file_prompts(path: Path, count: int, output_len: int, words: Vocabulary) -> list[Prompt]:
    """The first `count` prompts (0: all) of a file: JSON lines with `prompt` or `messages` (and `output_len` where it
    differs from the given one), or plain text with one prompt a line. Fewer lines than prompts are gone through again.
    Raises DatasetError.
    """
    start = next(lines_of(path), "")
    if start.lstrip().startswith("{"):
        prompts = [_from_object(path, number, row, output_len, words) for number, row in json_lines(path)]
    else:
        prompts = [Prompt(output_len, text=line.strip()) for line in lines_of(path) if line.strip()]
    if not prompts:
        raise DatasetError(f"{path}: no prompts in it")
    return [prompts[i % len(prompts)] for i in range(count or len(prompts))]


def _first_exchange(path: Path, number: int, row: object) -> tuple[str, str] | None:
    """What was asked first and what was answered; None for a conversation without an answer."""
    turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
    if not isinstance(turns, list):
        raise DatasetError(f'{path}, entry {number}: needs "conversations", a list of {{"from": …, "value": …}}')
    texts = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns[:2]]
    question, answer = (*texts, None, None)[:2]
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None


def sharegpt_prompts(path: Path, count: int, lengths: tuple[int, int], words: Vocabulary, seed: int) -> list[Prompt]:
    """The first question of each conversation of a ShareGPT file (a JSON list), in random order, with the length of its
    first answer.

    count: how many, 0 is all. lengths: tokens of every answer (0: as in the file), and of question and answer together
    at most (0: no limit). Raises DatasetError.
    """
    if words.encode is None:
        raise DatasetError("ShareGPT has text, and lengths are counted in tokens: give --tokenizer")
    try:
        rows = json.loads("".join(lines_of(path)))
    except ValueError as error:
        raise DatasetError(f"{path}: not a JSON list of conversations ({error})") from error
    if not isinstance(rows, list):
        raise DatasetError(
            f"{path}: expected a JSON list of conversations; a file with a JSON object a line is --dataset-name file"
        )
    exchanges = [one for number, row in enumerate(rows, 1) if (one := _first_exchange(path, number, row)) is not None]
    Random(seed).shuffle(exchanges)
    found: list[Prompt] = []
    fixed, context = lengths
    for question, answer in exchanges:
        asked, told = len(words.encode(question)), fixed or len(words.encode(answer))
        if min(asked, told) >= SHORTEST and (not context or asked + told <= context):
            found.append(Prompt(told, text=question, input_len=asked))
        if count and len(found) == count:
            break
    if not found:
        raise DatasetError(f"{path}: no conversation in it has a question and an answer of such lengths")
    return found


def ids_of(prompts: Sequence[Prompt], words: Vocabulary) -> list[list[int]]:
    """The prompts as token ids, for an engine without a chat format. Raises DatasetError."""
    found = []
    for prompt in prompts:
        shown = prompt.as_ids_or_text()
        if isinstance(shown, str):
            if words.encode is None:
                raise DatasetError("text has to become tokens: give --tokenizer")
            shown = list(words.encode(shown))
        found.append(shown)
    return found
