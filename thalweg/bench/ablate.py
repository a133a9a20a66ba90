"""`thalweg ablate`: what each feature is worth. SGLang's published DeepSeek ablation as a command, for any checkpoint
on any machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from thalweg.bench.ablate_args import accuracy, make_parser, workload
from thalweg.bench.ablate_cell import Order
from thalweg.bench.ablate_cells import MATRIX, Cell, cells
from thalweg.bench.ablate_columns import Column, Probe, columns
from thalweg.bench.ablate_load import Workload, must_fit
from thalweg.bench.ablate_run import DONE, INTERRUPTED, REFUSED, TIMED_OUT, Interrupted, ended_by_sigterm
from thalweg.bench.ablate_run import run as run_cell
from thalweg.bench.ablation_tables import differences_from_base, markdown
from thalweg.bench.errors import ResultError
from thalweg.bench.eval_run import Asked, read_files
from thalweg.bench.in_process import configuration, folder_name
from thalweg.bench.plots import save_ablation
from thalweg.bench.results import hide_home, provenance
from thalweg.bench.usage import status
from thalweg.config.args import parse_options
from thalweg.config.machine import Machine
from thalweg.config.options import Options
from thalweg.config.tree import non_defaults, settings
from thalweg.core.errors import UnsupportedConfig

Result = dict[str, Any]
OTHER_FILE = "give another --output-file, or --anew to write it over"


def base_of(config: Options, work: Workload) -> dict[str, Any]:
    """The settings that all cells share, with a fixed seed and as many requests at a time as the load wants where
    nothing else is said.
    """
    wishes = non_defaults(config)
    if config.schedule.max_running_requests is None:
        wishes["max_running_requests"] = max(work.concurrency)
    return {"random_seed": 0, **wishes}


# ---- the matrix ----


@dataclass(slots=True)
class Table:
    """An ablation under way. head: what it is of; results: by a cell's key."""

    path: Path
    head: Result
    columns: Sequence[Column]
    cells: Sequence[Cell]
    results: dict[str, Result]

    def rounds(self, cell: Cell) -> int:
        """How many runs of it are done."""
        result = self.results.get(cell.key, {})
        return 1 + len(result.get("again", ())) if "status" in result else 0

    def add(self, cell: Cell, turn: int, result: Result) -> None:
        """A run of it. Of a later round, what was measured goes beside the first round's; one that failed leaves
        nothing.
        """
        if not turn:
            self.results[cell.key] = result
        elif result["status"] == DONE:
            kept = {name: result[name] for name in ("single", "batches", "seconds", "commit")}
            self.results[cell.key].setdefault("again", []).append({"round": turn, **kept})

    def as_json(self, told: Mapping[str, object]) -> Result:
        rows = [
            {
                "columns": dict(cell.labels),
                "wishes": dict(cell.wishes),
                "decisions": dict(cell.decisions),
                **self.results[cell.key],
            }
            for cell in self.cells
            if cell.key in self.results
        ]
        return {**self.head, "cells": rows, **told}

    def save(self, told: Mapping[str, object]) -> None:
        """Writes the JSON, and the table and the plot beside it; the file is whole at any moment. Raises
        ResultError.
        """
        made = self.as_json(told)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for suffix, text in (
                (".json", json.dumps(made, ensure_ascii=False, indent=1, default=str) + "\n"),
                (".md", markdown(made)),
            ):
                new = self.path.with_suffix(f"{suffix}.new")
                new.write_text(text, encoding="utf-8")
                os.replace(new, self.path.with_suffix(suffix))
            with suppress(ImportError):
                import matplotlib  # noqa: F401

                save_ablation(made, self.path.with_suffix(""))
        except OSError as error:
            raise ResultError(f"cannot write {self.path} ({error.strerror}): give another --output-file") from error


def kept(table: Table, told: Mapping[str, object], limit: float, any_commit: bool) -> dict[str, Result]:
    """Results of an earlier run that still hold, by key: of the same commit unless any_commit. What failed or was
    interrupted is measured again, and what ran out of time where it has more of it now.

    Raises ResultError for a file that is no ablation, or one whose results would be lost: of another load, base, device
    or versions, or with cells that this table does not have.
    """
    if not table.path.is_file():
        return {}
    try:
        old: Result = json.loads(table.path.read_text(encoding="utf-8"))
        now = {**table.head, "device": told["device"], "versions": told["versions"]}
        other = [name for name, value in now.items() if name not in ("columns", "mode") and old[name] != value]
        rows = {json.dumps(row["wishes"], sort_keys=True, default=str): row for row in old["cells"]}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ResultError(f"{table.path} is no ablation to go on with ({error!r}): {OTHER_FILE}") from error
    if other:
        raise ResultError(f"{table.path} has results of another {', '.join(other)}: {OTHER_FILE}")
    done = {key: row for key, row in rows.items() if row["status"] == DONE}
    if lost := len(done.keys() - {cell.key for cell in table.cells}):
        raise ResultError(f"{table.path} has {lost} cells that are none of this table: {OTHER_FILE}")
    late = {key: row for key, row in rows.items() if row["status"] == TIMED_OUT and row["seconds"] >= limit}
    return {
        key: {name: value for name, value in row.items() if name not in ("columns", "wishes", "decisions")}
        for key, row in (done | late).items()
        if any_commit or row.get("commit") == told["commit"]
    }


def missing(table: Table, rounds: int) -> list[tuple[int, Cell]]:
    """(round, cell) that are to be run, round after round, so that a slow hour of the machine meets all cells alike."""
    return [
        (turn, cell) for turn in range(rounds) for cell in table.cells if not cell.reason and turn >= table.rounds(cell)
    ]


def measure(table: Table, order: Order, limit: float, rounds: int, told: Mapping[str, object]) -> bool:
    """Runs what is missing, saving after each run; whether all of it ran. Raises ResultError."""
    for cell in table.cells:
        if cell.reason:
            table.results[cell.key] = {"status": REFUSED, "reason": cell.reason}
    todo = missing(table, rounds)
    console, spent = Console(stderr=True), 0.0
    fields = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with ended_by_sigterm(), Progress(*fields, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("runs", total=len(todo), left="")
        for done, (turn, cell) in enumerate(todo):
            if turn and table.results[cell.key]["status"] != DONE:
                continue  # its first run has failed
            begin = time.perf_counter()
            try:
                result = run_cell(_of_cell(order, cell, turn), limit)
            except (Interrupted, KeyboardInterrupt) as error:
                if isinstance(error, Interrupted) and not turn:
                    table.results[cell.key] = error.result
                table.save(told)
                return False
            spent += time.perf_counter() - begin
            table.add(cell, turn, {**result, "commit": told["commit"]})
            table.save(told)
            left = _left(spent / (done + 1) * (len(todo) - done - 1))
            bar.update(task, completed=done + 1, left=left)
            line = f"{done + 1} of {len(todo)}, {changed(table.columns, cell.labels)}: {short(result)}; {left}"
            console.print(line, highlight=False, soft_wrap=True)
    return True


def _of_cell(order: Order, cell: Cell, turn: int) -> Order:
    """Answers are the same in every round: they are asked for in the first."""
    settings = {**order.settings, **cell.wishes}
    return msgspec.structs.replace(order, settings=settings, accuracy=Asked() if turn else order.accuracy)


def _left(seconds: float) -> str:
    if not seconds:
        return "the last one"
    return f"about {seconds / 60:.0f} min left" if seconds > 99 else f"about {seconds:.0f} s left"


def changed(made: Sequence[Column], labels: Mapping[str, str]) -> str:
    """How a cell differs from the base, in a few words."""
    return differences_from_base([{"name": one.name, "base": one.base} for one in made], labels)


def short(result: Result) -> str:
    """A cell's result in a few words."""
    if result["status"] != DONE:
        return ": ".join(word for word in (result["status"], result["reason"]) if word)
    most = max(result["batches"], key=lambda one: one["concurrency"], default=None)
    batch = f", {most['throughput']:.0f} tok/s at {most['concurrency']}" if most else ""
    return f"{result['single']['decode_tokens_per_s']:.1f} tok/s alone{batch}, in {result['seconds']:.0f} s"


def run(argv: list[str]) -> int:
    """Raises ThalwegError, DatasetError or ResultError."""
    parsed = parse_options(make_parser(), argv)
    args, config = parsed.args, parsed.options
    if args.mode == MATRIX and not args.columns:
        raise UnsupportedConfig("--mode matrix: every combination of every feature is too many; name --columns")
    if Path(args.output_file).suffix != ".json":
        raise UnsupportedConfig(
            f"--output-file {args.output_file}: must end in .json; the table and the plot go beside it"
        )
    work, asked = workload(args), accuracy(args, config)
    base = base_of(config, work)
    probe = Probe(base, Machine.here())
    made = columns(args.columns, probe)
    must_fit(work, probe.start().engine.context_length)
    read_files(asked)
    found = cells(args.mode, made, probe)
    if args.list:
        for cell in found:
            print(f"{changed(made, cell.labels)}: {cell.reason or 'can run'}")
        return 0
    told = provenance("ablate", _open_words(argv, base), configuration(probe.start()))
    table = Table(Path(args.output_file), _head(config, args.mode, made, work, asked, base), made, found, {})
    table.results = {} if args.anew else kept(table, told, args.cell_timeout, args.any_commit)
    refused = sum(bool(cell.reason) for cell in found)
    print(
        f"{len(found)} cells, of which {refused} cannot run and {len(table.results)} are taken from {table.path}",
        file=sys.stderr,
    )
    whole = measure(table, Order(settings=base, work=work, accuracy=asked), args.cell_timeout, args.rounds, told)
    table.save(told)
    print(markdown(table.as_json(told)), end="")
    if not whole:
        print(f"interrupted: what was measured is in {table.path}; the same command goes on", file=sys.stderr)
        return 130
    states = {one["status"] for one in table.results.values()}
    return 0 if DONE in states and states <= {DONE, REFUSED, INTERRUPTED} else 1


def _open_words(argv: Sequence[str], base: Mapping[str, Any]) -> list[str]:
    """The command line without what is secret in it."""
    hidden = {str(value) for name, value in base.items() if settings()[name].secret}
    return [word for word in argv if not any(value in word for value in hidden)]


def _head(
    config: Options, mode: str, made: Sequence[Column], work: Workload, asked: Asked, base: Mapping[str, Any]
) -> Result:
    shown = {name: value for name, value in base.items() if name != "model" and not settings()[name].secret}
    listed = [
        {
            "name": one.name,
            "setting": one.setting,
            "base": one.base,
            "levels": [level.label for level in one.levels],
            "values": [hide_home(level.value) for level in one.levels],
        }
        for one in made
    ]
    head = {
        "checkpoint": folder_name(Path(config.model.model)),
        "mode": mode,
        "columns": listed,
        "workload": msgspec.to_builtins(work),
        "accuracy": msgspec.to_builtins(asked),
        "base": shown,
    }
    return dict(json.loads(json.dumps(head)))  # as it is when it is read again


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, 1: it could not run, no cell could, or one failed or ran out of time, 2: it was asked for wrongly, 130:
    interrupted.
    """
    return status("thalweg ablate", run, argv)
