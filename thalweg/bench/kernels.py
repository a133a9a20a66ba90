"""`thalweg bench kernels`: every operation of the catalog in models' sizes, by every backend that runs here, beside
what the device can do.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from thalweg.bench import ceilings, stopwatch
from thalweg.bench.command import exit_status, positive, report_interruption
from thalweg.bench.results import provenance, write
from thalweg.core.errors import UnsupportedConfig
from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase
from thalweg.kernels.catalog import OPERATIONS

RESIDENT = {"cuda": 300e6, "cpu": 128e6}  # bytes that calls in a row read together: several times the last cache
MOST_COPIES = 64
SEED = 1
UNKNOWN_WIDTH = 160  # columns, where no terminal and no COLUMNS say how many there are


@dataclass(frozen=True, slots=True)
class Row:
    """One backend of one case. us: of a call, measured as `how` says; rounds_us: of each round, from which `bench
    compare` knows the noise. floor_us: the longer of bytes / read bandwidth and FLOPs / rate of products. share: floor
    / time. error: of the reference, relative to its largest value; of a small case of the exact result. failed: why
    there is no time, "" where there is one.
    """

    operation: str
    case: str
    backend: str
    us: float = 0.0
    rounds_us: tuple[float, ...] = ()
    how: str = ""
    gbs: float = 0.0
    tflops: float = 0.0
    floor_us: float = 0.0
    share: float = 0.0
    error: float = 0.0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """A case with its backends. small: whether it is one of the correctness cases, of an operation without sizes on
    this device.
    """

    operation: str
    case: TimedCase
    small: bool

    def timed(self, reference: bool) -> list[str]:
        first, *others = self.case.backends
        return [first, *others] if reference or not others else others

    def words(self, backend: str) -> str:
        return f"{self.operation} {self.case.name} {backend}"


def failures() -> tuple[type[Exception], ...]:
    """What a kernel, its compiler or a library may raise: reported, not passed on."""
    known: tuple[type[Exception], ...] = (
        RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError, OSError, LookupError, ArithmeticError,
    )  # fmt: skip
    if importlib.util.find_spec("triton") is None:
        return known
    from triton.errors import TritonError

    return (*known, TritonError)


def told(failure: Exception) -> str:
    """Its kind and its last line, which is what compilers and interpreters put their reason into."""
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[-1][:200]}"


def works(device: torch.device) -> Iterator[Work]:
    """Everything that can be timed here: the sizes of each operation, or its correctness cases where it has none on
    this device.
    """
    for name, operation in OPERATIONS.items():
        sized = [Work(name, case, False) for case in operation.sizes(device)]
        if sized:
            yield from sized
        else:
            drawn = operation.cases(torch.Generator().manual_seed(SEED))
            yield from (Work(name, _small(case, operation.backends, device), True) for case in drawn)


def _small(case: KernelCase, backends: dict[str, Run], device: torch.device) -> TimedCase:
    """A correctness case as one to be timed: held against its exact result."""

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        given = case.fresh_inputs()
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}

    cost = float(case.flops), float(case.bytes)
    plain = all(value.dtype != torch.bfloat16 for value in case.inputs.values() if isinstance(value, Tensor))
    return TimedCase(case.name, draw, backends, lambda given: cost, "float32" if plain else "bf16", case.tolerance)


def matches(text: str, wanted: Sequence[str]) -> bool:
    """Whether all the words of one of `wanted` are in the text: numbers as they are, other words from their beginning.
    Everything does where nothing is wanted.
    """
    words = re.split(r"[\s,]+", text.lower())
    asked = [one.lower().split() for one in wanted]
    return not asked or any(all(any(_is(word, one) for word in words) for one in each) for each in asked)


def _is(word: str, wanted: str) -> bool:
    return word == wanted if wanted.isdigit() else word.startswith(wanted)


def select(works: Iterator[Work], wanted: Sequence[str], reference: bool) -> list[tuple[Work, str]]:
    """(work, backend) that match. reference: whether it is timed where there are others, too."""
    pairs = ((work, backend) for work in works for backend in work.timed(reference))
    return [(work, backend) for work, backend in pairs if matches(work.words(backend), wanted)]


class Bench:
    """Times on one device. seconds: about how long each backend of each case runs."""

    def __init__(self, device: torch.device, top: dict[str, float], seconds: float) -> None:
        self.device, self.top, self.seconds = device, top, seconds
        self._drawn: tuple[Work | None, list[Inputs]] = None, []
        self._expected: tuple[Work | None, Any] = None, ()

    def row(self, work: Work, backend: str) -> Row:
        """A row in any case: one that fails says why."""
        empty = Row(work.operation, work.case.name, backend)
        try:
            with torch.inference_mode():
                return self._measured(work, backend, empty)
        except failures() as failure:
            return replace(empty, failed=told(failure))

    def _measured(self, work: Work, backend: str, empty: Row) -> Row:
        case, inputs = work.case, self._inputs(work)
        run, reference = case.backends[backend], next(iter(case.backends))
        error = 0.0
        if backend != reference:
            error = difference(case.compared(run(**cloned(inputs[0]))), self._reference(work, inputs[0]))
            if not error <= case.tolerance:
                return replace(empty, error=error, failed=f"wrong by {error:.3g}, {case.tolerance:.3g} is allowed")
        # the reference and the small cases ask the device for things: they could not be recorded
        recorded = backend != reference and not work.small
        calls = [partial(run, **given) for given in (cloned(inputs[0]), *inputs[1:])]  # the first stays for the others
        timing = stopwatch.took(calls, self.device, self.seconds, recorded)
        costs = [case.cost(given) for given in inputs]
        flops, moved = (sum(column) / len(costs) for column in zip(*costs, strict=True))
        floor = max(moved / self.top["read"], flops / self.top[case.math])
        return replace(
            empty, us=timing.seconds * 1e6, rounds_us=tuple(round(1e6 * one, 3) for one in timing.rounds), how=timing.how, error=error,
            gbs=moved / timing.seconds / 1e9, tflops=flops / timing.seconds / 1e12, floor_us=floor * 1e6, share=floor / timing.seconds,
        )  # fmt: skip

    def _reference(self, work: Work, given: Inputs) -> Any:
        """What its reference gives, kept for the other backends."""
        if self._expected[0] is not work:
            self._expected = None, ()
            self._expected = work, work.case.compared(next(iter(work.case.backends.values()))(**cloned(given)))
        return self._expected[1]

    def _inputs(self, work: Work) -> list[Inputs]:
        """As many draws as exceed the caches; those of the last case are kept for its other backends."""
        if self._drawn[0] is not work:
            self._drawn = None, []
            generator = torch.Generator(self.device).manual_seed(SEED)
            made = [work.case.draw(generator, None)]
            _, moved = work.case.cost(made[0])
            for _ in range(min(MOST_COPIES, max(2, int(RESIDENT[self.device.type] / moved))) - 1):
                made.append(work.case.draw(generator, made[0]))
            self._drawn = work, made
        return self._drawn[1]


def cloned(inputs: Inputs) -> Inputs:
    return {
        name: value.clone() if isinstance(value, Tensor) and value.numel() < 1 << 26 else value
        for name, value in inputs.items()
    }


def difference(got: Any, expected: Any) -> float:
    """max |difference| / max |expected| over all results; infinite where something is not a number or has another
    shape.
    """
    worst = 0.0
    for mine, other in zip(got, expected, strict=True):
        case = KernelCase("", {}, (other.double(),), 0.0, 0, 0)
        worst = max(worst, *case.errors((mine,)))
    return worst


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="kernels", title_justify="left")
    shown.add_column("operation")
    shown.add_column("case", overflow="fold")
    shown.add_column("backend")
    for head in ("µs", "floor µs", "share", "GB/s", "TFLOP/s"):
        shown.add_column(head, justify="right")
    above = ("", "")
    for row in rows:
        place = (row.operation, row.case)
        shown_place = ("", "") if place == above else place
        above = place
        if row.failed:
            shown.add_row(*shown_place, row.backend, "[red]failed[/red]", "", "", "", "")  # why is said below
            continue
        numbers = f"{row.us:.2f}", f"{row.floor_us:.2f}", f"{row.share:.2f}", f"{row.gbs:.1f}", f"{row.tflops:.3g}"
        shown.add_row(*shown_place, row.backend, *numbers)
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thalweg bench kernels",
        description=(
            "Times every operation's kernels in models' sizes by every backend that runs here, beside the device's own"
            " limits."
        ),
    )
    add = parser.add_argument
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help='only what has these words in it: gemm, "experts v3", triton (default: all)',
    )
    add("--device", choices=("cpu", "cuda"), default=None, help="where (default: a GPU where there is one)")
    add("--threads", type=positive, default=None, metavar="N", help="of torch's CPU pool (default: torch's own)")
    add("--seconds", type=float, default=0.1, metavar="S", help="how long each is run, about (default: 0.1)")
    add(
        "--reference",
        action="store_true",
        help="time the reference on a GPU too, where it is made for being right alone",
    )
    add("--list", action="store_true", help="only say what there is")
    add("--result-filename", default="", metavar="FILE", help="write the result as JSON")
    return parser


def run(argv: list[str]) -> tuple[list[Row], bool]:
    """Measures and prints. What was measured, and whether Ctrl-C ended it early. Raises ResultError, UnsupportedConfig
    for what is not here.
    """
    args = _parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedConfig("--device cuda: torch sees no GPU here; use --device cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = select(works(device), args.names, args.reference or device.type == "cpu")
    if not chosen:
        raise UnsupportedConfig(
            f"nothing here has {' or '.join(map(repr, args.names))} in its name; --list says what there is"
        )
    if args.list:
        print("\n".join(work.words(backend) for work, backend in chosen))
        return [], False
    console, rows, partial = Console(stderr=True), list[Row](), False
    top: dict[str, float] = {}
    try:
        top = ceilings.rates(device)
        bench = Bench(device, top, args.seconds)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("kernels", total=len(chosen))
            for work, backend in chosen:
                bar.update(task, description=work.words(backend)[:60])
                rows.append(bench.row(work, backend))
                bar.advance(task)
    except KeyboardInterrupt:
        partial = True
    _tell(rows, top)
    if args.result_filename:
        settings = {"device": device.type, "threads": torch.get_num_threads(), "seconds": args.seconds}
        ended = {"partial": partial, "ended": "Ctrl-C" if partial else ""}
        measured = {"ceilings": top, "rows": [asdict(row) for row in rows], **ended}
        write(Path(args.result_filename), measured | provenance("bench kernels", argv, settings))
    return rows, partial


def _tell(rows: Sequence[Row], top: dict[str, float]) -> None:
    width = shutil.get_terminal_size((UNKNOWN_WIDTH, 0)).columns
    Console(width=width).print(table(rows))
    if top:
        rates = ", ".join(f"{name} {top[name] / 1e12:.3g} TFLOP/s" for name in top if name != "read")
        print(f"ceilings measured in this run: read {top['read'] / 1e9:.1f} GB/s, {rates}")
    failed = [row for row in rows if row.failed]
    for row in failed:
        print(f"FAILED {row.operation}, {row.case}, {row.backend}: {row.failed}", file=sys.stderr)


def _status(words: list[str]) -> int:
    rows, partial = run(words)
    if partial:
        return report_interruption()
    return int(any(row.failed for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    """0: all done, 1: something failed or could not be written, 2: it was asked for wrongly, 130: Ctrl-C, what was
    measured is told and written.
    """
    return exit_status("thalweg bench kernels", _status, argv)
