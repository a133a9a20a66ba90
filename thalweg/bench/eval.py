"""`thalweg eval`: how good a model's answers are, on held-out tasks, on files and through lm-evaluation-harness; each
share with its interval.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from thalweg.bench import harness
from thalweg.bench.answering import Answerer, EngineAnswerer, PromptFormat, ServerAnswerer
from thalweg.bench.command import OUTPUT, PartialRun, command, parse_engine_flags
from thalweg.bench.display import accuracy, show
from thalweg.bench.evaluation import (
    CHOICE,
    MOST_ITEMS,
    RANDOM_RECALL,
    SCORED,
    TASKS,
    EvalSettings,
    Evaluation,
    Row,
    evaluate,
    read_files,
)
from thalweg.bench.in_process import configuration
from thalweg.bench.results import save
from thalweg.config.options import Options
from thalweg.config.tree import non_defaults
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.report import make_table
from thalweg.llm import LLM

FLAGS = f"""
--tasks           task...        of {", ".join(TASKS)}; default: all; none where something else is asked for
--items           count={MOST_ITEMS}     held-out items a task
--items-seed      whole=0        which items
--gsm8k           file           JSON lines with question and answer (#### number)
--gsm8k-shots     file           worked examples in the same form, put before each question
--shots           whole=0        how many of them
--max-new-tokens  count=512      for --gsm8k
--thinking        switch         think before answering, for --gsm8k (the bundled tasks have their own setting)
--choices         file           multiple choice by log-probabilities: JSON lines, see docs/benchmarks.md
"""
SERVER_FLAGS = """
--base-url           url       ask this server; --model is then only the folder of tokenizer and chat format
--served-model-name  name      the model's name on that server; default: --model
--api-key            text      for that server
--concurrency        count=32  requests at a time to that server
"""


def _chosen(args: Any, answerer: Answerer) -> tuple[str, ...]:
    """The tasks to run: those asked for, or all that are possible. Raises UnsupportedConfig for impossible ones."""
    if isinstance(answerer, EngineAnswerer):
        reason = "this model has no indexer whose selection could be replaced; leave it out"
        lacking = {} if answerer.indexers() else {RANDOM_RECALL: reason}
        default = tuple(task for task in TASKS if task not in lacking)
    else:
        needed = (task for task in TASKS if task not in (*SCORED, CHOICE))
        lacking = dict.fromkeys(needed, "needs the engine in this process; leave --base-url out")
        default = SCORED  # not every server has log-probabilities of prompts
    for task in args.tasks or ():
        if task in lacking:
            raise UnsupportedConfig(f"--tasks {task}: {lacking[task]}")
    if args.tasks:
        return tuple(dict.fromkeys(args.tasks))
    return () if args.gsm8k or args.choices else default


def _settings(args: Any, tasks: tuple[str, ...]) -> EvalSettings:
    return msgspec.convert(vars(args) | {"tasks": tasks, "seed": args.items_seed}, EvalSettings)


def table(rows: Sequence[Row]) -> Table:
    """The rows; of a task that was ended early, how many items of how many."""

    def items(row: Mapping[str, Any]) -> str:
        return str(row.get("items", row["total"])) + (f" of {row['asked']}" if "asked" in row else "")

    columns = {
        "task": "{task}",
        "items": items,
        "result": lambda row: accuracy(row)[0],
        "95 % interval": lambda row: accuracy(row)[1],
        "s": "{seconds:.0f}",
    }
    return make_table("held-out results", columns, rows, left=1)


def _start(options: Options, args: Any) -> tuple[Evaluation, Mapping[str, object]]:
    """The evaluation, and the configuration of its results."""
    model = options.model.model
    if args.base_url:
        folder = Path(model)
        if not (folder / "tokenizer.json").is_file():
            needed = "with --base-url it must be a folder with tokenizer.json and config.json"
            raise UnsupportedConfig(f"--model {model}: {needed}")
        server = ServerAnswerer(args.base_url, args.served_model_name or model, args.api_key, args.concurrency)
        return Evaluation(PromptFormat(folder), server, args.items, args.items_seed), {"server": args.base_url}
    wishes = {name: value for name, value in non_defaults(options).items() if name != "model"}
    llm = LLM(model, **wishes)
    resolved, engine = llm.texts.resolved, EngineAnswerer(llm, Console(stderr=True).is_terminal)
    return Evaluation(PromptFormat(resolved.path), engine, args.items, args.items_seed), configuration(resolved)


@command("thalweg eval")
def main(argv: list[str]) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. What is done is printed and written."""
    text = "Accuracy on the bundled held-out tasks, on files of questions, and on tasks of lm-evaluation-harness."
    tables = {"Evaluation": FLAGS, "A server instead of the engine": SERVER_FLAGS, "Results": OUTPUT}
    tables["lm-evaluation-harness"] = harness.FLAGS
    kinds: dict[str, Any] = {"task": TASKS, "api": tuple(harness.MODELS)}
    args, options = parse_engine_flags(argv, "thalweg eval", text, tables, **kinds)
    partial, rows = PartialRun(), list[Row]()
    if args.harness:
        rows, evaluated, configured = harness.run(options, args)
    else:
        read_files(_settings(args, ()))  # errors in them are reported before a model is loaded
        evaluation, configured = _start(options, args)
        settings, rows = _settings(args, _chosen(args, evaluation.answerer)), evaluation.rows
        evaluated = msgspec.to_builtins(settings)
        with partial:
            for _ in evaluate(evaluation, settings):
                pass
    if rows:
        show(table(rows))
        result = {"checkpoint": Path(options.model.model).resolve().name, "evaluation": evaluated, "results": rows}
        save(args.output_file, "eval", argv, configured, result | partial.as_json(), [args.api_key])
        if partial.ended:
            print(
                f"thalweg eval: PARTIAL: {partial.ended}; the rows are of what was answered until then", file=sys.stderr
            )
    return partial.finish(0 if rows else 1)
