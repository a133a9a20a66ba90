"""`thalweg ablate`: what each feature is worth. SGLang's published DeepSeek ablation as a command, for any checkpoint
on any machine.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from thalweg.bench.ablation_cell import (
    DONE,
    FAILED,
    INTERRUPTED,
    REFUSED,
    TIMED_OUT,
    CellOrder,
    CellWorkload,
    Result,
    run_cell,
)
from thalweg.bench.ablation_columns import (
    MATRIX,
    MODES,
    SHORT,
    AblationCell,
    AblationColumn,
    SettingsProbe,
    cells,
    columns,
)
from thalweg.bench.ablation_engine import CLIENTS
from thalweg.bench.ablation_tables import differences_from_base, markdown, save_plot
from thalweg.bench.command import command, parse_engine_flags, report_interruption
from thalweg.bench.display import progress_bar
from thalweg.bench.errors import ResultError
from thalweg.bench.evaluation import SCORED, TASKS, EvalSettings, read_files
from thalweg.bench.in_process import configuration
from thalweg.bench.plots import has_matplotlib
from thalweg.bench.results import hide_home, provenance, replace_file
from thalweg.config.machine import Machine
from thalweg.config.options import Options
from thalweg.config.tree import non_defaults, settings
from thalweg.core.errors import UnsupportedConfig

ASKED = ("client", "query", "expected")  # of `CellOrder`
OTHER_FILE = "give another --output-file, or --anew to overwrite it"
EPILOG = """\
examples:
  thalweg ablate models/tiny
  thalweg ablate models/tiny --mode ladder --columns radix overlap graph kv
  thalweg ablate FOLDER --load-format dummy --mode matrix --columns graph overlap radix mla --output-file ablation.json
  thalweg ablate FOLDER --mode triples --columns graph radix attention nextn ep dp-attention overlap --client http \
    --query "What is the capital of France?" --expected Paris
  thalweg ablate models/tiny --columns dtype=float32,bfloat16 --tasks sums recall --items 200

The same command continues where it was ended."""
CELL_FLAGS = f"""
--mode          mode=one-at-a-time  the base and each column changed alone; up to two or three columns changed (pairs,
                                    triples); everything off and then one column after the other on (ladder); or every
                                    combination (matrix)
--columns       column...  NAME[=VALUE,VALUE]: settings to turn off and on, or to give these values; short names:
                           {", ".join(SHORT)}; default: every feature
--rounds        count=1    runs of each cell, in processes of their own, alternating; they measure the noise, and 5 give
                           useful intervals
--list          switch     print the cells, and why some cannot run; measure nothing
--cell-timeout  count=900  seconds of a cell
"""
LOAD_FLAGS = """
--input-len      count=760      mean tokens of a prompt
--output-len     count=460      mean tokens to write
--spread         share=0.5     lengths are within ± this share of the mean
--shared-prefix  whole=0        first tokens that all prompts have in common
--concurrency    count...=8 32  requests at a time, a run for each
--waves          count=2        requests of a run, times the concurrency
--repeat         count=1        runs, of which the fastest counts
--client         client=in-process  call the engine in the cell's process, or a server of the cell over http
--bench-seed     whole=1        of lengths and tokens
"""
ACCURACY_FLAGS = f"""
--tasks    task...    bundled tasks: {", ".join(TASKS)}, or none; default: {" ".join(SCORED)}; none with random weights
--items    count=100  held-out items a task
--query     text      a question that each cell answers alone, greedily, in --output-len tokens at most
--expected  text      what its answer must contain
--gsm8k    file       JSON lines with question and answer (#### number)
--choices  file       multiple choice by log-probabilities: see docs/benchmarks.md
"""
RESULT_FLAGS = """
--output-file  file=ablation.json  JSON; beside it .md, and .svg where matplotlib is installed
--anew         switch              measure again what the output file has already
--any-commit   switch              keep results of another commit, too; each cell has its own
"""


def workload(args: Any) -> CellWorkload:
    """Raises UnsupportedConfig for a shared prefix that is too long."""
    shortest = int(args.input_len * (1 - args.spread))
    if not 0 <= args.shared_prefix < shortest:
        raise UnsupportedConfig(
            f"--shared-prefix: {args.shared_prefix} must be shorter than the shortest prompt, {shortest} tokens by"
            " --input-len and --spread"
        )
    return msgspec.convert(vars(args) | {"seed": args.bench_seed}, CellWorkload)


def accuracy(args: Any, options: Options) -> EvalSettings:
    """Raises UnsupportedConfig where random weights would be asked."""
    is_random = options.load.load_format == "dummy"
    tasks = tuple(task for task in args.tasks or (() if is_random else SCORED) if task != "none")
    asked = msgspec.convert(vars(args) | {"tasks": tasks}, EvalSettings)
    if is_random and asked:
        raise UnsupportedConfig(
            "--load-format dummy: random weights know no answers; leave --tasks, --gsm8k and --choices out"
        )
    return asked


@dataclass(slots=True)
class Ablation:
    """An ablation under way."""

    path: Path
    head: Result  # what identifies it: checkpoint, columns, load, base
    source: Mapping[str, object]  # its provenance
    cells: Sequence[AblationCell]
    results: dict[str, Result]  # by a cell's key

    def check(self, cell: AblationCell, result: Result) -> Result:
        """The result; a failed one where the engine, by its own report, ran something else than the cell says."""
        if "ran" not in result:
            return result
        decisions, wishes = result["ran"]["decisions"], json.loads(json.dumps(cell.decisions, default=str))
        names = (column["setting"] for column in self.head["columns"])
        wrong = [
            f"{name} {decisions.get(name)}, not {wishes[name]}"
            for name in names
            if name in wishes and decisions.get(name) != wishes[name]
        ]
        if result["ran"]["drafter_failures"]:
            wrong.append("no drafter, which had failed")
        return {**result, "status": FAILED, "reason": f"the engine ran {', '.join(wrong)}"} if wrong else result

    def rounds(self, cell: AblationCell) -> int:
        """The number of its finished runs."""
        result = self.results.get(cell.key, {})
        return 1 + len(result.get("again", ())) if "status" in result else 0

    def add(self, cell: AblationCell, round: int, result: Result) -> None:
        """A run. A later round is kept beside the first one where it was completed."""
        if not round:
            self.results[cell.key] = {**result, "commit": self.source["commit"]}
        elif result["status"] == DONE:
            kept = {name: result[name] for name in ("single", "batches", "seconds")}
            again = self.results[cell.key].setdefault("again", [])
            again.append({"round": round, **kept, "commit": self.source["commit"]})

    def as_json(self) -> Result:
        rows = [
            {"columns": cell.labels, "wishes": cell.wishes, "decisions": cell.decisions, **self.results[cell.key]}
            for cell in self.cells
            if cell.key in self.results
        ]
        return {**self.head, "cells": rows, **self.source}

    def save(self) -> None:
        """Writes the JSON, and table and plot beside it; the files are whole at any moment. Raises ResultError."""
        result = self.as_json()
        text = json.dumps(result, ensure_ascii=False, indent=1, default=str) + "\n"
        try:
            replace_file(self.path, text.encode())
            replace_file(self.path.with_suffix(".md"), markdown(result).encode())
            if has_matplotlib():
                save_plot(result, self.path.with_suffix(""))
        except OSError as error:
            raise ResultError(f"cannot write {self.path} ({error.strerror}): give another --output-file") from error

    def resume(self, limit: float, any_commit: bool) -> None:
        """Takes the results of an earlier run that still hold: of the same commit unless any_commit. What failed or
        was interrupted is measured again, and what ran out of time where it has more of it now.

        Raises ResultError for a file that is no ablation, or one whose results would be lost: of another load, base,
        device or versions, or with cells that this one does not have.
        """
        if not self.path.is_file():
            return
        try:
            old: Result = json.loads(self.path.read_text(encoding="utf-8"))
            now = {**self.head, "device": self.source["device"], "versions": self.source["versions"]}
            other = [name for name, value in now.items() if name not in ("columns", "mode") and old[name] != value]
            rows = {json.dumps(row["wishes"], sort_keys=True, default=str): row for row in old["cells"]}
            done = {key for key, row in rows.items() if row["status"] == DONE}
            late = {key for key, row in rows.items() if row["status"] == TIMED_OUT and row["seconds"] >= limit}
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ResultError(f"{self.path} is no ablation that can be continued ({error!r}): {OTHER_FILE}") from error
        if other:
            raise ResultError(f"{self.path} has results of another {', '.join(other)}: {OTHER_FILE}")
        if lost := len(done - {cell.key for cell in self.cells}):
            raise ResultError(f"{self.path} has {lost} cells that this ablation does not have: {OTHER_FILE}")
        for key in done | late:
            if any_commit or rows[key].get("commit") == self.source["commit"]:
                self.results[key] = {
                    name: value for name, value in rows[key].items() if name not in ("columns", "wishes", "decisions")
                }


def measure(ablation: Ablation, order: CellOrder, limit: float, rounds: int) -> None:
    """Runs what is missing, round after round, so that a slow hour of the machine slows all cells; saves after each
    run. Raises ResultError, KeyboardInterrupt.
    """
    for cell in ablation.cells:
        if cell.reason:
            ablation.results[cell.key] = {"status": REFUSED, "reason": cell.reason}
    todo = [
        (round, cell)
        for round in range(rounds)
        for cell in ablation.cells
        if not cell.reason and round >= ablation.rounds(cell)
    ]
    with progress_bar("runs", len(todo)) as bar:
        for number, (round, cell) in enumerate(todo, 1):
            if round and ablation.results[cell.key]["status"] != DONE:
                continue  # its first run has failed
            wishes = {**order.settings, **cell.wishes}
            answers = EvalSettings() if round else order.accuracy  # the same in every round
            cell_order = msgspec.structs.replace(order, settings=wishes, accuracy=answers)
            result = ablation.check(cell, run_cell(cell_order, limit))
            ablation.add(cell, round, result)
            ablation.save()
            if result["status"] == INTERRUPTED:
                raise KeyboardInterrupt
            bar.advance()
            name = differences_from_base(ablation.head["columns"], cell.labels)
            print(f"{number} of {len(todo)}, {name}: {_short(result)}", file=sys.stderr)


def _short(result: Result) -> str:
    """A cell's result in a few words."""
    if result["status"] != DONE:
        return ": ".join(filter(None, (result["status"], result["reason"])))
    most = max(result["batches"], key=lambda batch: batch["concurrency"], default=None)
    batch = f", {most['throughput']:.0f} tok/s at {most['concurrency']}" if most else ""
    return f"{result['single']['decode_tokens_per_s']:.1f} tok/s alone{batch}, in {result['seconds']:.0f} s"


@command("thalweg ablate")
def main(argv: list[str]) -> int:
    """0: done; 1: an error, no cell could run, or one failed or ran out of time; 2: wrong flags; 130: interrupted."""
    text = (
        "Turns features off and on: speed and accuracy of each combination, or why it cannot run. The flags of the"
        " engine are the base."
    )
    groups = ("model", "load", "memory", "schedule", "sampling", "speculative", "parallel")
    tables = {"Cells": CELL_FLAGS, "Load": LOAD_FLAGS, "Accuracy": ACCURACY_FLAGS, "Results": RESULT_FLAGS}
    kinds: dict[str, Any] = {"mode": MODES, "column": str, "task": (*TASKS, "none"), "client": CLIENTS}
    args, options = parse_engine_flags(argv, "thalweg ablate", text, tables, groups, EPILOG, **kinds)
    if args.mode == MATRIX and not args.columns:
        raise UnsupportedConfig("--mode matrix: every combination of every feature is too many; name --columns")
    if args.expected and not args.query:
        raise UnsupportedConfig("--expected: what the answer to --query must contain; give --query too")
    if Path(args.output_file).suffix != ".json":
        raise UnsupportedConfig(f"--output-file {args.output_file}: must end in .json; table and plot go beside it")
    work, asked = workload(args), accuracy(args, options)
    base = {"random_seed": 0, **non_defaults(options)}
    if options.schedule.max_running_requests is None:
        base["max_running_requests"] = max(work.concurrency)
    probe = SettingsProbe(base, Machine.here())
    chosen = columns(args.columns, probe)
    work.check(probe.start().engine.context_length)
    read_files(asked)
    found = cells(args.mode, chosen, probe)
    order = CellOrder(settings=base, work=work, accuracy=asked, **{name: getattr(args, name) or "" for name in ASKED})
    head = _head(options, args.mode, chosen, order)
    if args.list:
        for cell in found:
            print(f"{differences_from_base(head['columns'], cell.labels)}: {cell.reason or 'can run'}")
        return 0
    secrets = [value for name, value in base.items() if settings()[name].secret]
    source = provenance("ablate", argv, configuration(probe.start()), secrets)
    ablation = Ablation(Path(args.output_file), head, source, found, {})
    if not args.anew:
        ablation.resume(args.cell_timeout, args.any_commit)
    refused, kept = sum(bool(cell.reason) for cell in found), len(ablation.results)
    print(f"{len(found)} cells: {refused} cannot run, {kept} are taken from {ablation.path}", file=sys.stderr)
    status, before = 0, signal.signal(signal.SIGTERM, signal.default_int_handler)  # job schedulers send it: as Ctrl-C
    try:
        measure(ablation, order, args.cell_timeout, args.rounds)
    except KeyboardInterrupt:
        status = report_interruption(f"what was measured is in {ablation.path}; the same command continues")
    finally:
        signal.signal(signal.SIGTERM, before)
    ablation.save()
    print(markdown(ablation.as_json()), end="")
    states = {result["status"] for result in ablation.results.values()}
    return status or int(DONE not in states or not states <= {DONE, REFUSED})


def _head(options: Options, mode: str, chosen: Sequence[AblationColumn], order: CellOrder) -> Result:
    base = order.settings
    head = {
        "checkpoint": Path(options.model.model).resolve().name,
        "mode": mode,
        "columns": hide_home([column.as_json() for column in chosen]),
        "workload": msgspec.to_builtins(order.work),
        "accuracy": msgspec.to_builtins(order.accuracy),
        **{name: getattr(order, name) for name in ASKED},
        "base": {name: value for name, value in base.items() if name != "model" and not settings()[name].secret},
    }
    return dict(json.loads(json.dumps(head)))  # as it is when it is read again
