"""Requests drawn from ServeGen's statistics of a service: for each client its rate, burstiness and lengths over a day
(arXiv 2505.09999).

The archive has `chunk-N-trace.csv` (window start in s, requests/s, CV, Gamma or Weibull, its shape and scale; nothing
when idle) and `chunk-N-dataset.json` (from a second of the day on, densities of input and output tokens, each a Python
dict literal in a string). Gaps have the fitted shape and the mean of the window's rate: the fitted scale alone would
give a fifth more requests than there were. Lengths are drawn apart from one another, and contents are random: the data
say nothing of either. Shares of reasoning are not used.
"""

from __future__ import annotations

import ast
import heapq
import json
import math
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from random import Random

from thalweg.bench.datasets import Prompt, Vocabulary
from thalweg.bench.errors import DatasetError
from thalweg.bench.request_traces import Row, TraceLimits, prompts_of

WINDOW = 600.0  # seconds of a row of a client's trace
MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
# a gap of this shape with mean 1
DRAWS: Mapping[str, Callable[[Random, float], float]] = {
    "Gamma": lambda rng, shape: rng.gammavariate(shape, 1 / shape),
    "Weibull": lambda rng, shape: rng.weibullvariate(1 / math.gamma(1 + 1 / shape), shape),
}


@dataclass(frozen=True, slots=True)
class Busy:
    """A window in which a client sends. begin: second of the day; rate: requests a second; pattern, shape: of the gaps
    between them.
    """

    begin: float
    rate: float
    pattern: str
    shape: float


@dataclass(frozen=True, slots=True)
class Density:
    """Lengths in tokens with their cumulative weights."""

    lengths: Sequence[int]
    weights: Sequence[float]

    def draw(self, rng: Random) -> int:
        return rng.choices(self.lengths, cum_weights=self.weights)[0]


@dataclass(frozen=True, slots=True)
class Client:
    """windows: in order. lengths: (from this second on, of inputs, of outputs), in order."""

    number: int
    windows: Sequence[Busy]
    lengths: Sequence[tuple[float, Density, Density]]

    def rows(self, begin: float, end: float, seed: int) -> Iterator[Row]:
        """Its requests at begin <= time < end, in order; the same for the same seed."""
        rng = Random(f"{seed}/client {self.number}")
        for window in self.windows:
            first, last = max(window.begin, begin), min(window.begin + WINDOW, end)
            draw, at = DRAWS[window.pattern], first
            if first >= last:
                continue
            at += rng.random() * draw(rng, window.shape) / window.rate  # the window begins somewhere in a gap
            while at < last:
                inputs, outputs = self._lengths(at)
                yield Row(self.number, at, inputs.draw(rng), outputs.draw(rng))
                at += draw(rng, window.shape) / window.rate

    def _lengths(self, at: float) -> tuple[Density, Density]:
        known = [one for one in self.lengths if one[0] <= at] or self.lengths[:1]
        return known[-1][1], known[-1][2]


def _windows(text: str, where: str) -> list[Busy]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip() or (len(cells) > 3 and not cells[3]):
            continue  # idle
        try:
            begin, rate, _, pattern, shape, _ = cells
            busy = Busy(float(begin), float(rate), pattern, float(shape))
            if pattern not in DRAWS or not 0 < busy.shape < math.inf or not 0 <= busy.rate < math.inf or busy.begin < 0:
                raise ValueError(f"expected {' or '.join(DRAWS)} with a shape above 0, and a rate")
            if busy.rate:
                found.append(busy)
        except ValueError as error:
            raise DatasetError(
                f"{where}, line {number}: {error} (window start, rate, CV, pattern, shape, scale)"
            ) from error
    return found


def _density(windows: Mapping[str, object], name: str, where: str) -> Density:
    try:
        table = ast.literal_eval(str(windows[name]))
        pairs = sorted((int(length), float(weight)) for length, weight in table.items() if float(weight) > 0)
        if not pairs or pairs[0][0] < 0:
            raise ValueError("no lengths")
    except (KeyError, ValueError, SyntaxError, TypeError, AttributeError) as error:
        raise DatasetError(f"{where}, {name}: no dict of lengths and weights ({error})") from error
    return Density([length for length, _ in pairs], list(accumulate(weight for _, weight in pairs)))


def _lengths(text: str, where: str) -> list[tuple[float, Density, Density]]:
    try:
        starts = json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{where}: not JSON ({error})") from error
    if not isinstance(starts, dict) or not all(isinstance(one, dict) and key.isdigit() for key, one in starts.items()):
        raise DatasetError(f"{where}: expected an object of window starts")
    found = []
    for start, windows in sorted(starts.items(), key=lambda item: int(item[0])):
        if windows.get("input_tokens") in (None, "", "{}"):
            continue  # the client was idle then
        place = f"{where}, window {start}"
        inputs, outputs = (_density(windows, name, place) for name in ("input_tokens", "output_tokens"))
        found.append((float(start), inputs, outputs))
    return found


def clients(path: Path) -> list[Client]:
    """All clients of an archive. Raises DatasetError."""
    texts: dict[int, dict[str, str]] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                match, file = MEMBER.search(member.name), archive.extractfile(member) if member.isfile() else None
                if match and file is not None:
                    texts.setdefault(int(match[1]), {})[match[2]] = file.read().decode("utf-8")
    except (OSError, EOFError, tarfile.TarError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    found = []
    for number, parts in sorted(texts.items()):
        if len(parts) != 2:
            raise DatasetError(
                f"{path}: client {number} has {', '.join(parts)} only; a trace and a data set make a client"
            )
        where = f"{path}, chunk-{number}-"
        lengths = _lengths(parts["dataset.json"], f"{where}dataset.json")
        if lengths:
            found.append(Client(number, _windows(parts["trace.csv"], f"{where}trace.csv"), lengths))
    if not found:
        raise DatasetError(f"{path}: no clients in it (chunk-N-trace.csv with chunk-N-dataset.json)")
    return found


def servegen_prompts(path: Path, vocabulary: Vocabulary, count: int, limits: TraceLimits, seed: int) -> list[Prompt]:
    """The first `count` requests (0: all) of the part of the day that the limits name. Raises DatasetError."""
    limits.check()
    streams = [client.rows(limits.begin, limits.end, seed) for client in clients(path)]
    merged = heapq.merge(*streams, key=lambda row: row.at)
    rows = list(islice(merged, count or None))
    if not rows:
        raise DatasetError(f"{path}: no client sends anything in the part asked for")
    return prompts_of(rows, vocabulary, limits, seed)
