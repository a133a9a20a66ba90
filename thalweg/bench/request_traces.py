"""Recorded traces as prompts: Mooncake's (JSON lines with prefix hashes) and Azure's (CSV of lengths), gzipped or not.

A Mooncake hash id becomes the same tokens wherever it stands, so prefixes are shared as they were when it was recorded.
An Azure trace has no contents: its prompts share nothing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

from thalweg.bench.datasets import Prompt, Vocabulary, json_lines, lines_of
from thalweg.bench.errors import DatasetError

BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
LONGEST = 10_000_000  # tokens; a row with more is a broken row, not a request
MOONCAKE = "a Mooncake trace has timestamp, input_length, output_length, hash_ids"
AZURE = "an Azure trace has TIMESTAMP, ContextTokens, GeneratedTokens"


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """How a trace is cut and scaled.

    max_input, max_output: lengths are cut to these, 0 is no limit. slowdown: times are multiplied by it. begin, end:
    seconds of the recording; rows at begin <= time < end are taken. scale: lengths are multiplied by it, and so is what
    a hash id stands for, which keeps the prefixes' share of the prompts. jitter: seconds of the recording, times move
    by up to that (Mooncake's stand on a grid of 3 s).
    """

    max_input: int = 0
    max_output: int = 0
    slowdown: float = 1.0
    begin: float = 0.0
    end: float = math.inf
    scale: float = 1.0
    jitter: float = 0.0

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

    @property
    def block(self) -> int:
        """Tokens that a hash id stands for."""
        return max(1, round(BLOCK * self.scale))

    def cut(self, length: int, limit: int) -> int:
        scaled = max(1, round(length * self.scale))
        return min(scaled, limit or scaled)


@dataclass(frozen=True, slots=True)
class Row:
    """A request as recorded. at: seconds after the start of the recording. hashes: ids of its prefix blocks."""

    number: int
    at: float
    input_len: int
    output_len: int
    hashes: tuple[int, ...] = ()


def _whole(row: Mapping[str, object], field: str) -> int:
    """A length. Raises ValueError that says what is there."""
    value = row.get(field)
    text = value if isinstance(value, str) else "" if isinstance(value, bool) else str(value)
    if not text.strip().isdecimal():
        raise ValueError(f"{field} is {'not there' if value is None else f'no whole number: {value!r}'}")
    if int(text) > LONGEST:
        raise ValueError(f"{field} is {text}, more than the {LONGEST} tokens that anything here holds")
    return int(text)


def _mooncake(path: Path) -> Iterator[Row]:
    for number, row in json_lines(path):
        try:
            at, hashes = row.get("timestamp"), row.get("hash_ids")
            if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < math.inf:
                raise ValueError(f"timestamp is no number of milliseconds: {at!r}")
            if not isinstance(hashes, list) or not all(type(one) is int for one in hashes):
                raise ValueError("hash_ids is no list of whole numbers")
            lengths = _whole(row, "input_length"), _whole(row, "output_length")
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: {error} ({MOONCAKE})") from error
        yield Row(number, at / 1000, *lengths, tuple(hashes))


def _azure(path: Path) -> Iterator[Row]:
    first: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines_of(path)), 2):
        try:
            at = datetime.fromisoformat((row.get("TIMESTAMP") or "")[:26])  # seven digits of a second: Python reads six
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: TIMESTAMP is no time: {error} ({AZURE})") from error
        try:
            lengths = _whole(row, "ContextTokens"), _whole(row, "GeneratedTokens")
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: {error} ({AZURE})") from error
        first = first or at
        yield Row(number, (at - first).total_seconds(), *lengths)


def _reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    start = next(lines_of(path), "").lstrip("\ufeff").lstrip()
    if start.startswith("{"):
        return _mooncake
    if start.startswith("TIMESTAMP"):
        return _azure
    if not start.strip():
        raise DatasetError(f"{path}: empty, or its first line is")
    raise DatasetError(
        f"{path}: neither a Mooncake trace (JSON lines) nor an Azure one (CSV that starts with TIMESTAMP)"
    )


class _Contents:
    """Makes a row's tokens."""

    def __init__(self, vocabulary: Vocabulary, limits: TraceLimits, seed: int) -> None:
        self.vocabulary, self.limits, self.seed = vocabulary, limits, seed
        self.blocks: dict[int, list[int]] = {}
        self.rng = Random(f"{seed}/rows")

    def _block(self, name: int) -> list[int]:
        if name not in self.blocks:
            self.blocks[name] = self.vocabulary.draw(Random(f"{self.seed}/{name}"), self.limits.block)
        return self.blocks[name]

    def of(self, row: Row) -> list[int]:
        length, ids = self.limits.cut(row.input_len, self.limits.max_input), list[int]()
        for name in row.hashes[: -(-length // self.limits.block)]:
            ids += self._block(name)
        if len(ids) < length:  # fewer hash ids than tokens: the rest is its own
            ids += self.vocabulary.draw(self.rng, length - len(ids))
        return ids[:length]


def prompts_of(rows: Sequence[Row], vocabulary: Vocabulary, limits: TraceLimits, seed: int) -> list[Prompt]:
    """The rows with their contents, cut and scaled."""
    contents, rng, prompts = _Contents(vocabulary, limits, seed), Random(f"{seed}/jitter"), list[Prompt]()
    for row in rows:
        at = limits.slowdown * (row.at + rng.uniform(0.0, limits.jitter))
        prompts.append(vocabulary.prompt(contents.of(row), limits.cut(row.output_len, limits.max_output), at))
    return prompts


def trace_prompts(path: Path, vocabulary: Vocabulary, count: int, limits: TraceLimits, seed: int) -> list[Prompt]:
    """The first `count` rows (0: all) of what the limits leave of a trace, in the order of the file. Every row is read
    and checked, so a broken line is found before anything is sent. Raises DatasetError that names file, line and
    field.
    """
    limits.check()
    rows = [row for row in _reader(path)(path) if limits.begin <= row.at < limits.end]
    if not rows:
        part = " in the part asked for" if limits.begin or limits.end < math.inf else ""
        raise DatasetError(f"{path}: a trace without requests{part}")
    return prompts_of(rows[: count or len(rows)], vocabulary, limits, seed)
