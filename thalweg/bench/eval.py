"""`thalweg eval`: how good a model's answers are: on held-out tasks, on files, through lm-evaluation-harness; each
share with its interval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from thalweg.bench import harness
from thalweg.bench.answers import Answerer, Here, Texts, There
from thalweg.bench.data_args import whole
from thalweg.bench.errors import DatasetError, HttpError, ResultError
from thalweg.bench.eval_run import BLIND, CHOICE, LEAST, SHARES, TASKS, Asked, Evaluation, Row, evaluate, read_files
from thalweg.bench.in_process import configuration, folder_name, positive
from thalweg.bench.own_server import ServerError
from thalweg.bench.results import provenance, write
from thalweg.config.args import OptionsParser, ParsedOptions, options_parser, parse_options
from thalweg.config.options import Options
from thalweg.config.tree import non_defaults
from thalweg.core.errors import ThalwegError, UnsupportedConfig
from thalweg.llm import LLM

BROKEN = "an error that nobody expected; it stands below"


def _parser() -> OptionsParser:
    parser = options_parser(
        "thalweg eval",
        "Accuracy on the bundled held-out tasks, on files of questions, and on tasks of lm-evaluation-harness.",
        only=("model", "load", "memory", "schedule"),
    )
    _add_questions(parser.add_argument_group("Evaluation"))
    _add_server(parser.add_argument_group("A server instead of the engine"))
    add = parser.add_argument_group("Results").add_argument
    add("--output-file", default="", metavar="FILE", help="write the results as JSON")
    harness.flags(parser)
    return parser


def _add_questions(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
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
    add("--shots", type=whole, default=0, metavar="N", help="how many of them (default: 0)")
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


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--base-url",
        default="",
        metavar="URL",
        help="ask this server; --model is then only the folder of tokenizer and chat format",
    )
    add("--served-model-name", default="", metavar="NAME", help="the model's name on that server (default: --model)")
    add("--api-key", default="", metavar="KEY", help="for that server")
    add("--concurrency", type=positive, default=32, metavar="N", help="requests at a time to that server (default: 32)")


def _chosen(args: argparse.Namespace, answerer: Answerer) -> tuple[str, ...]:
    """The tasks to run: those asked for, or all that can be. Raises UnsupportedConfig for what HTTP cannot give."""
    here = answerer if isinstance(answerer, Here) else None
    if here is None:
        if missing := [task for task in args.tasks or () if task not in (*SHARES, CHOICE)]:
            raise UnsupportedConfig(
                f"--tasks {' '.join(missing)}: needs the engine in this process; leave --base-url out"
            )
    lacking = _lacking(here) if here is not None else {}
    if args.tasks is not None:
        for task in args.tasks:
            if task in lacking:
                raise UnsupportedConfig(f"--tasks {task}: {lacking[task]}; leave it out")
        return tuple(dict.fromkeys(args.tasks))
    if args.gsm8k or args.choices:
        return ()
    # log-probabilities of prompts are not every server's
    return SHARES if here is None else tuple(task for task in TASKS if task not in lacking)


def _lacking(here: Here) -> dict[str, str]:
    """Tasks that this model cannot do, with the reason."""
    lacking = {} if here.indexers() else {BLIND: "this model has no indexer whose choice of context could be replaced"}
    return lacking if here.has_nextn() else {**lacking, "nextn": "this model has no NextN layer"}


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
    """The rows; of a task that was broken off, how many items of how many."""
    shown = Table(title="held-out results", title_justify="left")
    shown.add_column("task", no_wrap=True)
    for head in ("items", "result", "95 % interval", "s"):
        shown.add_column(head, justify="right")
    for row in rows:
        items, seconds = str(row.get("items", row["total"])), f"{row['seconds']:.0f}"
        items += f" of {row['asked']}" if "asked" in row else ""
        if "share" in row:
            result, interval = f"{row['share']:.1%}", f"{row['low_95']:.1%} – {row['high_95']:.1%}"
        else:
            result, interval = f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.3f} bits a byte"
        shown.add_row(str(row["task"]), items, result, interval, seconds)
    return shown


def _start(config: Options, args: argparse.Namespace, progress: Progress) -> tuple[Evaluation, Mapping[str, object]]:
    """The evaluation, and the configuration that its results carry."""
    model = config.model.model
    if args.base_url:
        folder = Path(model)
        if not (folder / "tokenizer.json").is_file():
            raise UnsupportedConfig(
                f"--model {model}: with --base-url it must be a folder with tokenizer.json and config.json"
            )
        there = There(args.base_url, args.served_model_name or model, args.api_key, args.concurrency, progress)
        return Evaluation(Texts(folder), there, args.items, args.items_seed), {"server": args.base_url}
    wishes = {name: value for name, value in non_defaults(config).items() if name != "model"}
    llm = LLM(model, progress=True, **wishes)
    here = Here(llm, progress=Console(stderr=True).is_terminal)
    return Evaluation(Texts(llm.texts.resolved.path), here, args.items, args.items_seed), configuration(
        llm.texts.resolved
    )


def run(argv: list[str]) -> int:
    """Evaluates, prints and writes; what is done is kept when Ctrl-C or an error ends it. The exit status.

    Raises ThalwegError, HttpError, DatasetError, ServerError or ResultError where nothing was measured, or it cannot be
    written.
    """
    parsed = parse_options(_parser(), argv)
    args = parsed.args
    if args.harness:
        return 0 if harness.run(parsed.options, args, argv) else 1
    if args.base_url and args.indexer != "model":
        raise UnsupportedConfig("--indexer random: needs the engine in this process; leave --base-url out")
    read_files(_asked(args, ()))  # what is wrong with them is said before a model is loaded
    console, ended, status = Console(stderr=True), BROKEN, 1
    with Progress(console=console, disable=not (console.is_terminal and args.base_url)) as progress:
        evaluation, configured = _start(parsed.options, args, progress)
        asked = _asked(args, _chosen(args, evaluation.answerer))
        try:
            for _ in evaluate(evaluation, asked, progress):
                pass
            ended, status = "", 0
        except KeyboardInterrupt:
            ended, status = "Ctrl-C", 130
        except (ThalwegError, HttpError) as error:
            if not evaluation.rows:
                raise
            ended = str(error)
        finally:
            if evaluation.rows:
                _keep(evaluation.rows, asked, ended, parsed, argv, configured)
    return status if evaluation.rows else status or 1


def _keep(
    rows: Sequence[Row],
    asked: Asked,
    ended: str,
    parsed: ParsedOptions,
    argv: Sequence[str],
    configured: Mapping[str, object],
) -> None:
    """Prints and writes what was measured. ended: why it is not all, "" where it is. Raises ResultError."""
    Console().print(table(rows))
    if ended:
        print(f"thalweg eval: PARTIAL: {ended}; the rows are of what was answered until then", file=sys.stderr)
    args = parsed.args
    if args.output_file:
        told = [word for word in argv if not args.api_key or args.api_key not in word]
        head = {"checkpoint": folder_name(Path(parsed.options.model.model)), "evaluation": msgspec.to_builtins(asked)}
        result = {**head, "results": rows, "partial": bool(ended), "ended": ended}
        write(Path(args.output_file), {**result, **provenance("eval", told, configured)})


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: it could not run, or an error ended it; 2: it was asked for wrongly; 130: Ctrl-C. What was measured
    is told and written.
    """
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except UnsupportedConfig as error:
        print(f"thalweg eval: {error}", file=sys.stderr)
        return 2
    except (ThalwegError, HttpError, DatasetError, ResultError, ServerError) as error:
        print(f"thalweg eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there was anything to keep
        return 130
