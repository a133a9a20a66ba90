"""`thalweg bench acceptance`: how many drafts are accepted, by task, rule and place behind the known tokens; and
whether what is written is what plain decoding writes, token for token, which under every rule but the race is asked of
greedy answers only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from thalweg.bench.answers import Question, Texts
from thalweg.bench.in_process import configuration, positive
from thalweg.bench.one_batch import UNKNOWN_WIDTH
from thalweg.bench.results import provenance, write
from thalweg.bench.shapes import CHAIN, Shape, add_shapes, resolved_for, shapes
from thalweg.bench.tasks import MAKERS, make_items
from thalweg.bench.usage import status, unless
from thalweg.config.args import OptionsParser, options_parser, parse_options
from thalweg.config.options import Options
from thalweg.config.speculative import RULES
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolved import Resolved
from thalweg.scheduler.draft_length import FixedDraftLength

TASKS = (*MAKERS, "dialogue")
RACE, RELAXED = "race", "relaxed"

Row = dict[str, object]
Texted = Mapping[str, Sequence[Question]]
Written = list[list[int]]


class Sampled(NamedTuple):
    """How answers are drawn; temperature 0 is greedy."""

    temperature: float
    top_p: float


def _parser() -> OptionsParser:
    parser = options_parser(
        "thalweg bench acceptance",
        "Counts accepted drafts by task and depth, and compares what is written with plain decoding's.",
        only=("model", "load", "memory", "schedule", "speculative"),
    )
    add = parser.add_argument_group("What is asked").add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="held-out items of these (default: all)")
    add("--items", type=positive, default=110, metavar="N", help="of each task (default: 110)")
    add_shapes(add, [1, 2, 3])
    add("--rules", nargs="+", choices=RULES, default=[RACE], help="which drafts are accepted (default: race)")
    add("--temperature", type=float, nargs="+", default=[0.0], metavar="X", help="0 is greedy (default: 0)")
    add("--top-p", type=float, nargs="+", default=[1.0], metavar="X", help="of sampled answers (default: 1)")
    add("--result-filename", default="", metavar="FILE", help="write the result; .jsonl gets one line more")
    return parser


def written(engine: LocalEngine, questions: Sequence[Question], how: Sampled) -> Written:
    """The answers, end tokens included; the i-th of a sampled list with the seed i."""
    answers: dict[int, list[int]] = {}
    for i, one in enumerate(questions):
        params = SamplingParams(temperature=how.temperature, top_p=how.top_p, max_tokens=one.limit, seed=i)
        answers |= {uid: [] for uid in engine.submit(one.ids, params)}
    while not engine.idle:
        for delta in engine.step():
            answers[delta.uid] += delta.tokens
    return list(answers.values())


def same(got: Written, want: Written) -> tuple[int, int]:
    """Tokens that are as they should be, up to the first of each answer that is not; and answers that are not."""
    tokens = wrong = 0
    for one, other in zip(got, want, strict=True):
        agree = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        tokens, wrong = tokens + agree, wrong + (one != other)
    return tokens, wrong


def count(engine: LocalEngine, questions: Sequence[Question], how: Sampled, plain: Written | None) -> Row:
    """What became of the drafts of these answers. plain: what they must be."""
    before = engine.loop.stats().acceptance
    got = written(engine, questions, how)
    drafts = engine.loop.stats().acceptance.since(before)
    row: Row = {
        "answers": len(got),
        "tokens": sum(map(len, got)),
        "verifications": drafts.verifications,
        "accept_length": drafts.mean_length,
        "accept_rate": drafts.rate,
        "accept_rate_by_depth": drafts.rates_at,
        "drafted_by_depth": drafts.drafted_at,
        "accepted_by_depth": drafts.accepted_at,
    }
    if plain is not None:
        row["same_tokens"], row["wrong_answers"] = same(got, plain)
    return row


def _engines(args: argparse.Namespace, config: Options) -> Iterator[tuple[str, Shape, Resolved, LocalEngine]]:
    """One for each rule and shape; trees are accepted by the race. Raises ThalwegError."""
    for rule in args.rules:
        for shape in shapes(args.widths, args.trees if rule == RACE else []):
            resolved = resolved_for(shape, config, speculative_acceptance=rule)
            yield (
                rule,
                shape,
                resolved,
                LocalEngine(msgspec.structs.replace(resolved.engine, speculative_adaptive=False)),
            )


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="acceptance", title_justify="left")
    for head in ("task", "rule", "temperature", "top-p", "drafts", "tokens", "accept length", "by depth", "as plain"):
        shown.add_column(head, justify="right")
    for row in rows:
        depths = row["accept_rate_by_depth"]
        assert isinstance(depths, tuple)
        agree = f"{row['same_tokens']} of {row['tokens']}" if "same_tokens" in row else ""
        drafts = row["width"] if row["shape"] == CHAIN else row["shape"]
        names = (
            str(one) for one in (row["task"], row["rule"], row["temperature"], row["top_p"], drafts, row["tokens"])
        )
        length = row["accept_length"]
        shown.add_row(
            *names,
            f"{length:.2f}" if isinstance(length, float) else "",
            " ".join(f"{rate:.3f}" for rate in depths),
            agree,
        )
    return shown


def _rows(
    engine: LocalEngine, asked: Texted, args: argparse.Namespace, rule: str, shape: Shape, plain: dict[tuple[str, Sampled], Written]
) -> Iterator[Row]:  # fmt: skip
    """plain: what has been written without drafts; gets what is missing."""
    for task, *drawn in product(args.tasks, args.temperature, args.top_p):
        how = Sampled(*drawn)
        kept = rule == RACE or (rule != RELAXED and how.temperature == 0)
        if kept and (task, how) not in plain:
            engine.loop.scheduler.draft_length = FixedDraftLength(0)
            plain[task, how] = written(engine, asked[task], how)
        for width in shape.widths:
            engine.loop.scheduler.draft_length = FixedDraftLength(width)
            found = count(engine, asked[task], how, plain[task, how] if kept else None)
            yield {"task": task, "rule": rule, **how._asdict(), "shape": shape.name, "width": width, **found}


def run(argv: list[str]) -> list[Row]:
    """What there is is told and written when it ends early. Raises ThalwegError or ResultError."""
    parsed = parse_options(_parser(), argv)
    args: argparse.Namespace = parsed.args
    rows: list[Row] = []
    told: dict[str, object] = {"partial": True}
    plain: dict[tuple[str, Sampled], Written] = {}
    try:
        for rule, shape, resolved, engine in _engines(args, parsed.options):
            told |= provenance("bench acceptance", argv, configuration(resolved))
            texts = Texts(Path(resolved.path))
            asked: Texted = {
                task: [texts.question(one) for one in make_items(task, "held_out", args.items)] for task in args.tasks
            }
            for row in _rows(engine, asked, args, rule, shape, plain):
                rows.append(row)
                print(" ".join(f"{name}={value}" for name, value in row.items()), file=sys.stderr)
        told["partial"] = False
    finally:
        Console(width=shutil.get_terminal_size((UNKNOWN_WIDTH, 0)).columns).print(table(rows))
        if args.result_filename and rows:
            write(Path(args.result_filename), {"acceptance": rows, "items": args.items, **told})
    return rows


def _status(words: list[str]) -> int:
    try:
        rows = run(words)
    except KeyboardInterrupt:
        return unless("Ctrl-C", 0)
    wrong = sum(bool(row.get("wrong_answers")) for row in rows)
    if wrong:
        told = f"{wrong} of {len(rows)} rows are not what plain decoding writes"
        print(f"thalweg bench acceptance: {told}", file=sys.stderr)
    return int(bool(wrong) or not rows)


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, and what had to be plain decoding's was; 1: it was not, or nothing was measured; 2: it was asked for
    wrongly; 130: Ctrl-C, what was measured is written.
    """
    return status("thalweg bench acceptance", _status, argv)
