"""Requests drawn from ServeGen's statistics of a service: for each client its rate, burstiness and lengths over a day
(arXiv 2505.09999).

The archive has `chunk-N-trace.csv` (window start in s, requests/s, CV, Gamma or Weibull, its shape and scale; nothing
when idle) and `chunk-N-dataset.json` (from a second of the day on, densities of input and output tokens, each a Python
dict literal in a string). Gaps have the fitted shape and the mean of the window's rate: the fitted scale alone would
give a fifth more requests than there were. Input and output lengths are drawn independently, and contents are random:
the data have neither. Shares of reasoning are not used.
"""

from __future__ import annotations

import ast
import heapq
import json
import math
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from thalweg.bench.dataset_files import TraceLimits, TraceRow, prompts_of
from thalweg.bench.datasets import OrdinaryTokens, Prompt
from thalweg.bench.errors import DatasetError

WINDOW = 600.0  # seconds of a row of a client's trace
MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
# a gap of this shape with mean 1
GAPS: Mapping[str, Callable[[Random, float], float]] = {
    "Gamma": lambda rng, shape: rng.gammavariate(shape, 1 / shape),
    "Weibull": lambda rng, shape: rng.weibullvariate(1 / math.gamma(1 + 1 / shape), shape),
}

Density = Mapping[int, float]  # weights by length in tokens


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

    def rows(self, begin: float, end: float, seed: int) -> Iterator[TraceRow]:
        """Its requests at begin <= time < end, in order; equal for the same seed."""
        rng = Random(f"{seed}/client {self.number}")
        for window in self.windows:
            at, last = max(window.begin, begin), min(window.begin + WINDOW, end)
            gap = GAPS[window.pattern]
            if at >= last:
                continue
            at += rng.random() * gap(rng, window.shape) / window.rate  # the window begins somewhere in a gap
            while at < last:
                known = [lengths for lengths in self.lengths if lengths[0] <= at] or self.lengths[:1]
                inputs, outputs = (rng.choices(list(one), list(one.values()))[0] for one in known[-1][1:])
                yield TraceRow(at, inputs, outputs)
                at += gap(rng, window.shape) / window.rate


def _windows(text: str, where: str) -> list[RateWindow]:
    windows = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip() or (len(cells) > 3 and not cells[3]):
            continue  # idle
        try:
            begin, rate, _, pattern, shape, _ = cells
            window = RateWindow(float(begin), float(rate), pattern, float(shape))
            if (
                pattern not in GAPS
                or not 0 < window.shape < math.inf
                or not 0 <= window.rate < math.inf
                or window.begin < 0
            ):
                raise ValueError(f"expected {' or '.join(GAPS)} with a shape above 0, and a rate")
        except ValueError as error:
            raise DatasetError(
                f"{where}, line {number}: {error} (window start, rate, CV, pattern, shape, scale)"
            ) from error
        if window.rate:
            windows.append(window)
    return windows


def _density(windows: Mapping[str, object], name: str, where: str) -> Density:
    try:
        table = ast.literal_eval(str(windows[name]))
        density = {
            length: weight for length, weight in sorted((int(a), float(b)) for a, b in table.items()) if weight > 0
        }
        if not density or min(density) < 0:
            raise ValueError("no lengths")
    except (KeyError, ValueError, SyntaxError, TypeError, AttributeError) as error:
        raise DatasetError(f"{where}, {name}: no dict of lengths and weights ({error})") from error
    return density


def _lengths(text: str, where: str) -> list[tuple[float, Density, Density]]:
    try:
        starts = json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{where}: not JSON ({error})") from error
    if not isinstance(starts, dict) or not all(isinstance(one, dict) and key.isdigit() for key, one in starts.items()):
        raise DatasetError(f"{where}: expected an object of window starts")
    lengths = []
    for start, windows in sorted(starts.items(), key=lambda item: int(item[0])):
        if windows.get("input_tokens") not in (None, "", "{}"):  # else the client was idle
            inputs, outputs = (
                _density(windows, f"{side}_tokens", f"{where}, window {start}") for side in ("input", "output")
            )
            lengths.append((float(start), inputs, outputs))
    return lengths


def clients(path: Path) -> list[SimulatedClient]:
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
            raise DatasetError(f"{path}: client {number} has {', '.join(parts)} only; it needs a trace and a data set")
        where = f"{path}, chunk-{number}-"
        if lengths := _lengths(parts["dataset.json"], f"{where}dataset.json"):
            found.append(SimulatedClient(number, _windows(parts["trace.csv"], f"{where}trace.csv"), lengths))
    if not found:
        raise DatasetError(f"{path}: no clients in it (chunk-N-trace.csv with chunk-N-dataset.json)")
    return found


def servegen_prompts(
    path: Path, vocabulary: OrdinaryTokens, count: int, limits: TraceLimits, seed: int
) -> list[Prompt]:
    """The first `count` requests (0: all) of the limits' part of the day. Raises DatasetError."""
    limits.check()
    streams = [client.rows(limits.begin, limits.end, seed) for client in clients(path)]
    rows = list(islice(heapq.merge(*streams, key=lambda row: row.at), count or None))
    if not rows:
        raise DatasetError(f"{path}: no client sends anything in the part asked for")
    return prompts_of(rows, vocabulary, limits, seed)
