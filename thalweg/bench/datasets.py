"""What the load generator sends: random tokens of exact lengths, recorded traces, prompts from a file.

A prompt is token ids wherever the length must be exact, because text of n tokens need not come back as n tokens. For an API that
takes only text (chat) the ids are decoded, and the server's own count is what is reported."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

DATASETS = ("random", "trace", "file")
LATER = ("sharegpt", "generated-shared-prefix", "random-ids", "mooncake", "openai", "custom")
Decode = Callable[[Sequence[int]], str]


class DatasetError(Exception):
    """A data set that cannot be used: names the file, the line and what was expected."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send. Exactly one of ids, text and messages is not empty. input_len: 0 where only the server can count.
    at: seconds after the start of the trace, 0 where there is no trace. decode: turns ids into text for an API that takes none."""

    output_len: int
    ids: Sequence[int] = ()
    text: str = ""
    messages: tuple[Mapping[str, object], ...] = ()
    input_len: int = 0
    at: float = 0.0
    decode: Decode | None = None

    def as_ids_or_text(self) -> list[int] | str:
        """For a completions API. Raises DatasetError for a conversation."""
        if self.messages:
            raise DatasetError(
                "this data set has conversations, which completions cannot carry: use --backend openai-chat"
            )
        return self.text or list(self.ids)

    def as_messages(self) -> list[Mapping[str, object]]:
        """For a chat API. Raises DatasetError for token ids without a tokenizer."""
        if self.messages:
            return list(self.messages)
        if self.ids and self.decode is None:
            raise DatasetError(
                "a chat API takes text and this data set has token ids: give --tokenizer, the folder of tokenizer.json"
            )
        return [{"role": "user", "content": self.text if self.decode is None else self.decode(self.ids)}]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that random prompts draw from (no special ones, which would end or steer a prompt). decode: see `Prompt`."""

    ids: Sequence[int]
    decode: Decode | None = None

    def draw(self, rng: Random, count: int) -> list[int]:
        return rng.choices(self.ids, k=count)


def vocabulary_of(tokenizer: Path) -> Vocabulary:
    """The ordinary tokens of a `tokenizer.json`, given as the file or as its folder. Raises DatasetError."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise DatasetError(f"--tokenizer: {file} is not there; give a folder with a tokenizer.json, or that file")
    loaded = Tokenizer.from_file(str(file))
    special = loaded.get_added_tokens_decoder()
    ids = sorted(token for token in loaded.get_vocab(with_added_tokens=True).values() if token not in special)
    if not ids:
        raise DatasetError(f"--tokenizer: {file} has no ordinary tokens")
    return Vocabulary(ids, loaded.decode)


# --- random ------------------------------------------------------------------------------------------------------------


def random_prompts(
    vocabulary: Vocabulary, count: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> list[Prompt]:
    """Random tokens. Lengths are uniform in [max(1, range_ratio × length), length] (SGLang's meaning: 1.0 is fixed, 0.0 halves
    the mean; vLLM's flag of the same name means something else)."""
    if not 0.0 <= range_ratio <= 1.0:
        raise DatasetError(f"--random-range-ratio must be between 0 and 1, got {range_ratio}: 1 gives fixed lengths")
    if input_len < 1 or output_len < 1:
        raise DatasetError(f"random lengths must be at least 1, got input {input_len} and output {output_len}")
    rng = Random(seed)
    low_in, low_out = max(1, int(input_len * range_ratio)), max(1, int(output_len * range_ratio))
    lengths = [(rng.randint(low_in, input_len), rng.randint(low_out, output_len)) for _ in range(count)]
    return [
        Prompt(output, ids=vocabulary.draw(rng, size), input_len=size, decode=vocabulary.decode)
        for size, output in lengths
    ]


# --- traces ------------------------------------------------------------------------------------------------------------

BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """max_input, max_output: lengths are cut to these, 0 is no limit. slowdown: timestamps are multiplied by it."""

    max_input: int = 0
    max_output: int = 0
    slowdown: float = 1.0

    def cut(self, input_len: int, output_len: int) -> tuple[int, int]:
        return min(input_len, self.max_input or input_len), min(output_len, self.max_output or output_len)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as raw:
            yield from io.TextIOWrapper(io.BytesIO(raw.read()), encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DatasetError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:60]}")
        yield number, value


def _block(vocabulary: Vocabulary, seed: int, block: int) -> list[int]:
    return vocabulary.draw(Random(f"{seed}/{block}"), BLOCK)


def _mooncake(path: Path, vocabulary: Vocabulary, count: int, limits: TraceLimits, seed: int) -> Iterator[Prompt]:
    blocks: dict[int, list[int]] = {}
    for number, row in _json_lines(path):
        try:
            at, given = float(str(row["timestamp"])) / 1000, row["hash_ids"]
            lengths = int(str(row["input_length"])), int(str(row["output_length"]))
            if not isinstance(given, list) or min(lengths) < 0:
                raise ValueError("hash_ids is a list, lengths are not negative")
            names = [int(name) for name in given]
        except (KeyError, ValueError, TypeError) as error:
            raise DatasetError(
                f"{path}, line {number}: a Mooncake trace has timestamp, input_length, output_length, hash_ids; wrong: {error}"
            ) from error
        input_len, output_len = limits.cut(max(lengths[0], 1), max(lengths[1], 1))
        ids: list[int] = []
        for name in names[: -(-input_len // BLOCK)]:
            if name not in blocks:
                blocks[name] = _block(vocabulary, seed, name)
            ids += blocks[name]
        if len(ids) < input_len:  # a row with fewer hash ids than tokens: the rest is its own
            ids += vocabulary.draw(Random(f"{seed}/row {number}"), input_len - len(ids))
        yield Prompt(
            output_len, ids=ids[:input_len], input_len=input_len, at=at * limits.slowdown, decode=vocabulary.decode
        )
        count -= 1
        if count == 0:
            return


def _azure(path: Path, vocabulary: Vocabulary, count: int, limits: TraceLimits, seed: int) -> Iterator[Prompt]:
    first: datetime | None = None
    rng = Random(seed)
    for number, row in enumerate(csv.DictReader(_lines(path)), 2):
        try:
            # seven digits of a second: Python reads six
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, ValueError, TypeError) as error:
            raise DatasetError(
                f"{path}, line {number}: an Azure trace has TIMESTAMP, ContextTokens, GeneratedTokens; wrong: {error}"
            ) from error
        first = first or at
        input_len, output_len = limits.cut(max(lengths[0], 1), max(lengths[1], 1))
        seconds = (at - first).total_seconds() * limits.slowdown
        yield Prompt(
            output_len, ids=vocabulary.draw(rng, input_len), input_len=input_len, at=seconds, decode=vocabulary.decode
        )
        count -= 1
        if count == 0:
            return


def trace_prompts(path: Path, vocabulary: Vocabulary, count: int, limits: TraceLimits, seed: int) -> list[Prompt]:
    """The first `count` rows (0: all) of a Mooncake trace (JSONL) or an Azure one (CSV), gzipped or not.

    A Mooncake hash id becomes the same 512 tokens wherever it stands, so prefixes are shared as they were when it was recorded.
    An Azure trace has no contents: its prompts share nothing.
    """
    if limits.slowdown <= 0:
        raise DatasetError(f"--trace-slowdown-factor must be above 0, got {limits.slowdown}")
    start = next(_lines(path), "").lstrip("\ufeff")
    reader = _mooncake if start.lstrip().startswith("{") else _azure if start.startswith("TIMESTAMP") else None
    if reader is None:
        raise DatasetError(
            f"{path}: neither a Mooncake trace (JSON lines) nor an Azure one (CSV that starts with TIMESTAMP)"
        )
    prompts = list(reader(path, vocabulary, count, limits, seed))
    if not prompts:
        raise DatasetError(f"{path}: a trace without requests")
    return prompts


# --- file --------------------------------------------------------------------------------------------------------------


def _from_object(path: Path, number: int, row: Mapping[str, object], output_len: int, decode: Decode | None) -> Prompt:
    limit = row.get("output_len", row.get("max_tokens", output_len))
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise DatasetError(f"{path}, line {number}: output_len is a number of tokens from 1 on, got {limit!r}")
    prompt, messages = row.get("prompt"), row.get("messages", row.get("conversations"))
    if isinstance(prompt, str) and prompt:
        return Prompt(limit, text=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Prompt(limit, ids=prompt, input_len=len(prompt), decode=decode)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Prompt(limit, messages=tuple(messages))
    raise DatasetError(f'{path}, line {number}: needs "prompt" (text or token ids) or "messages" (a list of objects)')


def file_prompts(path: Path, count: int, output_len: int, decode: Decode | None = None) -> list[Prompt]:
    """The first `count` prompts (0: all) of a file: JSON lines with `prompt` or `messages` (and `output_len` where it differs from
    the given one), or plain text with one prompt a line. Fewer lines than prompts are gone through again."""
    start = next(_lines(path), "")
    if start.lstrip().startswith("{"):
        prompts = [_from_object(path, number, row, output_len, decode) for number, row in _json_lines(path)]
    else:
        prompts = [Prompt(output_len, text=line.strip()) for line in _lines(path) if line.strip()]
    if not prompts:
        raise DatasetError(f"{path}: no prompts in it")
    return [prompts[i % len(prompts)] for i in range(count or len(prompts))]


# --- when they are sent ------------------------------------------------------------------------------------------------


def schedule(prompts: Sequence[Prompt], rate: float, timestamps: bool, seed: int) -> list[float]:
    """Seconds after the start at which each prompt is due: the trace's own times from its first one on, a Poisson process of `rate` a
    second, or at once (inf)."""
    if timestamps:
        first = min(prompt.at for prompt in prompts)
        return [prompt.at - first for prompt in prompts]
    if rate == float("inf"):
        return [0.0] * len(prompts)
    if not rate > 0:
        raise DatasetError(f"--request-rate must be above 0 (or inf), got {rate}")
    rng, at, due = Random(seed + 1), 0.0, []
    for _ in prompts:
        due.append(at)
        at += rng.expovariate(rate)
    return due
