"""The command line of `thalweg ablate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from thalweg.bench.ablate_cells import MODES, ONE
from thalweg.bench.ablate_columns import SHORT
from thalweg.bench.ablate_load import Workload
from thalweg.bench.eval_run import SHARES, TASKS, Asked
from thalweg.bench.in_process import positive
from thalweg.config.args import OptionsParser, options_parser
from thalweg.config.options import Options
from thalweg.core.errors import UnsupportedConfig

EPILOG = """\
examples:
  thalweg ablate models/tiny
  thalweg ablate models/tiny --mode ladder --columns radix overlap graph kv
  thalweg ablate FOLDER --load-format dummy --mode matrix --columns graph overlap radix mla --output-file ablation.json
  thalweg ablate models/tiny --columns dtype=float32,bfloat16 --tasks sums recall --items 200

The same command again goes on where it was ended."""


def make_parser() -> OptionsParser:
    parser = options_parser(
        "thalweg ablate",
        "Turns features off and on: speed and accuracy of each combination, or why it cannot run. The flags of the"
        " engine are the base.",
        EPILOG,
        only=("model", "load", "memory", "schedule", "sampling", "speculative", "parallel"),
    )
    _add_cells(parser.add_argument_group("Cells"))
    _add_load(parser.add_argument_group("Load"))
    _add_accuracy(parser.add_argument_group("Accuracy"))
    add = parser.add_argument_group("Results").add_argument
    add(
        "--output-file",
        default="ablation.json",
        metavar="FILE",
        help="JSON; beside it .md and .svg (default: %(default)s)",
    )
    add("--anew", action="store_true", help="measure again what the output file has already")
    add(
        "--any-commit",
        action="store_true",
        help="take from it what another commit has measured, too; each cell says which",
    )
    return parser


def _add_cells(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--mode", choices=MODES, default=ONE, help="the base and each column changed alone, everything off and then one on after the "
        "other, or every combination (default: %(default)s)")  # fmt: skip
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="NAME[=VALUE,VALUE]",
        help=(
            f"settings to turn off and on, or to give these values; short names: {', '.join(SHORT)} (default: every"
            " feature)"
        ),
    )
    add(
        "--rounds", type=positive, default=1, metavar="N",
        help="runs of each cell, in processes of their own and in turn: what tells the noise; 5 make fair intervals (default: 1)",
    )  # fmt: skip
    add("--list", action="store_true", help="print the cells, and which cannot run and why; measure nothing")
    add("--cell-timeout", type=positive, default=900, metavar="S", help="seconds that a cell may take (default: 900)")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add, usual = group.add_argument, Workload()
    add(
        "--input-len",
        type=positive,
        default=usual.input_len,
        metavar="N",
        help="mean tokens of a prompt (default: %(default)s)",
    )
    add(
        "--output-len",
        type=positive,
        default=usual.output_len,
        metavar="N",
        help="mean tokens to write (default: %(default)s)",
    )
    add(
        "--spread",
        type=float,
        default=usual.spread,
        metavar="X",
        help="lengths lie within ± this share of the mean (default: %(default)s)",
    )
    add(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="first tokens that all prompts have in common (default: 0)",
    )
    add(
        "--concurrency", type=positive, nargs="+", default=list(usual.concurrency), metavar="N",
        help="requests at a time, a run for each (default: 8 32)",
    )  # fmt: skip
    add(
        "--waves",
        type=positive,
        default=usual.waves,
        metavar="N",
        help="requests of a run, times the concurrency (default: %(default)s)",
    )
    add("--repeat", type=positive, default=1, metavar="N", help="runs, of which the fastest counts (default: 1)")
    add("--bench-seed", type=int, default=usual.seed, metavar="N", help="of lengths and tokens (default: %(default)s)")


def _add_accuracy(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tasks", nargs="+", choices=(*TASKS, "none"), default=None, metavar="TASK",
        help=f"bundled tasks: {', '.join(TASKS)}, or none (default: {' '.join(SHARES)}; none with random weights)",
    )  # fmt: skip
    add("--items", type=positive, default=100, metavar="N", help="held-out items a task (default: 100)")
    add("--gsm8k", default="", metavar="FILE", help="JSON lines with question and answer (#### number)")
    add("--choices", default="", metavar="FILE", help="multiple choice by log-probabilities: see docs/benchmarks.md")


def workload(args: argparse.Namespace) -> Workload:
    """Raises UnsupportedConfig for a load that cannot be."""
    if not 0 <= args.spread < 1:
        raise UnsupportedConfig(f"--spread: must be at least 0 and less than 1, got {args.spread:g}")
    if not 0 <= args.shared_prefix < args.input_len * (1 - args.spread):
        raise UnsupportedConfig(
            f"--shared-prefix: {args.shared_prefix} must be shorter than the shortest prompt, "
            f"{int(args.input_len * (1 - args.spread))} tokens by --input-len and --spread"
        )
    return Workload(
        input_len=args.input_len,
        output_len=args.output_len,
        spread=args.spread,
        shared_prefix=args.shared_prefix,
        concurrency=tuple(args.concurrency),
        waves=args.waves,
        repeat=args.repeat,
        seed=args.bench_seed,
    )


def accuracy(args: argparse.Namespace, config: Options) -> Asked:
    """Raises UnsupportedConfig where random weights are asked."""
    dummy = config.load.load_format == "dummy"
    asked = Asked(
        tasks=_tasks(args.tasks, dummy), items=args.items, gsm8k=args.gsm8k, choices=args.choices, thinking=False
    )
    if dummy and asked.asks:
        raise UnsupportedConfig(
            "--load-format dummy: random weights know no answers; leave --tasks, --gsm8k and --choices out"
        )
    return asked


def _tasks(named: Sequence[str] | None, dummy: bool) -> tuple[str, ...]:
    if named is None:
        return () if dummy else SHARES
    return tuple(task for task in named if task != "none")
