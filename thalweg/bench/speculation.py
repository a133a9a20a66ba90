"""`thalweg bench speculation`: speed of decoding by batch, context and drafts a step, with an acceptance that is
measured or imposed.

With random weights no draft is right; imposed, the speed is what it would be if as many were. What is written then
means nothing.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from thalweg.bench.forwards import parts
from thalweg.bench.in_process import Lengths, add_batches, configuration, positive, random_batch, room_for
from thalweg.bench.one_batch import UNKNOWN_WIDTH
from thalweg.bench.results import provenance, write
from thalweg.bench.shapes import Shape, add_shapes, resolved_for, shapes
from thalweg.bench.usage import status, unless
from thalweg.config.args import OptionsParser, options_parser, parse_options
from thalweg.config.options import Options
from thalweg.core.sampling import SamplingParams
from thalweg.engine.calibration import planning_clock, step_clock
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolved import Resolved
from thalweg.scheduler.draft_length import DraftLengthPolicy, FixedDraftLength, MeasuredDraftLength

WARM_UP_TOKENS = 8
SETTLED = 2  # steps behind the last prompt, in which drafts are made
ADAPTIVE = -1  # a width: as many as the engine chooses

Row = dict[str, object]


class Case(NamedTuple):
    """One batch: how many sequences, tokens of each prompt and to generate, seed of the prompts."""

    batch: int
    input: int
    output: int
    seed: int


def _parser() -> OptionsParser:
    parser = options_parser(
        "thalweg bench speculation",
        "Times decoding of batches of random tokens, for each number of drafts a step.",
        only=("model", "load", "memory", "schedule", "speculative"),
    )
    add = parser.add_argument_group("Batches").add_argument
    add_batches(add)
    add("--output-len", type=positive, default=128, metavar="N", help="tokens to generate (default: 128)")
    add_shapes(add, [0, 1, 2, 3], "; -1: as many as the engine chooses, up to the largest of the others")
    add("--repeat", type=positive, default=1, metavar="N", help="runs of each; the fastest counts (default: 1)")
    add("--overhead", action="store_true", help="run each once more, and tell what of a step is neither forward")
    add("--result-filename", default="", metavar="FILE", help="write the result; .jsonl gets one line more")
    add("--bench-seed", type=int, default=1, metavar="N", help="of the random tokens (default: 1)")
    return parser


class Written(NamedTuple):
    """Steps in which every sequence of a batch wrote: how many, their seconds, and their tokens."""

    steps: int
    seconds: float
    tokens: int


def decode(engine: LocalEngine, prompts: Sequence[Sequence[int]], output: int) -> Written:
    """Computes one batch, greedy. Steps overlap as they do in a server: a step's time is that between two that have
    ended.
    """
    params, now = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True), step_clock(engine.config)
    waiting = {uid for prompt in prompts for uid in engine.submit(prompt, params)}
    writing, found = set(waiting), Written(0, 0.0, 0)
    while not engine.idle:
        begun = now()
        deltas = engine.step()
        if not waiting and len(writing) == len(prompts):  # nobody was in its prompt any more, and nobody had ended
            tokens = found.tokens + sum(len(one.tokens) for one in deltas)
            found = Written(found.steps + 1, found.seconds + now() - begun, tokens)
        waiting -= {one.uid for one in deltas}
        writing -= {one.uid for one in deltas if one.finish}
    return found


def prompts_of(resolved: Resolved, case: Case) -> list[list[int]]:
    """Of one batch, all whose runs have the same: behind the first run all but their last pages are cached."""
    return random_batch(resolved, case.batch, case.input, Random(1000 * case.seed))


def measure(engine: LocalEngine, prompts: Sequence[Sequence[int]], case: Case, output: int) -> Row:
    """One batch: seconds of a step, tokens a second, and what became of the drafts."""
    before = engine.loop.stats()
    done = decode(engine, prompts, output)
    stats = engine.loop.stats()
    drafts = stats.acceptance.since(before.acceptance)
    return {
        "batch_size": case.batch,
        "input_len": case.input,
        "decode_throughput": done.tokens / done.seconds if done.seconds else 0.0,
        "step_latency": done.seconds / done.steps if done.steps else 0.0,
        "steps": done.steps,
        "accept_length": drafts.mean_length or 1.0,
        "accept_rate": drafts.rate,
        "accept_rate_by_depth": drafts.rates_at,
        "drafted_tokens": drafts.drafted,
        "wasted_drafts": stats.wasted_drafts - before.wasted_drafts,
        "steps_by_width": [
            now - (before.steps_by_width[i] if i < len(before.steps_by_width) else 0)
            for i, now in enumerate(stats.steps_by_width)
        ],
    }


def overhead(engine: LocalEngine, prompts: Sequence[Sequence[int]], case: Case, width: int, step: float) -> Row:
    """Seconds of a step in the target's forward, in the drafter's, in what it learns, and in none of them. step:
    seconds of a whole one.
    """
    params = SamplingParams(temperature=0.0, max_tokens=engine.context - case.input, ignore_eos=True)
    waiting = {uid for prompt in prompts for uid in engine.submit(prompt, params)}
    uids, further = tuple(waiting), SETTLED
    while further and not engine.idle:
        waiting -= {one.uid for one in engine.step()}
        further -= not waiting
    engine.loop.retire(0)
    if not engine.loop.scheduler.live:  # the context has no room for more
        return {}
    found = parts(engine, width)
    engine.abort(uids)
    while not engine.idle:
        engine.step()
    told: Row = {f"{name}_seconds": seconds for name, seconds in found._asdict().items()}
    return told | {"overhead_seconds": step - sum(found)}


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
    """What drafted: a width, the engine's choice, or a whole tree."""
    shape, width = str(row["shape"]), row["width"]
    return shape if shape.endswith(f"x{width}") else "adaptive" if width == ADAPTIVE else str(width)


def started(shape: Shape, config: Options, longest: Lengths) -> tuple[Resolved, LocalEngine]:
    """An engine that drafts this shape. Raises ThalwegError."""
    resolved = resolved_for(shape, config)
    adaptive = ADAPTIVE in shape.widths
    engine = LocalEngine(msgspec.structs.replace(resolved.engine, speculative_adaptive=adaptive))
    longest.within(engine.context)
    return resolved, engine


def policies_of(shape: Shape, engine: LocalEngine) -> dict[int, DraftLengthPolicy]:
    """What names each of the shape's widths."""
    found: dict[int, DraftLengthPolicy] = {}
    for width in shape.widths:
        times = engine.config.speculative_step_times if width == ADAPTIVE else None
        found[width] = (
            MeasuredDraftLength(times, planning_clock(engine.config)) if times else FixedDraftLength(max(width, 0))
        )
    return found


def rows_of(shape: Shape, resolved: Resolved, engine: LocalEngine, cases: Sequence[Case], repeat: int) -> Iterator[Row]:
    """Widths take turns, so that a machine that is busy for a while is so for all of them; of each the fastest run
    counts.
    """
    policies = policies_of(shape, engine)
    for case in cases:
        prompts = prompts_of(resolved, case)
        runs: dict[int, list[Row]] = {width: [] for width in policies}
        for turn in range(1 + repeat):
            for width, policy in policies.items():
                engine.loop.scheduler.draft_length = policy
                whole = turn or width == ADAPTIVE  # which learns meanwhile what steps take and what is accepted
                run = measure(engine, prompts, case, case.output if whole else min(case.output, WARM_UP_TOKENS))
                runs[width] += [run] * bool(turn)
        for width in policies:
            best = max(runs[width], key=lambda row: float(str(row["decode_throughput"])))
            yield {"shape": shape.name, "width": width, **best}


def add_overhead(
    shape: Shape, resolved: Resolved, engine: LocalEngine, cases: Sequence[Case], rows: Sequence[Row]
) -> None:
    """Where a step's time goes, into the rows of these cases whose width is a number."""
    policies = policies_of(shape, engine)
    for case in cases:
        prompts = prompts_of(resolved, case)
        for row in rows:
            width, step = row["width"], row["step_latency"]
            here = (row["shape"], row["batch_size"], row["input_len"]) == (shape.name, case.batch, case.input)
            if here and isinstance(width, int) and isinstance(step, float) and step and width != ADAPTIVE:
                engine.loop.scheduler.draft_length = policies[width]
                row.update(overhead(engine, prompts, case, width, step))


def free() -> None:
    """Gives back what an engine has held that is no more: the next one's weights may not fit beside it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(argv: list[str]) -> list[Row]:
    """Measures every width and tree with every batch and context; what there is is told and written when it ends early.
    Raises ThalwegError or ResultError.
    """
    parsed = parse_options(_parser(), argv)
    args = argparse.Namespace(argv=argv, **vars(parsed.args))
    most = max([1, *args.widths, *(tree.nodes for tree in args.trees)])
    config = room_for(parsed.options, max(args.batch_size), max(args.input_len), args.output_len + most)
    rows: list[Row] = []
    told: dict[str, object] = {"partial": True}
    try:
        for shape in shapes(args.widths, args.trees):
            for row in _measured(shape, config, args, told):
                rows.append(row)
                print(" ".join(f"{name}={value}" for name, value in row.items()), file=sys.stderr)
            free()
        told["partial"] = False
    finally:
        Console(width=shutil.get_terminal_size((UNKNOWN_WIDTH, 0)).columns).print(table(rows))
        if args.result_filename and rows:
            imposed = config.speculative.speculative_simulate_accept_length or 0.0
            asked = {"accept_length": imposed, "output_len": args.output_len}
            write(Path(args.result_filename), {"speculation": rows, **asked, **told})
    return rows


def _measured(shape: Shape, config: Options, args: argparse.Namespace, told: dict[str, object]) -> Iterator[Row]:
    """The shape's rows, each as it is measured. told: gets what is told of its engine. Raises ThalwegError."""
    longest = Lengths(max(args.input_len), args.output_len)
    resolved, engine = started(shape, config, longest)
    told |= provenance("bench speculation", args.argv, configuration(resolved))
    lengths, rows = product(args.input_len, args.batch_size), list[Row]()
    cases = [Case(batch, length, args.output_len, args.bench_seed) for length, batch in lengths]
    for row in rows_of(shape, resolved, engine, cases, args.repeat):
        rows.append(row)
        yield row
    if args.overhead:
        add_overhead(shape, resolved, engine, cases, rows)


def _status(words: list[str]) -> int:
    try:
        return int(not run(words))
    except KeyboardInterrupt:
        return unless("Ctrl-C", 0)


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, 1: it could not start or nothing was measured, 2: it was asked for wrongly, 130: Ctrl-C, what was
    measured is told and written.
    """
    return status("thalweg bench speculation", _status, argv)
