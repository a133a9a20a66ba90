"""The loads under which `peers.py` measures engines: cells, and named sets of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from thalweg.bench.errors import BenchError

RUNNING = 256  # requests that a server runs at a time
LOCKSTEP, STAGGERED = "lockstep", "staggered"
GOODPUT = ("ttft:2000", "tpot:50")  # ms
LONG_FIELDS = ("samples", "tokens_by_second", "by_turn")  # of the results of bench serve, which files leave out


@dataclass(frozen=True)
class Cell:
    """One load. Staggered: lengths are uniform within +- 50 % of these, and the first requests are spread in time."""

    input_len: int  # tokens; of a trace the most
    output_len: int
    concurrency: int = 0  # of a closed loop; 0: no limit
    arrivals: str = LOCKSTEP
    rate: float = 0.0  # requests a second of an open loop
    trace: str = ""  # file whose requests are sent
    share: float = 0.0  # the rate as a share of the capacity: requests a second of this trace at most
    requests: int = 0  # 0: three for each at a time
    warm: int = -1  # requests before the clock starts; -1: one for each at a time

    @property
    def longest(self) -> tuple[int, int]:
        sizes = self.input_len, self.output_len
        return (sizes[0] * 3 // 2, sizes[1] * 3 // 2) if self.arrivals == STAGGERED else sizes

    @property
    def name(self) -> tuple[str, str]:
        """The section of the table, and the load in it."""
        load = f"{self.share:g} of capacity" if self.share else f"{self.concurrency} at a time"
        load += f", {self.requests} requests" if self.requests else ""
        if self.rate:
            load = f"{self.rate:g} requests/s for {self.requests / self.rate:g} s"
        if self.trace:
            return f"{Path(self.trace).name}, at most {self.input_len:,} in and {self.output_len:,} out", load
        return f"{self.input_len:,} in, {self.output_len:,} out, {'Poisson' if self.rate else self.arrivals}", load

    def flags(self, capacity: float) -> list[str]:
        """Of `thalweg bench serve`."""
        warm = self.concurrency if self.warm < 0 else self.warm
        words = ["--num-prompts", str(self.requests or 3 * self.concurrency), "--warmup-requests", str(warm)]
        words += ["--max-concurrency", str(self.concurrency)]
        if rate := self.rate or self.share * capacity:
            words += ["--request-rate", f"{rate:g}", "--goodput", *GOODPUT]
        inputs, outputs = map(str, self.longest)
        if self.trace:
            limits = ["--trace-max-input-len", inputs, "--trace-max-output-len", outputs]
            return [*words, "--dataset-name", "trace", "--dataset-path", self.trace, *limits]
        words += ["--random-input-len", inputs, "--random-output-len", outputs, "--random-range-ratio"]
        return [*words, str(1 / 3), "--stagger"] if self.arrivals == STAGGERED else [*words, "1"]


def cell_sets(traces: Sequence[str]) -> dict[str, list[Cell]]:
    """Cells by the name of their set."""

    def closed(arrivals: str, *shapes: tuple[int, int]) -> list[Cell]:
        return [Cell(*shape, count, arrivals) for shape in shapes for count in (1, 8, 32, 128, 256)]

    short, long = ((1024, 256), (256, 1024)), (8192, 1024)
    traced = [Cell(8192, 2048, RUNNING, trace=trace, requests=300, warm=8) for trace in traces]
    shares = (0.5, 0.8, 1.0, 1.2)
    return {
        "table": closed(LOCKSTEP, *short),
        "staggered": closed(STAGGERED, *short),
        "long": closed(LOCKSTEP, long) + closed(STAGGERED, long),
        "grid": [Cell(2**power, size, 32) for power, size in product(range(7, 14), (128, 512))],
        "qps": [Cell(1024, 256, rate=rate, requests=20 * rate, warm=8) for rate in (1, 2, 5, 10, 20, 30, 40, 50)],
        "traces": [*traced, *(replace(cell, concurrency=0, share=share) for cell in traced for share in shares)],
        "outputs32k": [Cell(128, 32000, 32, requests=32, warm=0)],
    }


def shorter(cell: Cell, number: int) -> Cell:
    """With so many requests, or so many seconds of a rate, after one warm-up request."""
    return replace(cell, requests=max(1, round(number * cell.rate)) if cell.rate else number, warm=1)


def cells_of(words: Sequence[str], traces: Sequence[str]) -> list[Cell]:
    """words: names of sets, or cells such as 32:1024/256 and 32:1024/256:staggered; a number after either makes them
    `shorter`. Raises BenchError.
    """
    sets, cells = cell_sets(traces), list[Cell]()
    single = rf"(\d+):(\d+)/(\d+)(?::({LOCKSTEP}|{STAGGERED}))?"
    for word in words:
        found = re.fullmatch(rf"({single}|{'|'.join(sets)})(?::([1-9]\d*))?", word)
        name, concurrency, inputs, outputs, arrivals, number = found.groups() if found else ("",) * 6
        if concurrency:
            some = [Cell(int(inputs), int(outputs), int(concurrency), arrivals or LOCKSTEP)]
        elif name:
            some = sets[name]
        else:
            raise BenchError(f"--cells {word}: there is {', '.join(sets)}, and cells such as 32:1024/256:staggered")
        cells += [shorter(cell, int(number)) for cell in some] if number else some
    return list(dict.fromkeys(cells))
