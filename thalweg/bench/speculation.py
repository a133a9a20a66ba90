"""`thalweg bench speculation`: speed of decoding by batch, context and drafts a step, with measured or simulated
acceptance. With random weights no draft is right; simulated, the speed is what it would be with that acceptance, and
the text means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import NamedTuple

from rich.table import Table

from thalweg.bench.command import OUTPUT, command, parse_engine_flags
from thalweg.bench.draft_shapes import ADAPTIVE, DraftShape, Row, draft_shapes, measure_engines, tree_shape
from thalweg.bench.in_process import (
    BATCHES,
    BENCH_SEED,
    Lengths,
    exactly,
    generate,
    random_batch,
    reserve,
)
from thalweg.engine.calibration import planning_clock, step_clock
from thalweg.engine.local import LocalEngine
from thalweg.launch.report import make_table
from thalweg.launch.resolved import Resolved
from thalweg.scheduler.draft_length import DraftLengthPolicy, FixedDraftLength, MeasuredDraftLength

WARM_UP_TOKENS = 8
FLAGS = f"""
{BATCHES}
--output-len  count=128      tokens to generate
--widths      int...=0 1 2 3  drafts a step, in a chain; -1: as many as the engine chooses, up to the largest of
                             the others
--trees       tree...        trees of drafts too: 4x3x16 is 4 branches, 3 drafts deep, 16 drafts in all
--repeat      count=1        runs of each; the fastest counts
{OUTPUT}
{BENCH_SEED}
"""


class DecodeCase(NamedTuple):
    """One batch."""

    batch: int  # sequences
    input: int  # tokens of each prompt
    output: int  # tokens to generate
    seed: int


def prompts_of(resolved: Resolved, case: DecodeCase) -> list[list[int]]:
    """The same in all runs of a case: after the first one, all but their last pages are cached."""
    return random_batch(resolved, case.batch, case.input, Random(1000 * case.seed))


def measure(engine: LocalEngine, prompts: Sequence[Sequence[int]], case: DecodeCase, output: int) -> Row:
    """One batch: seconds of a step in which every sequence decodes, tokens a second, accepted drafts."""
    before, requests = engine.loop.stats(), [exactly(prompt, output) for prompt in prompts]
    steps = [
        (step.end - step.begin, step.tokens)
        for step in generate(engine, requests, clock=step_clock(engine.config))
        if step.started == step.running == len(requests)
    ]
    seconds, tokens = (sum(column) for column in zip(*steps, strict=True)) if steps else (0.0, 0)
    stats = engine.loop.stats()
    drafts = stats.acceptance.since(before.acceptance)
    earlier = [*before.steps_by_num_drafts, *[0] * len(stats.steps_by_num_drafts)]
    return {
        "batch_size": case.batch,
        "input_len": case.input,
        "decode_throughput": tokens / seconds if seconds else 0.0,
        "step_latency": seconds / len(steps) if steps else 0.0,
        "steps": len(steps),
        "accept_length": drafts.mean_length or 1.0,
        "accept_rate": drafts.rate,
        "accept_rate_by_depth": drafts.rates_at,
        "drafted_tokens": drafts.drafted,
        "steps_by_num_drafts": [now - then for now, then in zip(stats.steps_by_num_drafts, earlier, strict=False)],
    }


def label(row: Row) -> str:
    """The number of drafts, "adaptive", or the shape of a tree."""
    shape, width = str(row["shape"]), row["width"]
    return shape if shape.endswith(f"x{width}") else "adaptive" if width == ADAPTIVE else str(width)


def table(rows: Sequence[Row]) -> Table:
    return make_table("speculation", {
        "drafts": label, "batch": "{batch_size}", "context": "{input_len}", "accept length": "{accept_length:.2f}",
        "ms a step": lambda row: f"{1e3 * row['step_latency']:.2f}", "tok/s": "{decode_throughput:.1f}",
    }, rows)  # fmt: skip


def policies_of(shape: DraftShape, engine: LocalEngine) -> dict[int, DraftLengthPolicy]:
    """The policy of each of the shape's widths."""
    policies: dict[int, DraftLengthPolicy] = {}
    for width in shape.widths:
        times = engine.config.speculative_step_times if width == ADAPTIVE else None
        policies[width] = (
            MeasuredDraftLength(times, planning_clock(engine.config)) if times else FixedDraftLength(max(width, 0))
        )
    return policies


def rows_of(
    shape: DraftShape, resolved: Resolved, engine: LocalEngine, cases: Sequence[DecodeCase], repeat: int
) -> Iterator[Row]:
    """Widths alternate, so that a busy machine slows all of them; the fastest run of each counts."""
    policies = policies_of(shape, engine)
    for case in cases:
        prompts = prompts_of(resolved, case)
        runs: dict[int, list[Row]] = {width: [] for width in policies}
        for turn in range(1 + repeat):
            for width, policy in policies.items():
                engine.loop.scheduler.draft_length = policy
                whole = turn or width == ADAPTIVE  # whose first run learns step times and acceptance
                run = measure(engine, prompts, case, case.output if whole else min(case.output, WARM_UP_TOKENS))
                runs[width] += [run] * bool(turn)
        for width in policies:
            best = max(runs[width], key=lambda row: float(row["decode_throughput"]))
            yield {"shape": shape.name, "width": width, **best}


def run(argv: list[str]) -> list[Row]:
    """Measures every width and tree with every batch and context; prints and writes what there is when it ends early.
    Raises ThalwegError, KeyboardInterrupt.
    """
    text = "Times decoding of random batches for each number of drafts a step."
    tables = {"Batches": FLAGS}
    args, options = parse_engine_flags(argv, "thalweg bench speculation", text, tables, int=int, tree=tree_shape)
    most = max([1, *args.widths, *(tree.nodes for tree in args.trees)])
    longest = Lengths(max(args.input_len), args.output_len)
    config = reserve(options, max(args.batch_size), longest.input, longest.output + most)
    cases = [
        DecodeCase(batch, length, args.output_len, args.bench_seed)
        for length, batch in product(args.input_len, args.batch_size)
    ]

    def measured(shape: DraftShape, resolved: Resolved, engine: LocalEngine) -> Iterator[Row]:
        longest.check(engine.context)
        return rows_of(shape, resolved, engine, cases, args.repeat)

    engines = [(shape, config) for shape in draft_shapes(args.widths, args.trees)]
    simulated = options.speculative.speculative_simulate_accept_length or 0.0
    fields = {"accept_length": simulated, "output_len": args.output_len}
    return measure_engines("speculation", argv, args.output_file, engines, measured, table, fields)


@command("thalweg bench speculation")
def main(argv: list[str]) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    return int(not run(argv))
