"""`thalweg tune`: tries tiles and choices for a model's shapes on this device, and writes down those that are faster
than the kernels' own tables.

Every candidate is held against the reference first; one that is wrong, does not compile or needs more memory than there
is drops out. All are timed shortly, the best few again and longer, and the table's own choice stays unless another is
faster by more than timing errs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from thalweg.bench import stopwatch
from thalweg.bench.command import exit_status, positive, report_interruption
from thalweg.bench.errors import ResultError
from thalweg.bench.kernels import RESIDENT, SEED, difference, failures, matches, told
from thalweg.bench.results import provenance, write
from thalweg.config.args import OptionsParser, ParsedOptions, options_parser, parse_options
from thalweg.config.engine import EngineConfig
from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine import caches
from thalweg.engine.build import layer_factory
from thalweg.kernels.case import Inputs
from thalweg.kernels.gemm import tuning_cpu
from thalweg.kernels.search import TuningSearch
from thalweg.kernels.tuned import TUNED, digest, flat
from thalweg.launch import tuned
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.models import catalog
from thalweg.models.catalog import read_facts

SHORT, LONG = 0.01, 0.03  # seconds of a candidate's first timing, and of each of the later ones
ROUNDS = 3  # of the later ones, all candidates by turns: whatever else the device does meets them alike
FINAL = 4  # candidates that are timed again
UNKNOWN_WIDTH = 140  # columns of the table, where no terminal and no COLUMNS say how many there are
GAIN = 0.02  # share of the time by which a candidate must be faster


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one search. us, default_us: of the chosen candidate and of the table's. tried: candidates that were timed.
    wrong: those that dropped out, the first for this reason.
    """

    search: TuningSearch
    choice: Any
    us: float
    default_us: float
    tried: int
    wrong: int
    reason: str

    @property
    def found(self) -> tuned.TunedCase:
        default, choice = flat(self.search.default), flat(self.choice)
        return tuned.TunedCase(self.search.label, default, choice, self.us, self.default_us, self.tried)


@dataclass(slots=True)
class Found:
    """Of a run. failed: searches that could not be made, and why. ended: what ended it early, "" if nothing did."""

    outcomes: list[Outcome] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ended: str = ""


def searches(resolved: Resolved) -> list[TuningSearch]:
    """Everything that can be tuned for this model on this device, what takes most time in a step first."""
    settings = resolved.engine
    facts = read_facts(resolved.path)
    if settings.device == "cpu":
        return list(_on_cpu(settings, facts))
    if settings.kernels.decode == "reference":
        return []
    from thalweg.bench.tune_gpu import of_model  # needs Triton

    model = catalog.assemble(facts, layer_factory(facts, "meta", settings.kernels, settings.dtype))
    return list(of_model(model, settings.kernels.fp8_gemm))


def _on_cpu(settings: EngineConfig, facts: ModelFacts) -> Iterator[TuningSearch]:
    """What an empty model asks for while it is made: its memory is never touched, so it takes none."""
    with TUNED.recorded() as asked:
        catalog.assemble(facts, layer_factory(facts, "cpu", settings.kernels, settings.dtype))
    for operation, key, default in dict.fromkeys(asked):
        if operation == "read_ahead" and (found := tuning_cpu.search(key, default)) is not None:
            yield found


class Tuner:
    """Runs searches on one device. most: candidates of each. resident: bytes that calls in a row read together: as many
    as a step of the model reads, so that a weight is as cold as it is there, or a few times the last cache where that
    is less.
    """

    def __init__(self, device: torch.device, most: int, weights: int) -> None:
        self.device, self.most = device, most
        self.resident = min(RESIDENT[device.type], weights)

    def run(self, search: TuningSearch) -> Outcome:
        """Raises RuntimeError where the table's own choice fails: then nothing can be compared with it."""
        with torch.inference_mode():
            generator = torch.Generator(self.device).manual_seed(SEED)
            inputs = [search.draw(generator, None)]
            copies = max(2, int(self.resident / search.bytes))
            inputs += [search.draw(generator, inputs[0]) for _ in range(copies - 1)]
            tried = list(dict.fromkeys((search.default, *search.candidates)))[: self.most]
            sound, reasons = self._sound(search, tried, inputs[0])
            if search.default not in sound:
                raise RuntimeError(f"{search.label}: the table's own choice {search.default} fails: {reasons[0]}")
            took = {one: self._time(search, one, inputs, SHORT) for one in sound}
            further = search.further(sorted(sound, key=lambda one: took[one]))
            sound, more = self._sound(search, further, inputs[0], sound)
            took |= {one: self._time(search, one, inputs, SHORT) for one in sound if one not in took}
            reasons += more
            best = self._best(search, sorted(sound, key=lambda one: took[one]), inputs[0], reasons)
            choice, took = self._final(search, best, inputs)
        us = took[choice] * 1e6, took[search.default] * 1e6
        return Outcome(search, choice, *us, len(sound), len(reasons), (reasons or [""])[0])

    def _final(
        self, search: TuningSearch, best: Sequence[Any], inputs: Sequence[Inputs]
    ) -> tuple[Any, dict[Any, float]]:
        """The choice among these and the table's own, and the seconds of each."""
        finalists = list(dict.fromkeys((search.default, *best)))
        rounds = [[self._time(search, one, inputs, LONG) for one in finalists] for _ in range(ROUNDS)]
        took = dict(zip(finalists, map(min, zip(*rounds, strict=True)), strict=True))
        choice = min(finalists, key=lambda one: took[one])
        return choice if took[choice] <= took[search.default] * (1 - GAIN) else search.default, took

    def _sound(
        self, search: TuningSearch, tried: Sequence[Any], given: Inputs, sound: Sequence[Any] = ()
    ) -> tuple[list[Any], list[str]]:
        """Those that compute what the reference does, behind the ones known to, and why others do not."""
        known = failures()
        if self.device.type == "cuda" and not search.alike:
            self._compile(search, tried, given)
        expected = search.reference(given) if tried else ()
        found, reasons = list(sound), []
        for one in tried:
            try:
                error = difference(search.run(one, given), expected)
            except known as failure:
                reasons.append(f"{one}: {told(failure)}")
                continue
            if error <= search.tolerance:
                found.append(one)
            else:
                reasons.append(f"{one}: wrong by {error:.3g}")
        return found, reasons

    def _best(self, search: TuningSearch, ordered: Sequence[Any], given: Inputs, reasons: list[str]) -> list[Any]:
        """The first few of them that are right in all their uses; why others are not is added to the reasons."""
        best: list[Any] = []
        for one in ordered:
            try:
                pairs = [(result(), expected()) for result, expected in search.uses(one, given)]
                error = max([difference((got,), (wanted,)) for got, wanted in pairs], default=0.0)
            except failures() as failure:
                reasons.append(f"{one}: {told(failure)}")
                continue
            if error <= search.tolerance:
                best.append(one)
            else:
                reasons.append(f"{one}: wrong by {error:.3g} in another use")
            if len(best) == FINAL:
                break
        return best

    def _compile(self, search: TuningSearch, tried: Sequence[Any], given: Inputs) -> None:
        """All at once: a compiler takes seconds, and the others' cores stand idle. What fails here fails again where it
        counts.
        """

        @torch.inference_mode()
        def one(candidate: Any) -> None:
            search.run(candidate, given)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for done in [pool.submit(one, candidate) for candidate in tried]:
                done.exception()
        torch.cuda.synchronize()

    def _time(self, search: TuningSearch, candidate: Any, inputs: Sequence[Inputs], seconds: float) -> float:
        calls = [lambda given=given: search.run(candidate, given) for given in inputs]
        return stopwatch.took(calls, self.device, seconds).seconds


class Shelf:
    """The files of this device: what is done, and what is added."""

    def __init__(self, folder: Path, device: str, versions: dict[str, str], made: dict[str, object]) -> None:
        self.folder, self.device, self.versions, self.made = folder, device, versions, made

    def done(self, search: TuningSearch) -> bool:
        """Whether this very case has been searched, with this code."""
        file = self._file(search)
        return file is not None and any(
            one.case == search.label and one.default == flat(search.default) for one in file.found
        )

    def put(self, outcome: Outcome) -> Path:
        """Adds it to the file of its operation and shape. Raises ResultError."""
        search, file = outcome.search, self._file(outcome.search)
        kept = tuple(one for one in (file.found if file else ()) if one.default != flat(search.default))
        made = tuned.TunedFile(
            search.operation,
            search.key,
            self.device,
            self.versions,
            digest(search.operation),
            (*kept, outcome.found),
            self.made,
        ).sealed()
        path = self.folder / tuned.file_name(search.operation, search.key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1))
            part.replace(path)  # a start that reads meanwhile finds the old one or the new one
        except OSError as error:
            raise ResultError(f"cannot write {path} ({error.strerror}); give another --cache-dir") from error
        return path

    def _file(self, search: TuningSearch) -> tuned.TunedFile | None:
        try:
            file = tuned.load(self.folder / tuned.file_name(search.operation, search.key))
        except (OSError, msgspec.MsgspecError):
            return None
        return None if tuned.unfit(file, self.device, self.versions) else file


def table(outcomes: Sequence[Outcome]) -> Table:
    shown = Table(title="tuned", title_justify="left")
    for head in ("operation", "case", "table", "chosen"):
        shown.add_column(head, overflow="fold")
    for head in ("table µs", "chosen µs", "faster", "tried"):
        shown.add_column(head, justify="right")
    for one in outcomes:
        kept = one.choice == one.search.default
        names = (
            "x".join(map(str, flat(one.search.default))),
            "the same" if kept else "x".join(map(str, flat(one.choice))),
        )
        gain = "–" if kept else f"{1 - one.us / one.default_us:.1%}"
        dropped = f" ({one.wrong} dropped)" if one.wrong else ""
        shown.add_row(
            one.search.operation,
            one.search.label,
            *names,
            f"{one.default_us:.2f}",
            f"{one.us:.2f}",
            gain,
            f"{one.tried}{dropped}",
        )
    return shown


def _parser() -> OptionsParser:
    epilog = """\
examples:
  thalweg tune models/tiny
  thalweg tune org/name --load-format dummy --seconds 600
  thalweg tune org/name --only experts "gemv 2048"

What is found lies in ~/.cache/thalweg/tuned (or --cache-dir) and is used by every start on this device with these versions of torch and Triton;
`thalweg plan` says so. It never runs by itself. Run it alone: what else runs on the device spoils it. Ctrl-C keeps what was found, and the next
run goes on from there."""
    parser = options_parser(
        "thalweg tune",
        "Searches faster tiles and choices for a model's shapes on this device. Reads no weights.",
        epilog,
        ("model", "load"),
    )
    add = parser.add_argument_group("This command").add_argument
    add("--only", nargs="+", default=[], metavar="WORDS", help='only what has these words in it: experts, "gemv 2048"')
    add("--seconds", type=float, default=None, metavar="S", help="stop after about so long (default: when all is done)")
    add("--candidates", type=positive, default=96, metavar="N", help="most that are tried of each case (default: 96)")
    add("--again", action="store_true", help="search again what has been searched")
    add("--list", action="store_true", help="only say what there is, and what is done")
    add("--result-filename", default="", metavar="FILE", help="write everything that was found as one JSON, too")
    return parser


def _search_all(tuner: Tuner, todo: Sequence[TuningSearch], shelf: Shelf, seconds: float | None) -> Found:
    """As many as there is time for, each written when it is done."""
    console, found = Console(stderr=True), Found()
    begun = time.monotonic()
    try:
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("tune", total=len(todo))
            for i, search in enumerate(todo):
                passed = time.monotonic() - begun
                if seconds is not None and passed > seconds:
                    print(
                        f"{len(todo) - i} of {len(todo)} are left after {passed:.0f} s; run it again to go on",
                        file=sys.stderr,
                    )
                    found.ended = "--seconds"
                    break
                bar.update(task, description=f"{search.operation} {search.label}"[:60])
                try:
                    found.outcomes.append(tuner.run(search))
                except failures() as failure:
                    found.failed.append(f"{search.operation} {search.label}: {told(failure)}")
                    print(f"FAILED {found.failed[-1]}", file=sys.stderr)
                else:
                    shelf.put(found.outcomes[-1])
                bar.advance(task)
                if not console.is_terminal:
                    left = (time.monotonic() - begun) / (i + 1) * (len(todo) - i - 1)
                    print(
                        f"{i + 1}/{len(todo)} {search.operation} {search.label}; about {left:.0f} s left",
                        file=sys.stderr,
                    )
    except KeyboardInterrupt:
        found.ended = "Ctrl-C"
    return found


def run(argv: list[str]) -> Found:
    """Searches, writes, prints. Raises ThalwegError or ResultError."""
    parsed: ParsedOptions = parse_options(_parser(), argv)
    args, config = parsed.args, parsed.options
    resolved = resolve(config, weights=False)
    settings, machine = resolved.engine, Machine.here()
    torch.set_num_threads(settings.threads)
    caches.use(settings.cache_dir)
    device = torch.device(settings.device)
    _, folder = tuned.folders(machine, settings.device, settings.cache_dir)
    whole = provenance("tune", argv, {"threads": settings.threads, "device": settings.device})
    name, made = tuned.device_name(machine, settings.device), {key: whole[key] for key in ("date", "commit")}
    shelf = Shelf(folder, name, tuned.versions(settings.device), made)
    every = searches(resolved)
    wanted = [one for one in every if matches(f"{one.operation} {one.label}", args.only)]
    if every and not wanted:
        raise UnsupportedConfig(
            f"--only: nothing here has {' or '.join(map(repr, args.only))} in its name; --list without it says what"
            " there is"
        )
    todo = [search for search in wanted if args.again or not shelf.done(search)]
    print(f"{len(wanted)} cases, {len(wanted) - len(todo)} of them searched before; results go to {folder}")
    if args.list:
        for search in wanted:
            print(
                f"  {'todo' if search in todo else 'done'}  {search.operation} {search.label}: {len(search.candidates)}"
                " candidates"
            )
        return Found()
    if wanted and not todo:
        print("nothing is left to search; --again does it anew")
    tuner = Tuner(device, args.candidates, resolved.sizes.weight_bytes)
    found = _search_all(tuner, todo, shelf, args.seconds)
    if found.outcomes:
        Console(width=shutil.get_terminal_size((UNKNOWN_WIDTH, 0)).columns).print(table(found.outcomes))
    if args.result_filename:
        rows = [
            {"operation": one.search.operation, "key": one.search.key, **msgspec.to_builtins(one.found)}
            for one in found.outcomes
        ]
        early = {"partial": bool(found.ended), "ended": found.ended, "failed": found.failed}
        write(Path(args.result_filename), {"rows": rows, **early, **whole})
    return found


def _status(words: list[str]) -> int:
    found = run(words)
    if found.ended == "Ctrl-C":
        return report_interruption("what was found is kept, run it again to continue")
    return int(bool(found.failed))


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, or as much as --seconds allowed, 1: it could not run, a search failed or a result could not be written,
    2: it was asked for wrongly, 130: Ctrl-C, what was found is kept.
    """
    return exit_status("thalweg tune", _status, argv)
