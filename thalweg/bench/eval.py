"""`thalweg eval`: how good a model's answers are: on held-out tasks, on files, through lm-evaluation-harness; each share with its interval."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from thalweg.bench import harness
from thalweg.bench.answers import Answerer, Here, Texts, There
from thalweg.bench.client import HttpError
from thalweg.bench.datasets import DatasetError
from thalweg.bench.eval_run import BLIND, CHOICE, LEAST, SHARES, TASKS, Asked, Evaluation, Row, evaluate
from thalweg.bench.in_process import configuration, folder_name, positive
from thalweg.bench.own_server import ServerError
from thalweg.bench.results import ResultError, provenance, write
from thalweg.config.args import Parser, config_parser, parse_config
from thalweg.config.options import Config
from thalweg.config.tree import given
from thalweg.core.errors import CannotServe, ThalwegError
from thalweg.llm import LLM


def _parser() -> Parser:
    parser = config_parser(
        "thalweg eval",
        "Accuracy on the bundled held-out tasks, on files of questions, and on tasks of lm-evaluation-harness.",
        only=("model", "load", "memory", "schedule"),
    )
    add = parser.add_argument_group("Evaluation").add_argument
    add(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=None,
        metavar="TASK",
        help=f"of {', '.join(TASKS)} (default: all; none where something else is asked for)",
    )
    add("--items", type=positive, default=LEAST, metavar="N", help=f"held-out items a task (default: {LEAST})")
    add("--items-seed", type=int, default=0, metavar="N", help="which items (default: 0)")
    add(
        "--indexer", choices=("model", "random"), default="model",
        help="random: every query sees a random choice of its context, which shows what the indexer is worth (default: model)",
    )  # fmt: skip
    add("--gsm8k", default="", metavar="FILE", help="JSON lines with question and answer (#### number)")
    add("--gsm8k-shots", default="", metavar="FILE", help="worked examples in the same form, put before each question")
    add("--shots", type=int, default=0, metavar="N", help="how many of them (default: 0)")
    add("--max-new-tokens", type=positive, default=512, metavar="N", help="for --gsm8k (default: 512)")
    add(
        "--thinking",
        action="store_true",
        help="think before answering, for --gsm8k (the bundled tasks know themselves)",
    )
    add(
        "--choices",
        default="",
        metavar="FILE",
        help="multiple choice by log-probabilities: JSON lines, see docs/benchmarks.md",
    )
    add(
        "--base-url",
        default="",
        metavar="URL",
        help="ask this server; --model is then only the folder of tokenizer and chat format",
    )
    add("--served-model-name", default="", metavar="NAME", help="the model's name on that server (default: --model)")
    add("--api-key", default="", metavar="KEY", help="for that server")
    add("--concurrency", type=positive, default=32, metavar="N", help="requests at a time to that server (default: 32)")
    add("--output-file", default="", metavar="FILE", help="write the results as JSON")
    harness.flags(parser)
    return parser


def _chosen(args: argparse.Namespace, answerer: Answerer) -> tuple[str, ...]:
    """The tasks to run: those asked for, or all that can be. Raises CannotServe for what HTTP cannot give."""
    here = answerer if isinstance(answerer, Here) else None
    if args.tasks is not None:
        possible = (*SHARES, CHOICE) if here is None else TASKS
        if missing := [task for task in args.tasks if task not in possible]:
            raise CannotServe(f"--tasks {' '.join(missing)}: needs the engine in this process; leave --base-url out")
        return tuple(args.tasks)
    if args.gsm8k or args.choices:
        return ()
    if here is None:
        return SHARES  # log-probabilities of prompts are not every server's
    lacking = {BLIND: not here.indexers(), "nextn": not here.has_nextn()}
    return tuple(task for task in TASKS if not lacking.get(task))


def _asked(args: argparse.Namespace, tasks: tuple[str, ...]) -> Asked:
    return Asked(
        tasks=tasks,
        items=args.items,
        seed=args.items_seed,
        indexer=args.indexer,
        gsm8k=args.gsm8k,
        gsm8k_shots=args.gsm8k_shots,
        shots=args.shots,
        max_new_tokens=args.max_new_tokens,
        thinking=args.thinking,
        choices=args.choices,
    )


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="held-out results", title_justify="left")
    shown.add_column("task", no_wrap=True)
    for head in ("items", "result", "95 % interval", "s"):
        shown.add_column(head, justify="right")
    for row in rows:
        items, seconds = str(row.get("items", row["total"])), f"{row['seconds']:.0f}"
        if "share" in row:
            result, interval = f"{row['share']:.1%}", f"{row['low_95']:.1%} – {row['high_95']:.1%}"
        else:
            result, interval = f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.3f} bits a byte"
        shown.add_row(str(row["task"]), items, result, interval, seconds)
    return shown


def _start(config: Config, args: argparse.Namespace, progress: Progress) -> tuple[Evaluation, Mapping[str, object]]:
    """The evaluation, and the configuration that its results carry."""
    model = config.model.model
    if args.base_url:
        folder = Path(model)
        if not (folder / "tokenizer.json").is_file():
            raise CannotServe(
                f"--model {model}: with --base-url it must be a folder with tokenizer.json and config.json"
            )
        there = There(args.base_url, args.served_model_name or model, args.api_key, args.concurrency, progress)
        return Evaluation(Texts(folder), there, args.items, args.items_seed), {"server": args.base_url}
    wishes = {name: value for name, value in given(config).items() if name != "model"}
    llm = LLM(model, progress=True, **wishes)
    here = Here(llm, progress=Console(stderr=True).is_terminal)
    return Evaluation(Texts(llm.texts.resolved.path), here, args.items, args.items_seed), configuration(
        llm.texts.resolved
    )


def run(argv: list[str]) -> list[Row]:
    """Evaluates and prints; Ctrl-C keeps the tasks that are done. Raises ThalwegError, HttpError, DatasetError, ServerError or ResultError."""
    parsed = parse_config(_parser(), argv)
    args = parsed.rest
    if args.harness:
        return harness.run(parsed.config, args, argv)
    if args.base_url and args.indexer != "model":
        raise CannotServe("--indexer random: needs the engine in this process; leave --base-url out")
    console = Console(stderr=True)
    with Progress(console=console, disable=not (console.is_terminal and args.base_url)) as progress:
        evaluation, configured = _start(parsed.config, args, progress)
        tasks = _chosen(args, evaluation.answerer)
        try:
            for _ in evaluate(evaluation, _asked(args, tasks), progress):
                pass
        except KeyboardInterrupt:
            print("interrupted: the tasks that are done follow", file=sys.stderr)
        finally:
            if evaluation.rows:
                Console().print(table(evaluation.rows))
    if args.output_file and evaluation.rows:
        told = [word for word in argv if not args.api_key or args.api_key not in word]
        asked = {"tasks": tasks, "items": args.items, "items_seed": args.items_seed, "indexer": args.indexer}
        head = {"checkpoint": folder_name(Path(parsed.config.model.model)), "evaluation": asked}
        write(Path(args.output_file), {**head, "results": evaluation.rows, **provenance("eval", told, configured)})
    return evaluation.rows


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, 1: it could not run or nothing was measured."""
    try:
        return 0 if run(list(sys.argv[1:] if argv is None else argv)) else 1
    except (ThalwegError, HttpError, DatasetError, ResultError, ServerError) as error:
        print(f"thalweg eval: {error}", file=sys.stderr)
        return 1
