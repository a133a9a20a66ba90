"""`thalweg tune`: tries tiles and other choices for a model's shapes on this device, and writes those that are faster
than the kernels' own tables.

Every candidate is compared with the reference first; one that is wrong, does not compile or needs too much memory is
dropped. All are timed shortly, the best few again and longer, and the table's own choice stays unless another is faster
by more than the timing's error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from thalweg.bench import stopwatch
from thalweg.bench.command import OUTPUT, PartialRun, command, parse_engine_flags, report_interruption
from thalweg.bench.display import progress_bar, show
from thalweg.bench.errors import ResultError
from thalweg.bench.kernels import RESIDENT, SEED, difference, last_line, matches
from thalweg.bench.results import commit, date, replace_file, save
from thalweg.config.engine import EngineConfig
from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine import caches
from thalweg.engine.build import layer_factory
from thalweg.kernels.case import Inputs
from thalweg.kernels.gemm import tuning_cpu
from thalweg.kernels.search import TuningSearch
from thalweg.kernels.tuned import TUNED, digest, flat
from thalweg.launch import tuned
from thalweg.launch.report import make_table
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.models.interface import Model

SHORT, LONG = 0.01, 0.03  # seconds of a candidate's first timing, and of each of the later ones
ROUNDS = 3  # of the later ones, alternating, so that other work on the device slows all of them
FINAL = 4  # candidates that are timed again
GAIN = 0.02  # share of the time by which a candidate must be faster
EPILOG = """\
examples:
  thalweg tune models/tiny
  thalweg tune org/name --load-format dummy --seconds 600
  thalweg tune org/name --only experts "gemv 2048"

thalweg tune index-cache is another search, for layers that can share a selection of context; it has a --help too.

Results are in ~/.cache/thalweg/tuned (or --cache-dir) and are used by every start on this device with these versions of
torch and Triton; `thalweg plan` shows them. Run it alone: other work on the device disturbs the timing. Ctrl-C keeps
what was found, and the next run continues from there."""
FLAGS = f"""
--only        words...  only cases with these words: experts, "gemv 2048"
--seconds     number    stop after about so long; default: when all is done
--candidates  count=96  most that are tried of each case
--again       switch    search again what has been searched
--list        switch    only list the cases, and which are done
{OUTPUT}
"""


class TuningOutcome(NamedTuple):
    """The result of one search."""

    search: TuningSearch
    found: tuned.TunedCase
    wrong: int  # candidates that were dropped
    reason: str  # of the first of those


def _name(search: TuningSearch) -> str:
    return f"{search.operation} {search.label}"


def searches(resolved: Resolved) -> list[TuningSearch]:
    """Everything that can be tuned for this model on this device, the longest parts of a step first."""
    settings, facts = resolved.engine, read_facts(resolved.path, resolved.engine.index_topk_pattern)
    if settings.device == "cpu":
        return list(_on_cpu(settings, facts))
    if settings.kernels.decode == "reference":
        return []
    model = catalog.assemble(facts, layer_factory(facts, "meta", settings.kernels, settings.dtype))
    return list(_on_gpu(model, settings.kernels.fp8_gemm))


def _on_cpu(settings: EngineConfig, facts: ModelFacts) -> Iterator[TuningSearch]:
    """The choices that an empty model looks up while it is built; its memory is never touched."""
    with TUNED.recorded() as asked:
        catalog.assemble(facts, layer_factory(facts, "cpu", settings.kernels, settings.dtype))
    for operation, key, default in dict.fromkeys(asked):
        if operation == "read_ahead" and (search := tuning_cpu.search(key, default)) is not None:
            yield search


def _on_gpu(model: Model, fp8_gemm: str) -> Iterator[TuningSearch]:
    """Experts first, then the largest products; each shape once. fp8_gemm: the backend of products with FP8 weights."""
    from thalweg.kernels.experts import tuning as experts  # these need Triton
    from thalweg.kernels.gemm import tuning as gemm
    from thalweg.layers.kernel_linear import KernelEmbedding, KernelLinear, QuantizedLinear
    from thalweg.layers.kernel_moe import KernelMoe

    assert isinstance(model, nn.Module)
    stacks, weights = dict[tuple[int, int, int, int, int, bool], None](), set[tuple[int, int, int]]()
    for part in model.modules():
        if isinstance(part, KernelMoe):
            rule, stack = part.router.rule, part.experts
            count, hidden, inner = stack.w2.shape
            stacks[count, hidden, inner, rule.topk + rule.shared, rule.shared, stack.reads_codes] = None
        elif isinstance(part, KernelLinear | QuantizedLinear | KernelEmbedding):
            weight = part.weight
            assert isinstance(weight, torch.Tensor)
            if weight.dtype in (torch.bfloat16, torch.float8_e4m3fn):
                weights.add((*weight.shape, weight.itemsize))
    for key in stacks:
        yield from experts.searches(*key)
    for n, k, itemsize in sorted(weights, key=lambda shape: -shape[0] * shape[1] * shape[2]):
        yield from gemm.searches(n, k, itemsize)
        if itemsize == 1 and fp8_gemm == "triton+deep_gemm":
            yield gemm.threshold(n, k)


class TuningRun(NamedTuple):
    outcomes: list[TuningOutcome]
    failed: list[str]  # searches that failed, and why
    ended: str  # what ended it early; "" for nothing


class Tuner:
    """Runs searches on one device."""

    def __init__(self, device: torch.device, most: int, weights: int) -> None:
        self.device, self.most = device, most  # most: candidates of each search
        # bytes that calls in a row read together: a weight is as cold as in a step of the model
        self.resident = min(RESIDENT[device.type], weights)

    @torch.inference_mode()
    def run(self, search: TuningSearch) -> TuningOutcome:
        """Raises RuntimeError where the table's own choice fails: then nothing can be compared with it."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        inputs = [search.draw(generator, None)]
        copies = max(2, int(self.resident / search.bytes))
        inputs += [search.draw(generator, inputs[0]) for _ in range(copies - 1)]
        expected, reasons = search.reference(inputs[0]), list[str]()

        def is_right(one: Any) -> bool:
            return _agrees(search, one, reasons, lambda: [(search.run(one, inputs[0]), expected)])

        def is_right_in_uses(one: Any) -> bool:
            return _agrees(search, one, reasons, lambda: [((f(),), (g(),)) for f, g in search.uses(one, inputs[0])])

        def timed(candidates: Sequence[Any]) -> dict[Any, float]:
            """Seconds of the candidates that agree with the reference."""
            if self.device.type == "cuda" and not search.alike:
                _compile(search, candidates, inputs[0])
            return {one: self._time(search, one, inputs, SHORT) for one in candidates if is_right(one)}

        times = timed(list(dict.fromkeys((search.default, *search.candidates)))[: self.most])
        if search.default not in times:
            raise RuntimeError(f"{search.label}: the table's own choice {search.default} fails: {reasons[0]}")
        times |= timed([one for one in search.further(_ordered(times)) if one not in times])
        best = islice(filter(is_right_in_uses, _ordered(times)), FINAL)
        finalists = list(dict.fromkeys((search.default, *best)))
        rounds = [[self._time(search, one, inputs, LONG) for one in finalists] for _ in range(ROUNDS)]
        final = dict(zip(finalists, map(min, zip(*rounds, strict=True)), strict=True))
        fastest, default_s = _ordered(final)[0], final[search.default]
        choice = fastest if final[fastest] <= default_s * (1 - GAIN) else search.default
        us = final[choice] * 1e6, default_s * 1e6
        found = tuned.TunedCase(search.label, flat(search.default), flat(choice), *us, len(times))
        return TuningOutcome(search, found, len(reasons), (reasons or [""])[0])

    def _time(self, search: TuningSearch, candidate: Any, inputs: Sequence[Inputs], seconds: float) -> float:
        calls = [partial(search.run, candidate, given) for given in inputs]
        return stopwatch.time_calls(calls, self.device, seconds).seconds


def _compile(search: TuningSearch, candidates: Sequence[Any], given: Inputs) -> None:
    """All at once: a compiler takes seconds, and other cores are idle. Errors appear again when they are run."""

    @torch.inference_mode()
    def compile(candidate: Any) -> None:
        search.run(candidate, given)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(compile, candidate) for candidate in candidates]:
            done.exception()
    torch.cuda.synchronize()


def _ordered(times: dict[Any, float]) -> list[Any]:
    return sorted(times, key=lambda candidate: times[candidate])


def _agrees(search: TuningSearch, candidate: Any, reasons: list[str], pairs: Callable[[], Sequence[Any]]) -> bool:
    """Whether the results of a candidate are near the expected ones; else the reason is added. pairs: makes (results,
    expected results).
    """
    try:
        error = max((difference(*pair) for pair in pairs()), default=0.0)
    except Exception as failure:  # noqa: BLE001 - any of a kernel, its compiler, a library
        reasons.append(f"{candidate}: {last_line(failure)}")
        return False
    if not error <= search.tolerance:
        reasons.append(f"{candidate}: wrong by {error:.3g}")
    return error <= search.tolerance


class TunedFiles:
    """The files of this device."""

    def __init__(self, folder: Path, device: str, versions: dict[str, str], source: dict[str, object]) -> None:
        self.folder, self.device, self.versions, self.source = folder, device, versions, source

    def has(self, search: TuningSearch) -> bool:
        """Whether this case has been searched with this code."""
        default = flat(search.default)
        return any(one.case == search.label and one.default == default for one in self._choices(search))

    def put(self, outcome: TuningOutcome) -> Path:
        """Adds it to the file of its operation and shape. Raises ResultError."""
        search = outcome.search
        kept = tuple(one for one in self._choices(search) if one.default != flat(search.default))
        found = (*kept, outcome.found)
        source = self.device, self.versions, digest(search.operation)
        file = tuned.TunedFile(search.operation, search.key, *source, found, self.source).sealed()
        path = self.folder / tuned.file_name(search.operation, search.key)
        try:
            replace_file(path, msgspec.json.format(msgspec.json.encode(file), indent=1))
        except OSError as error:
            raise ResultError(f"cannot write {path} ({error.strerror}); give another --cache-dir") from error
        return path

    def _choices(self, search: TuningSearch) -> Sequence[tuned.TunedCase]:
        try:
            file = tuned.load(self.folder / tuned.file_name(search.operation, search.key))
        except (OSError, msgspec.MsgspecError):
            return ()
        return () if tuned.unfit(file, self.device, self.versions) else file.found


def _row(one: TuningOutcome) -> dict[str, str]:
    case, default, choice = one.found, *("x".join(map(str, each)) for each in (one.found.default, one.found.choice))
    return {
        "operation": one.search.operation,
        "case": case.case,
        "table": default,
        "chosen": "the same" if choice == default else choice,
        "table µs": f"{case.default_us:.2f}",
        "chosen µs": f"{case.us:.2f}",
        "faster": "–" if choice == default else f"{1 - case.us / case.default_us:.1%}",
        "tried": f"{case.candidates}{f' ({one.wrong} dropped)' if one.wrong else ''}",
    }


def parse(argv: Sequence[str]) -> tuple[Any, Options]:
    text = "Searches faster tiles and other choices for a model's shapes on this device. Reads no weights."
    return parse_engine_flags(argv, "thalweg tune", text, {"This command": FLAGS}, ("model", "load"), EPILOG, words=str)


def run(argv: list[str]) -> TuningRun:
    """Searches, writes, prints. Raises ThalwegError."""
    args, options = parse(argv)
    resolved = resolve(options, weights=False)
    settings, machine = resolved.engine, Machine.here()
    torch.set_num_threads(settings.threads)
    caches.use(settings.cache_dir)
    folder = tuned.folder_of(machine, settings.device, settings.cache_dir)
    name, source = tuned.device_name(machine, settings.device), dict[str, object](date=date(), commit=commit())
    files = TunedFiles(folder, name, tuned.versions(settings.device), source)
    every = searches(resolved)
    wanted = [search for search in every if matches(_name(search), args.only)]
    if every and not wanted:
        words = " or ".join(map(repr, args.only))
        raise UnsupportedConfig(f"--only: no case has {words} in its name; --list without it shows all")
    todo = [search for search in wanted if args.again or not files.has(search)]
    print(f"{len(wanted)} cases, {len(wanted) - len(todo)} of them searched before; results go to {folder}")
    if args.list:
        for search in wanted:
            print(f"  {'todo' if search in todo else 'done'}  {_name(search)}: {len(search.candidates)} candidates")
        return TuningRun([], [], "")
    if wanted and not todo:
        print("nothing is left to search; --again repeats it")
    tuner = Tuner(torch.device(settings.device), args.candidates, resolved.sizes.weight_bytes)
    made = _search_all(tuner, todo, files, args.seconds)
    if made.outcomes:
        rows = list(map(_row, made.outcomes))
        show(make_table("tuned", {head: f"{{{head}}}" for head in rows[0]}, rows, left=4))
    cases = [
        {"operation": one.search.operation, "key": one.search.key, **msgspec.to_builtins(one.found)}
        for one in made.outcomes
    ]
    result = {"rows": cases, "partial": bool(made.ended), "ended": made.ended, "failed": made.failed}
    save(args.output_file, "tune", argv, {"threads": settings.threads, "device": settings.device}, result)
    return made


def _search_all(tuner: Tuner, todo: Sequence[TuningSearch], files: TunedFiles, seconds: float | None) -> TuningRun:
    """As many as there is time for, each written when it is done."""
    outcomes, failed, begin = list[TuningOutcome](), list[str](), time.monotonic()
    with PartialRun() as ended, progress_bar("tune", len(todo)) as bar:
        for number, search in enumerate(todo):
            passed = time.monotonic() - begin
            if seconds is not None and passed > seconds:
                left = len(todo) - number
                print(f"{left} of {len(todo)} are left after {passed:.0f} s; run it again to continue", file=sys.stderr)
                return TuningRun(outcomes, failed, "--seconds")
            bar.label(_name(search))
            try:
                outcomes.append(tuner.run(search))
            except Exception as error:  # noqa: BLE001 - any of a kernel, its compiler, a library
                failed.append(f"{_name(search)}: {last_line(error)}")
                print(f"FAILED {failed[-1]}", file=sys.stderr)
            else:
                files.put(outcomes[-1])
            bar.advance()
            print(f"{number + 1}/{len(todo)} {_name(search)}", file=sys.stderr)
    if isinstance(ended.error, Exception):
        raise ended.error
    return TuningRun(outcomes, failed, ended.ended)


@command("thalweg tune")
def main(argv: list[str]) -> int:
    """0: done, or as much as --seconds allows; 1: a search failed, or an error; 2: wrong flags; 130: Ctrl-C. What was
    found is kept.
    """
    if argv[:1] == ["index-cache"]:
        from thalweg.bench import index_cache

        return index_cache.main(argv[1:])
    made = run(argv)
    if made.ended == "Ctrl-C":
        return report_interruption("what was found is kept, run it again to continue")
    return int(bool(made.failed))
