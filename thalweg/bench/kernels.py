"""`thalweg bench kernels`: every operation of the catalog in models' sizes, by every backend that runs here, beside
the limits of the device.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from thalweg.bench import ceilings, stopwatch
from thalweg.bench.command import OUTPUT, CommandParser, PartialRun, add_flags, command
from thalweg.bench.display import progress_bar, show
from thalweg.bench.results import save
from thalweg.core.errors import UnsupportedConfig
from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase
from thalweg.kernels.catalog import OPERATIONS
from thalweg.launch.report import make_table

RESIDENT = {"cuda": 300e6, "cpu": 128e6}  # bytes that calls in a row read together: several times the last cache
MOST_COPIES = 64
SEED = 1
FLAGS = f"""
--device     device      where; default: a GPU where there is one
--threads    count       of torch's CPU pool; default: torch's own
--seconds    number=0.1  of each backend of each case, about
--reference  switch      time the reference on a GPU too, where it is made for correctness only
--list       switch      only list the cases
{OUTPUT}
"""
COLUMNS = {
    "operation": "{operation}", "case": "{case}", "backend": "{backend}",
    "µs": lambda row: "failed" if row["failed"] else f"{row['us']:.2f}", "limit µs": "{floor_us:.2f}",
    "share": "{share:.2f}", "GB/s": "{gbs:.1f}", "TFLOP/s": "{tflops:.3g}",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One backend of one case."""

    operation: str
    case: str
    backend: str
    us: float = 0.0  # of a call
    how: str = ""  # it was timed: see `stopwatch.CallTime`
    gbs: float = 0.0
    tflops: float = 0.0
    floor_us: float = 0.0  # the hardware's limit: the longer of bytes / read bandwidth and FLOPs / rate of products
    share: float = 0.0  # of it that is reached: floor_us / us
    error: float = 0.0  # of the reference, relative to its largest value; of a small case of the exact result
    failed: str = ""  # why there is no time


class KernelWork(NamedTuple):
    """A case with its backends."""

    operation: str
    case: TimedCase
    small: bool  # one of the correctness cases, of an operation without sizes on this device

    def timed(self, reference: bool) -> list[str]:
        first, *others = self.case.backends
        return [first, *others] if reference or not others else others

    def label(self, backend: str) -> str:
        return f"{self.operation} {self.case.name} {backend}"


def last_line(error: Exception) -> str:
    """The error's kind and its last line, where compilers and interpreters put the reason."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}"


def works(device: torch.device) -> Iterator[KernelWork]:
    """Everything that can be timed here: the sizes of each operation, or its correctness cases without sizes."""
    for name, operation in OPERATIONS.items():
        sized = [KernelWork(name, case, False) for case in operation.sizes(device)]
        generator = torch.Generator().manual_seed(SEED)
        small = () if sized else operation.cases(generator)
        yield from (*sized, *(KernelWork(name, _small(case, operation.backends, device), True) for case in small))


def _small(case: KernelCase, backends: dict[str, Run], device: torch.device) -> TimedCase:
    """A correctness case to be timed, compared with its exact result."""

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        inputs = case.fresh_inputs()
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    cost = float(case.flops), float(case.bytes)
    plain = all(value.dtype != torch.bfloat16 for value in case.inputs.values() if isinstance(value, Tensor))
    return TimedCase(case.name, draw, backends, lambda given: cost, "float32" if plain else "bf16", case.tolerance)


def matches(text: str, wanted: Sequence[str]) -> bool:
    """Whether the text has all the words of one of `wanted`: equal numbers, other words from their beginning. True
    where nothing is wanted.
    """
    words = re.split(r"[\s,]+", text.lower())

    def has(word: str) -> bool:
        return word in words if word.isdigit() else any(each.startswith(word) for each in words)

    return not wanted or any(all(map(has, phrase.lower().split())) for phrase in wanted)


class KernelBenchmark:
    """Times on one device. seconds: about how long each backend of each case runs."""

    def __init__(self, device: torch.device, top: dict[str, float], seconds: float) -> None:
        self.device, self.top, self.seconds = device, top, seconds

    @torch.inference_mode()
    def rows(self, work: KernelWork, backends: Sequence[str]) -> Iterator[KernelRow]:
        """A row of each backend in any case: one that fails says why."""
        first, inputs, expected = next(iter(work.case.backends)), list[Inputs](), None
        for backend in backends:
            row = KernelRow(work.operation, work.case.name, backend)
            try:
                inputs = inputs or self.inputs(work)
                if backend != first:
                    if expected is None:
                        expected = work.case.compared(work.case.backends[first](**cloned(inputs[0])))
                    error = difference(work.case.compared(work.case.backends[backend](**cloned(inputs[0]))), expected)
                    row = replace(row, error=error)
                if row.error <= work.case.tolerance:
                    # the reference and the small cases synchronize with the device: they cannot be captured
                    row = self._timed(work, row, inputs, capture=backend != first and not work.small)
                else:
                    row = replace(row, failed=f"wrong by {row.error:.3g}, {work.case.tolerance:.3g} is allowed")
            except Exception as failure:  # noqa: BLE001 - any of a kernel, its compiler, a library
                row = replace(row, failed=last_line(failure))
            yield row

    def _timed(self, work: KernelWork, row: KernelRow, inputs: Sequence[Inputs], capture: bool) -> KernelRow:
        case, run = work.case, work.case.backends[row.backend]
        calls = [partial(run, **given) for given in (cloned(inputs[0]), *inputs[1:])]  # other backends use the first
        seconds, how = stopwatch.time_calls(calls, self.device, self.seconds, capture)
        costs = [case.cost(given) for given in inputs]
        flops, moved = (sum(column) / len(costs) for column in zip(*costs, strict=True))
        limit = max(moved / self.top["read"], flops / self.top[case.math])
        rates = {"gbs": moved / seconds / 1e9, "tflops": flops / seconds / 1e12, "share": limit / seconds}
        return replace(row, us=seconds * 1e6, how=how, floor_us=limit * 1e6, **rates)

    def inputs(self, work: KernelWork) -> list[Inputs]:
        """As many draws as exceed the caches."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        first = work.case.draw(generator, None)
        copies = min(MOST_COPIES, max(2, int(RESIDENT[self.device.type] / work.case.cost(first)[1])))
        return [first, *(work.case.draw(generator, first) for _ in range(copies - 1))]


def cloned(inputs: Inputs) -> Inputs:
    return {
        name: value.clone() if isinstance(value, Tensor) and value.numel() < 1 << 26 else value
        for name, value in inputs.items()
    }


def difference(got: Any, expected: Any) -> float:
    """max |difference| / max |expected| over all results; infinite where a value is not finite or a shape differs."""
    errors = [0.0]
    for mine, other in zip(got, expected, strict=True):
        errors += KernelCase("", {}, (other.double(),), 0.0, 0, 0).errors((mine,))
    return max(errors)


def table(rows: Sequence[KernelRow]) -> Table:
    return make_table("kernels", COLUMNS, [asdict(row) for row in rows], left=3)


@command("thalweg bench kernels")
def main(argv: list[str]) -> int:
    """0: done; 1: a kernel failed, or an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    text = (
        "Times every operation's kernels in models' sizes by every backend that runs here, beside the device's limits."
    )
    parser = CommandParser(prog="thalweg bench kernels", description=text)
    text = 'only cases with these words: gemm, "experts v3", triton; default: all'
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    add_flags(parser, "", FLAGS, device=("cpu", "cuda"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedConfig("--device cuda: torch finds no GPU here; use --device cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.threads:
        torch.set_num_threads(args.threads)
    reference = args.reference or device.type == "cpu"
    named = [
        (work, [backend for backend in work.timed(reference) if matches(work.label(backend), args.names)])
        for work in works(device)
    ]
    chosen = [(work, backends) for work, backends in named if backends]
    if not chosen:
        raise UnsupportedConfig(f"no case has {' or '.join(map(repr, args.names))} in its name; --list shows all")
    if args.list:
        print("\n".join(work.label(backend) for work, backends in chosen for backend in backends))
        return 0
    rows, top = list[KernelRow](), dict[str, float]()
    with PartialRun() as run, progress_bar("kernels", sum(len(backends) for _, backends in chosen)) as bar:
        top = ceilings.rates(device)
        bench = KernelBenchmark(device, top, args.seconds)
        for work, backends in chosen:
            bar.label(f"{work.operation} {work.case.name}")
            for row in bench.rows(work, backends):
                rows.append(row)
                bar.advance()
    show(table(rows), 160)
    if top:
        rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in top.items() if name != "read")
        print(f"ceilings measured in this run: read {top['read'] / 1e9:.1f} GB/s, {rates}")
    failed = [row for row in rows if row.failed]
    for row in failed:
        print(f"FAILED {row.operation}, {row.case}, {row.backend}: {row.failed}", file=sys.stderr)
    settings = {"device": device.type, "threads": torch.get_num_threads(), "seconds": args.seconds}
    measured = {"ceilings": top, "rows": [asdict(row) for row in rows], **run.as_json()}
    save(args.output_file, "bench kernels", argv, settings, measured)
    return run.finish(int(bool(failed)))
