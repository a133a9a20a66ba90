"""`thalweg bench acceptance`: accepted drafts by task, rule and depth, and a check that every token is plain
decoding's. Under rules other than the lossless `gumbel-max`, only greedy answers are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from thalweg.bench.answering import EvalPrompt, PromptFormat
from thalweg.bench.command import OUTPUT, command, parse_engine_flags
from thalweg.bench.draft_shapes import CHAIN, DraftShape, Row, draft_shapes, measure_engines, tree_shape
from thalweg.bench.in_process import Generation, run_all
from thalweg.bench.statistics import common_length
from thalweg.bench.tasks import MAKERS, make_items
from thalweg.config.speculative import RULES
from thalweg.config.tree import replace
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.report import make_table
from thalweg.launch.resolved import Resolved
from thalweg.scheduler.draft_length import FixedDraftLength

TASKS = (*MAKERS, "dialogue")
GUMBEL_MAX, RELAXED = "gumbel-max", "relaxed"
FLAGS = f"""
--tasks        task...={" ".join(TASKS)}  held-out items of these
--items        count=110    of each task
--widths       int...=1 2 3  drafts a step, in a chain
--trees        tree...      trees of drafts too: 4x3x16 is 4 branches, 3 drafts deep, 16 drafts in all
--rules        rule...=gumbel-max  that accept drafts
--temperature  number...=0  0 is greedy
--top-p        number...=1  of sampled answers
{OUTPUT}
"""
COLUMNS = {
    "task": "{task}", "rule": "{rule}", "temperature": "{temperature}", "top-p": "{top_p}",
    "drafts": lambda row: str(row["width"] if row["shape"] == CHAIN else row["shape"]), "tokens": "{tokens}",
    "accept length": "{accept_length:.2f}",
    "by depth": lambda row: " ".join(f"{rate:.3f}" for rate in row["accept_rate_by_depth"]),
    "as plain": "{same_tokens} of {tokens}",
}  # fmt: skip

Answers = list[list[int]]


class SamplingChoice(NamedTuple):
    """Sampling parameters of the answers."""

    temperature: float
    top_p: float


def answers(engine: LocalEngine, prompts: Sequence[EvalPrompt], choice: SamplingChoice) -> Answers:
    """The answers, end tokens included; the i-th one is sampled with the seed i."""
    requests = [
        Generation(prompt.ids, SamplingParams(**choice._asdict(), max_tokens=prompt.limit, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]
    run_all(engine, requests)
    return [request.tokens for request in requests]


def same(got: Answers, want: Answers) -> tuple[int, int]:
    """Tokens that agree, up to the first wrong one of each answer; and wrong answers."""
    pairs = list(zip(got, want, strict=True))
    return sum(common_length(*pair) for pair in pairs), sum(one != other for one, other in pairs)


def count(engine: LocalEngine, prompts: Sequence[EvalPrompt], choice: SamplingChoice, plain: Answers | None) -> Row:
    """Accepted drafts of these answers. plain: what the answers must be."""
    before = engine.loop.stats().acceptance
    got = answers(engine, prompts, choice)
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


def run(argv: list[str]) -> list[Row]:
    """Prints and writes what there is when it ends early. Raises ThalwegError, KeyboardInterrupt."""
    text = "Counts accepted drafts by task and depth, and compares the answers with plain decoding's."
    kinds: dict[str, Any] = {"task": TASKS, "rule": tuple(RULES), "int": int, "tree": tree_shape}
    args, options = parse_engine_flags(argv, "thalweg bench acceptance", text, {"Questions": FLAGS}, **kinds)
    plain: dict[tuple[str, SamplingChoice], Answers] = {}  # answers without drafts

    def rows_of(shape: DraftShape, resolved: Resolved, engine: LocalEngine) -> Iterator[Row]:
        texts, rule = PromptFormat(Path(resolved.path)), resolved.engine.speculative_acceptance
        for task, temperature, top_p in product(args.tasks, args.temperature, args.top_p):
            prompts = [texts.prompt(item) for item in make_items(task, "held_out", args.items)]
            choice, want = SamplingChoice(temperature, top_p), None
            if rule == GUMBEL_MAX or (rule != RELAXED and temperature == 0):
                if (task, choice) not in plain:
                    engine.loop.scheduler.draft_length = FixedDraftLength(0)
                    plain[task, choice] = answers(engine, prompts, choice)
                want = plain[task, choice]
            for width in shape.widths:
                engine.loop.scheduler.draft_length = FixedDraftLength(width)
                row = count(engine, prompts, choice, want)
                yield {"task": task, "rule": rule, **choice._asdict(), "shape": shape.name, "width": width, **row}

    engines = [
        (shape, replace(options, speculative_acceptance=rule))
        for rule in args.rules
        for shape in draft_shapes(args.widths, args.trees if rule == GUMBEL_MAX else [])  # only it accepts trees
    ]
    fields = {"items": args.items}
    return measure_engines("acceptance", argv, args.output_file, engines, rows_of, table, fields)


def table(rows: Sequence[Row]) -> Table:
    return make_table("acceptance", COLUMNS, rows, left=2)


@command("thalweg bench acceptance")
def main(argv: list[str]) -> int:
    """0: done, and all checked answers are plain decoding's; 1: some differ, or an error; 2: wrong flags; 130: Ctrl-C.
    Results are printed and written.
    """
    rows = run(argv)
    if wrong := sum(bool(row.get("wrong_answers")) for row in rows):
        print(f"thalweg bench acceptance: {wrong} of {len(rows)} rows differ from plain decoding", file=sys.stderr)
    return int(bool(wrong) or not rows)
