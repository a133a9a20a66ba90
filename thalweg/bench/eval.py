"""`thalweg eval`: how good a model's answers are, on held-out items, each share with its confidence interval.

The bundled tasks give every shortcut (quantization, sparse attention, speculation, a cache format) an accuracy beside its speed."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from thalweg.attention.selection import RandomChoice, best
from thalweg.bench import gsm8k
from thalweg.bench.answers import Answerer, Here, Texts, There
from thalweg.bench.client import HttpError
from thalweg.bench.datasets import DatasetError
from thalweg.bench.in_process import configuration, folder_name, positive
from thalweg.bench.nextn_acceptance import Written, acceptance, load_nextn
from thalweg.bench.results import ResultError, provenance, write
from thalweg.bench.statistics import Share
from thalweg.bench.tasks import Item, make_items, score
from thalweg.config.args import Parser, config_parser, parse_config
from thalweg.config.options import Config
from thalweg.config.tree import given
from thalweg.core.errors import CannotServe, ThalwegError
from thalweg.llm import LLM

SHARES = ("sums", "recall", "tools")  # answered and scored right or wrong
BLIND = "recall-random"  # recall, with a random choice of context in the place of the indexer's
TASKS = ("sums", "recall", BLIND, "tools", "dialogue", "nextn")
NEXTN_ON = ("sums", "dialogue")  # greedy texts on which drafts are counted
LEAST = 1000

Row = dict[str, object]


class Evaluation:
    """Items → rows of results. `rows` grows task by task, so that what is done survives an interruption."""

    def __init__(self, texts: Texts, answerer: Answerer, items: int, seed: int) -> None:
        self.texts, self.answerer, self.items, self.seed = texts, answerer, items, seed
        self.rows: list[Row] = []
        self.written: dict[str, list[Written]] = {}

    def held_out(self, task: str) -> list[Item]:
        return make_items(task, "held_out", self.items, self.seed)

    def share(self, name: str, items: Sequence[Item], right: Callable[[Item, str], bool]) -> None:
        """One row: how many of the items are answered right."""
        begin = time.perf_counter()
        questions = [self.texts.question(item) for item in items]
        answers = self.answerer.answer(questions, name)
        hits = [right(item, answer.text) for item, answer in zip(items, answers, strict=True)]
        self.written[name] = [(question.ids, answer.ids) for question, answer in zip(questions, answers, strict=True)]
        wrong = [
            {"question": items[i].messages[-1], "answer": answers[i].text, "right": items[i].answer}
            for i, hit in enumerate(hits)
            if not hit
        ]
        seconds = time.perf_counter() - begin
        self.rows.append(
            {"task": name, **Share(sum(hits), len(hits)).as_json(), "seconds": seconds, "wrong": wrong[:20]}
        )

    def perplexity(self, here: Here) -> None:
        """One row: dialogue, by the log-probabilities of the right answers."""
        items, begin = self.held_out("dialogue"), time.perf_counter()
        sequences = [self.texts.with_target(item) for item in items]
        scored = here.llm.score([ids for ids, _ in sequences], progress=here.progress)
        nats = [
            -entry.logprob for (_, at), entries in zip(sequences, scored, strict=True) for entry in entries[at - 1 :]
        ]
        size = sum(len(item.target.encode()) for item in items)
        total = math.fsum(nats)
        row: Row = {"task": "dialogue perplexity", "total": len(items), "tokens": len(nats)}
        row |= {"perplexity": math.exp(total / len(nats)), "bits_per_byte": total / math.log(2) / size}
        self.rows.append(row | {"seconds": time.perf_counter() - begin})

    def nextn(self, here: Here, progress: Progress) -> None:
        """A row for each of NEXTN_ON: greedy acceptance at depth 1, on the engine's own greedy texts."""
        layer = load_nextn(here.llm.engine)
        for name in NEXTN_ON:
            begin = time.perf_counter()
            if name not in self.written:
                questions = [self.texts.question(item) for item in self.held_out(name)]
                answers = here.answer(questions, name)
                self.written[name] = [(q.ids, a.ids) for q, a in zip(questions, answers, strict=True)]
            written = self.written[name]
            bar = progress.add_task(f"NextN on {name}", total=len(written))

            def advance(count: int, bar: int = int(bar)) -> None:
                progress.advance(progress.task_ids[bar], count)

            share = acceptance(here.llm.engine, layer, written, advance)
            row: Row = {"task": f"NextN acceptance, {name}", "items": len(written), **share.as_json()}
            self.rows.append(row | {"seconds": time.perf_counter() - begin})


def _parser() -> Parser:
    parser = config_parser(
        "thalweg eval",
        "Accuracy on the bundled held-out tasks, and on files of the GSM8K shape.",
        only=("model", "load", "memory", "schedule"),
    )
    add = parser.add_argument_group("Evaluation").add_argument
    add(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=None,
        metavar="TASK",
        help=f"of {', '.join(TASKS)} (default: all; with --gsm8k none)",
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
        "--base-url",
        default="",
        metavar="URL",
        help="ask this server; --model is then only the folder of tokenizer and chat format",
    )
    add("--served-model-name", default="", metavar="NAME", help="the model's name on that server (default: --model)")
    add("--api-key", default="", metavar="KEY", help="for that server")
    add("--concurrency", type=positive, default=32, metavar="N", help="requests at a time to that server (default: 32)")
    add("--output-file", default="", metavar="FILE", help="write the results as JSON")
    return parser


def _chosen(args: argparse.Namespace, answerer: Answerer) -> tuple[str, ...]:
    """The tasks to run: those asked for, or all that can be. Raises CannotServe for what HTTP cannot give."""
    here = answerer if isinstance(answerer, Here) else None
    possible = SHARES if here is None else TASKS
    if args.tasks is not None:
        if missing := [task for task in args.tasks if task not in possible]:
            raise CannotServe(f"--tasks {' '.join(missing)}: needs the engine in this process; leave --base-url out")
        return tuple(args.tasks)
    if args.gsm8k:
        return ()
    lacking = {BLIND: here and not here.indexers(), "nextn": here and not here.has_nextn()}
    return tuple(task for task in possible if not lacking.get(task))


def evaluate(run: Evaluation, tasks: Sequence[str], args: argparse.Namespace, progress: Progress) -> None:
    """Fills run.rows. Raises ThalwegError, HttpError or DatasetError."""
    here = run.answerer if isinstance(run.answerer, Here) else None
    blind = RandomChoice(args.items_seed)
    mark = "" if args.indexer == "model" else ", random context"
    if here is not None and args.indexer == "random":
        here.select(blind)
    for task in tasks:
        if task in SHARES:
            run.share(task + mark, run.held_out(task), score)
        elif here is not None and task == BLIND:
            here.select(blind)
            run.share("recall, random context", run.held_out("recall"), score)
            here.select(blind if args.indexer == "random" else best)
        elif here is not None:
            run.perplexity(here) if task == "dialogue" else run.nextn(here, progress)
    if args.gsm8k:
        problems = gsm8k.read_problems(Path(args.gsm8k))[: args.items]
        shots = gsm8k.read_problems(Path(args.gsm8k_shots))[: args.shots] if args.shots else []
        run.share("gsm8k" + mark, gsm8k.items(problems, shots, args.thinking, args.max_new_tokens), gsm8k.score)


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
    """Evaluates and prints; Ctrl-C keeps the tasks that are done. Raises ThalwegError, HttpError, DatasetError or ResultError."""
    parsed = parse_config(_parser(), argv)
    args = parsed.rest
    if args.base_url and args.indexer != "model":
        raise CannotServe("--indexer random: needs the engine in this process; leave --base-url out")
    console = Console(stderr=True)
    with Progress(console=console, disable=not (console.is_terminal and args.base_url)) as progress:
        evaluation, configured = _start(parsed.config, args, progress)
        tasks = _chosen(args, evaluation.answerer)
        try:
            evaluate(evaluation, tasks, args, progress)
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
    except (ThalwegError, HttpError, DatasetError, ResultError) as error:
        print(f"thalweg eval: {error}", file=sys.stderr)
        return 1
