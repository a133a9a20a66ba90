"""`thalweg bench speculation`: speed of decoding by batch, context and drafts a step, with an acceptance that is measured or imposed.

With random weights no draft is right; imposed, the speed is what it would be if as many were. What is written then means nothing."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from thalweg.bench.forwards import DRAFT, VERIFY, Forwards
from thalweg.bench.in_process import Lengths, add_batches, configuration, positive, random_batch, room_for
from thalweg.bench.one_batch import UNKNOWN_WIDTH
from thalweg.bench.results import provenance, write
from thalweg.bench.shapes import CHAIN, Shape, add_shapes, resolved_for, shapes
from thalweg.bench.usage import status, unless
from thalweg.config.args import Parser, config_parser, parse_config
from thalweg.config.options import Config
from thalweg.core.errors import CannotServe
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolved import Resolved
from thalweg.scheduler.widths import ConstantWidth, MeasuredWidth, WidthPolicy

WARM_UP_TOKENS = 8
ADAPTIVE = -1  # a width: as many as the engine chooses

Row = dict[str, object]


class Case(NamedTuple):
    """One batch: how many sequences, tokens of each prompt and to generate, seed of the prompts."""

    batch: int
    input: int
    output: int
    seed: int


def _parser() -> Parser:
    parser = config_parser(
        "thalweg bench speculation",
        "Times decoding of batches of random tokens, for each number of drafts a step.",
        only=("model", "load", "memory", "schedule", "speculative"),
    )
    add = parser.add_argument_group("Batches").add_argument
    add_batches(add)
    add("--output-len", type=positive, default=128, metavar="N", help="tokens to generate (default: 128)")
    add_shapes(add, [0, 1, 2, 3], "; -1: as many as the engine chooses, up to the largest of the others")
    add(
        "--accept-length",
        type=float,
        default=0.0,
        metavar="X",
        help="tokens that a verification brings on average, imposed (default: what is really accepted)",
    )
    add("--repeat", type=positive, default=1, metavar="N", help="runs of each; the fastest counts (default: 1)")
    add("--overhead", action="store_true", help="run each once more, and tell what of a step is neither forward")
    add("--result-filename", default="", metavar="FILE", help="write the result; .jsonl gets one line more")
    add("--bench-seed", type=int, default=1, metavar="N", help="of the random tokens (default: 1)")
    return parser


class Written(NamedTuple):
    """Steps in which every sequence of a batch wrote: seconds, tokens, and the seconds of the two forwards where they were watched."""

    steps: int
    seconds: float
    tokens: int
    verify: float
    draft: float


def decode(engine: LocalEngine, prompts: Sequence[Sequence[int]], output: int, watch: Forwards) -> Written:
    """Computes one batch, greedy."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    waiting = {uid for prompt in prompts for uid in engine.submit(prompt, params)}
    writing, found = set(waiting), Written(0, 0.0, 0, 0.0, 0.0)
    while not engine.idle:
        verified, drafted, begun = watch.seconds[VERIFY], watch.seconds[DRAFT], watch.now()
        deltas = engine.step()
        if not waiting and len(writing) == len(prompts):  # nobody was in its prompt any more, and nobody had ended
            found = Written(
                found.steps + 1,
                found.seconds + watch.now() - begun,
                found.tokens + sum(len(one.tokens) for one in deltas),
                found.verify + watch.seconds[VERIFY] - verified,
                found.draft + watch.seconds[DRAFT] - drafted,
            )
        waiting -= {one.uid for one in deltas}
        writing -= {one.uid for one in deltas if one.finish}
    return found


def measure(engine: LocalEngine, resolved: Resolved, case: Case, output: int, turn: int) -> Row:
    """One batch: seconds of a step, tokens a second, and what became of the drafts. Each turn has prompts of its own."""
    prompts = random_batch(resolved, case.batch, case.input, Random(1000 * case.seed + turn))
    before = engine.loop.stats()
    done = decode(engine, prompts, output, Forwards(resolved.engine))
    stats = engine.loop.stats()
    drafts = stats.drafts.since(before.drafts)
    return {
        "batch_size": case.batch,
        "input_len": case.input,
        "decode_throughput": done.tokens / done.seconds if done.seconds else 0.0,
        "step_latency": done.seconds / done.steps if done.steps else 0.0,
        "steps": done.steps,
        "accept_length": drafts.length or 1.0,
        "accept_rate": drafts.rate,
        "accept_rate_by_depth": drafts.rates_at,
        "drafted_tokens": drafts.drafted,
        "wasted_drafts": stats.wasted_drafts - before.wasted_drafts,
        "steps_by_width": [
            now - (before.steps_by_width[i] if i < len(before.steps_by_width) else 0)
            for i, now in enumerate(stats.steps_by_width)
        ],
    }


def overhead(engine: LocalEngine, resolved: Resolved, case: Case) -> Row:
    """Seconds of a step in the target's forward, in the drafter's, and in neither; an upper bound of the last."""
    prompts = random_batch(resolved, case.batch, case.input, Random(case.seed + 1))
    with Forwards(resolved.engine).timed(engine) as watch:
        done = decode(engine, prompts, case.output, watch)
    if not done.steps:
        return {}
    rest = done.seconds - done.verify - done.draft
    parts = {"verify_seconds": done.verify, "draft_seconds": done.draft, "overhead_seconds": rest}
    return {name: seconds / done.steps for name, seconds in parts.items()}


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="speculation", title_justify="left")
    for head in ("drafts", "batch", "context", "ms a step", "accept length", "tok/s", "overhead µs"):
        shown.add_column(head, justify="right")
    for row in rows:
        step, length, rate = (float(str(row[name])) for name in ("step_latency", "accept_length", "decode_throughput"))
        beyond = row.get("overhead_seconds")
        over = f"{1e6 * beyond:.0f}" if isinstance(beyond, float) else ""
        cells = label(row), str(row["batch_size"]), str(row["input_len"]), f"{1e3 * step:.2f}", f"{length:.2f}"
        shown.add_row(*cells, f"{rate:.1f}", over)
    return shown


def label(row: Row) -> str:
    """What drafted: a width, the engine's choice, or a tree."""
    return str(row["shape"]) if row["shape"] != CHAIN else "adaptive" if row["width"] == ADAPTIVE else str(row["width"])


def _engine(shape: Shape, config: Config, args: argparse.Namespace) -> tuple[Resolved, LocalEngine]:
    """Raises ThalwegError."""
    resolved = resolved_for(shape, config)
    times = None if ADAPTIVE in shape.widths else ()
    engine = LocalEngine(msgspec.structs.replace(resolved.engine, times=times, imposed=args.accept_length))
    Lengths(max(args.input_len), args.output_len).within(engine.context)
    return resolved, engine


def run(argv: list[str]) -> list[Row]:
    """Measures every width and tree with every batch and context; what there is is told and written when it ends early. Raises ThalwegError or
    ResultError."""
    parsed = parse_config(_parser(), argv)
    args: argparse.Namespace = parsed.rest
    if args.accept_length and args.accept_length < 1:
        raise CannotServe(f"--accept-length: a verification brings at least 1 token, got {args.accept_length}")
    most = max([1, *args.widths, *(tree.nodes for tree in args.trees)])
    config = room_for(parsed.config, max(args.batch_size), max(args.input_len), args.output_len + most)
    rows: list[Row] = []
    told: dict[str, object] = {"partial": True}
    try:
        for shape in shapes(args.widths, args.trees):
            resolved, engine = _engine(shape, config, args)
            told |= provenance("bench speculation", argv, configuration(resolved))
            for row in _rows(shape, resolved, engine, args):
                rows.append(row)
                print(" ".join(f"{name}={value}" for name, value in row.items()), file=sys.stderr)
        told["partial"] = False
    finally:
        Console(width=shutil.get_terminal_size((UNKNOWN_WIDTH, 0)).columns).print(table(rows))
        if args.result_filename and rows:
            asked = {"accept_length": args.accept_length, "output_len": args.output_len}
            write(Path(args.result_filename), {"speculation": rows, **asked, **told})
    return rows


def _rows(shape: Shape, resolved: Resolved, engine: LocalEngine, args: argparse.Namespace) -> Iterator[Row]:
    """Widths take turns, so that a machine that is busy for a while is so for all of them; of each the fastest run counts."""
    policies: dict[int, WidthPolicy] = {}
    for width in shape.widths:
        times = engine.settings.times if width == ADAPTIVE else None
        policies[width] = MeasuredWidth(times) if times else ConstantWidth(max(width, 0))
    for length, batch in product(args.input_len, args.batch_size):
        case = Case(batch, length, args.output_len, args.bench_seed)
        runs: dict[int, list[Row]] = {width: [] for width in policies}
        for turn in range(1 + args.repeat):
            for width, policy in policies.items():
                engine.loop.scheduler.widths = policy
                run = measure(engine, resolved, case, case.output if turn else min(case.output, WARM_UP_TOKENS), turn)
                runs[width] += [run] * bool(turn)
        for width, policy in policies.items():
            engine.loop.scheduler.widths = policy
            best = max(runs[width], key=lambda row: float(str(row["decode_throughput"])))
            more = overhead(engine, resolved, case) if args.overhead else {}
            yield {"shape": shape.name, "width": width, **best, **more}


def _status(words: list[str]) -> int:
    try:
        return int(not run(words))
    except KeyboardInterrupt:
        return unless("Ctrl-C", 0)


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, 1: it could not start or nothing was measured, 2: it was asked for wrongly, 130: Ctrl-C, what was measured is told and written."""
    return status("thalweg bench speculation", _status, argv)
