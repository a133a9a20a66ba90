"""Recorded and simulated arrivals as prompts: Mooncake's and Azure's traces, and ServeGen's statistics of a service.

A Mooncake hash id becomes the same tokens wherever it occurs, so prefixes are shared as they were when it was recorded.
An Azure trace and ServeGen have no contents: their prompts share nothing.

A ServeGen archive (arXiv 2505.09999) has for each client `chunk-N-trace.csv` (window start in s, requests/s, CV, Gamma
or Weibull, its shape and scale; nothing when idle) and `chunk-N-dataset.json` (from a second of the day on, densities
of input and output tokens, each a Python dict literal in a string). Gaps have the fitted shape and the mean of the
window's rate: the fitted scale alone would give a fifth more requests than there were. Input and output lengths are
drawn independently. Shares of reasoning are not used.
"""

from __future__ import annotations

import ast
import csv
import heapq
import json
import math
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import msgspec

from thalweg.bench.dataset_files import json_lines, lines_of
from thalweg.bench.datasets import OrdinaryTokens, SampleRequest
from thalweg.bench.errors import DatasetError

BLOCK = 512  # tokens of a Mooncake hash id
LONGEST = 10_000_000  # tokens; a row with more is broken
WINDOW = 600.0  # seconds of a row of a ServeGen client's trace
MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
# a gap of this shape with mean 1
GAPS: Mapping[str, Callable[[Random, float], float]] = {
    "Gamma": lambda rng, shape: rng.gammavariate(shape, 1 / shape),
    "Weibull": lambda rng, shape: rng.weibullvariate(1 / math.gamma(1 + 1 / shape), shape),
}

Density = dict[int, float]  # weights by length in tokens
Count = Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """Limits and scale of a trace."""

    max_input: int = 0  # tokens; 0 is no limit
    max_output: int = 0
    slowdown: float = 1.0  # times are multiplied by it
    begin: float = 0.0  # seconds of the recording: rows at begin <= time < end are taken
    end: float = math.inf
    scale: float = 1.0  # multiplies lengths and the tokens of a hash id, which keeps the share of the prefixes
    jitter: float = 0.0  # seconds of the recording that times move at most (Mooncake's are multiples of 3 s)

    def cut(self, length: int, limit: int) -> int:
        scaled = max(1, round(length * self.scale))
        return min(scaled, limit or scaled)


class TraceRow(NamedTuple):
    """A request as recorded."""

    at: float  # seconds after the start of the recording
    input_len: int
    output_len: int
    hashes: tuple[int, ...] = ()  # ids of its prefix blocks


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


def _mooncake(path: Path) -> list[TraceRow]:
    rows = json_lines(path, MooncakeRow, "timestamp (ms), input_length, output_length and hash_ids")
    return [TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids) for row in rows]


def _azure(path: Path) -> list[TraceRow]:
    rows = list[TraceRow]()
    first: datetime | None = None
    for number, line in enumerate(csv.DictReader(lines_of(path)), 2):
        try:
            row = msgspec.convert(line, AzureRow, strict=False)
            at = datetime.fromisoformat(row.timestamp[:26])  # seven digits of a second: Python reads six
        except ValueError as error:
            needs = "TIMESTAMP, ContextTokens and GeneratedTokens"
            raise DatasetError(f"{path}, line {number}: needs {needs}: {error}") from error
        first = first or at
        rows.append(TraceRow((at - first).total_seconds(), row.inputs, row.outputs))
    return rows


class RateWindow(NamedTuple):
    """A window in which a client sends."""

    begin: float  # second of the day
    rate: float  # requests a second
    pattern: str  # of GAPS
    shape: float


class SimulatedClient(NamedTuple):
    number: int
    windows: Sequence[RateWindow]  # in order
    lengths: Sequence[tuple[float, Density, Density]]  # (from this second on, of inputs, of outputs), in order

    def rows(self, limits: TraceLimits, seed: int) -> Iterator[TraceRow]:
        """Its requests within the limits, in order; equal for the same seed."""
        rng = Random(f"{seed}/client {self.number}")
        for window in self.windows:
            at, last = max(window.begin, limits.begin), min(window.begin + WINDOW, limits.end)
            gap = GAPS[window.pattern]
            if at >= last:
                continue
            at += rng.random() * gap(rng, window.shape) / window.rate  # the window begins somewhere in a gap
            while at < last:
                known = [lengths for lengths in self.lengths if lengths[0] <= at] or self.lengths[:1]
                inputs, outputs = (rng.choices(list(one), list(one.values()))[0] for one in known[-1][1:])
                yield TraceRow(at, inputs, outputs)
                at += gap(rng, window.shape) / window.rate


def _density(text: str) -> Density:
    density = {int(length): float(weight) for length, weight in sorted(ast.literal_eval(text).items()) if weight > 0}
    if not density or min(density) < 0:
        raise ValueError("no lengths with weights")
    return density


def _client(path: Path, number: int, files: Mapping[str, str]) -> SimulatedClient:
    windows, lengths, where = list[RateWindow](), list[tuple[float, Density, Density]](), "its files"
    try:
        for line, cells in enumerate(csv.reader(files["trace.csv"].splitlines()), 1):
            where = f"trace.csv, line {line}"
            if len(cells) > 3 and not cells[3].strip():
                continue  # idle
            begin, rate, _, pattern, shape, _ = map(str.strip, cells)
            window = RateWindow(float(begin), float(rate), pattern, float(shape))
            if pattern not in GAPS or not 0 < window.shape < math.inf or not 0 <= window.rate < math.inf:
                raise ValueError(f"expected {' or '.join(GAPS)} with a shape above 0, and a rate")
            windows += [window] * (window.rate > 0)
        where = "dataset.json"
        for start, densities in json.loads(files["dataset.json"]).items():
            where = f"dataset.json, window {start}"
            if densities["input_tokens"] not in (None, "", "{}"):  # else the client was idle
                inputs, outputs = (_density(densities[f"{side}_tokens"]) for side in ("input", "output"))
                lengths.append((float(start), inputs, outputs))
    except (LookupError, ValueError, SyntaxError, TypeError, AttributeError) as error:
        raise DatasetError(f"{path}, chunk-{number}-{where}: {error}; see ServeGen's data") from error
    return SimulatedClient(number, windows, sorted(lengths, key=lambda one: one[0]))


def _servegen(path: Path, limits: TraceLimits, seed: int) -> Iterable[TraceRow]:
    texts: dict[int, dict[str, str]] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                match, file = MEMBER.search(member.name), archive.extractfile(member)
                if match and file is not None:
                    texts.setdefault(int(match[1]), {})[match[2]] = file.read().decode("utf-8")
    except (OSError, EOFError, tarfile.TarError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    clients = [_client(path, number, files) for number, files in sorted(texts.items())]
    streams = [client.rows(limits, seed) for client in clients if client.lengths]
    if not streams:
        raise DatasetError(f"{path}: no clients in it (chunk-N-trace.csv with chunk-N-dataset.json)")
    return heapq.merge(*streams, key=lambda row: row.at)


def trace_rows(path: Path, limits: TraceLimits, seed: int) -> Iterable[TraceRow]:
    """Requests as recorded, in order; only simulated clients obey the limits here. Raises DatasetError."""
    if path.is_file() and tarfile.is_tarfile(path):
        return _servegen(path, limits, seed)
    start = next(lines_of(path), "").lstrip("\ufeff").lstrip()
    if start.startswith("{"):
        return _mooncake(path)
    if start.startswith("TIMESTAMP"):
        return _azure(path)
    raise DatasetError(
        f"{path}: neither a Mooncake trace (JSON lines) nor an Azure one (CSV that starts with TIMESTAMP) nor"
        " ServeGen's archive"
    )


def trace_prompts(
    path: Path, vocabulary: OrdinaryTokens, count: int, limits: TraceLimits, seed: int
) -> list[SampleRequest]:
    """The first `count` rows (0: all) of the limits' part of a trace with tokens, cut and scaled. Every line is checked
    before anything is sent. Raises DatasetError that names file, line and field.
    """
    within = (row for row in trace_rows(path, limits, seed) if limits.begin <= row.at < limits.end)
    own, jitter = Random(f"{seed}/rows"), Random(f"{seed}/jitter")
    block, blocks, prompts = max(1, round(BLOCK * limits.scale)), dict[int, list[int]](), list[SampleRequest]()
    for row in islice(within, count or None):
        length, ids = limits.cut(row.input_len, limits.max_input), list[int]()
        for name in row.hashes[: -(-length // block)]:
            if name not in blocks:
                blocks[name] = vocabulary.draw(Random(f"{seed}/{name}"), block)
            ids += blocks[name]
        ids += vocabulary.draw(own, max(length - len(ids), 0))  # fewer hash ids than tokens: the rest is its own
        at = limits.slowdown * (row.at + jitter.uniform(0.0, limits.jitter))
        prompts.append(vocabulary.prompt(ids[:length], limits.cut(row.output_len, limits.max_output), at))
    if not prompts:
        raise DatasetError(f"{path}: no requests between --trace-begin {limits.begin:g} and --trace-end {limits.end:g}")
    return prompts
