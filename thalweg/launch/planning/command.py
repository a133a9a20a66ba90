"""`thalweg plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from thalweg.config.args import ENGINE, OptionsParser, options_parser, parse_options
from thalweg.config.machines import CHIPS, Hardware, hardware
from thalweg.config.options import Options, ParallelOptions
from thalweg.core.errors import CheckpointError, UnsupportedConfig

if TYPE_CHECKING:
    from thalweg.launch.planning.forecast import Forecast, PlanRequest
    from thalweg.launch.planning.layouts import ParallelLayout

Check = Callable[["Forecast", Sequence[str], argparse.Namespace, Console], int]

WIDTH = 120
CONCURRENCY = 32  # where nothing is said
CONTEXTS = (1024, 4096, 16384)
EPILOG = f"""\
examples:
  thalweg plan models/tiny                                   what would be chosen here and why, memory, lower bounds
  thalweg plan org/name --machine h200x8                     the same for eight H200s, and the best layout
  thalweg plan config.json --machine h100x8 --request-rate 4 --input-len 4000 --output-len 500 --tpot-target 30
  thalweg plan org/name --machine b200x8 --tp-size 8 --dp-size 8 --ep-size 8 --concurrency 1024
  thalweg plan org/name --machine h200x8 --nnodes 2           the same for two nodes of eight
  thalweg plan models/tiny --check                           compares the memory of an engine with the forecast

MODEL may be a config.json alone. Machines: {", ".join(CHIPS)}, each with x and a number of GPUs. A lower
bound is the least time of a step: every weight and the context read once, or every product at the data sheet's rate,
whichever takes longer. docs/plan.md has the formulas."""


def _number(kind: type, least: int) -> Callable[[str], Any]:
    """An argparse type: a number that is at least this."""

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    return read


_count, _amount = _number(int, 1), _number(float, 0)
FLAGS: dict[str, tuple[str, Callable[[str], Any], Any, str]] = {  # metavar, type, default, help
    "--machine": ("NAME", str, "", "plan for this machine, such as h200x8 (default: this one)"),
    "--input-len": ("N", _count, 0, "tokens of a prompt (default: 1024)"),
    "--output-len": ("N", _count, 0, "tokens of an answer (default: 256)"),
    "--concurrency": ("N", _count, 0, f"requests at a time on the whole machine (default: {CONCURRENCY})"),
    "--request-rate": ("X", _amount, 0.0, "requests a second, in place of --concurrency"),
    "--tpot-target": (
        "MS",
        _amount,
        0.0,
        "milliseconds that a token of an answer may take; alone: as many requests as it allows",
    ),
    "--ttft-target": ("MS", _amount, 0.0, "milliseconds that the first token of a prompt may take"),
    "--batches": ("N", _count, (1, 8, 32, 128), "requests in the tables of lower bounds (default: 1 8 32 128)"),
    "--contexts": ("N", _count, (), "context lengths of these tables (default: 1024 4096 16384)"),
    "--expert-skew": (
        "X",
        _amount,
        0.0,
        "popularity of experts: the i-th best is chosen in proportion to i to the power of -X (default: 0, uniform)",
    ),
}


def main(argv: Sequence[str], notify: Callable[[str], None], check: Check) -> int:
    """Prints the plan, or what `check` makes of it; returns the exit status. Raises UnsupportedConfig,
    CheckpointError.
    """
    parser = _parser()
    parsed = parse_options(parser, argv, needs_model=True)
    for notice in parsed.notices:
        notify(notice)
    asked = parsed.args
    console = Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH, highlight=False)
    if asked.check and asked.machine:
        raise UnsupportedConfig("--check: compares with an engine on this machine; leave --machine out")
    from thalweg.launch.planning.forecast import forecast
    from thalweg.launch.planning.show import show

    options = parsed.options
    with _folder(options.model.model) as folder:
        made = forecast(options, _request(options, asked), folder)
        longest = made.report["model_context"]
        if over := [f"{context:,}" for context in asked.contexts or () if context > longest]:
            notify(f"--contexts {', '.join(over)}: the model has {longest:,} tokens; what is longer is left out")
        if asked.check:
            return check(made, argv, asked, console)
    if asked.json:
        print(json.dumps(made.report, indent=2))
    else:
        show(made.report, console)
    return 0


@contextmanager
def _folder(model: str) -> Iterator[str]:
    """The model, or a folder with its config.json where it is such a file alone."""
    path = Path(model).expanduser()
    if path.suffix != ".json" or not path.is_file():
        yield model
        return
    with TemporaryDirectory(prefix="thalweg-plan-") as folder:
        copy = Path(folder, "config.json")
        shutil.copyfile(path, copy)
        try:
            yield folder
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(copy), str(path))) from error


def _parser() -> OptionsParser:
    parser = options_parser(
        "thalweg plan",
        "What would be chosen for a model and why, what it takes of memory, and what a machine could do with it at"
        " best. Loads no weights.",
        EPILOG,
        ENGINE,
    )
    group = parser.own
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--check", action="store_true", help="start an engine here and compare its memory with the forecast"
    )
    for flag, (metavar, kind, default, text) in FLAGS.items():
        many: dict[str, Any] = {"nargs": "+"} if isinstance(default, tuple) else {}
        group.add_argument(flag, metavar=metavar, type=kind, default=default, help=text, **many)
    return parser


def _request(options: Options, asked: argparse.Namespace) -> PlanRequest:
    """The plan that the flags request. Raises UnsupportedConfig for a load or a layout that cannot be."""
    from thalweg.launch.planning.forecast import PlanRequest
    from thalweg.launch.planning.search import Workload

    if asked.concurrency and asked.request_rate:
        raise UnsupportedConfig(
            "--concurrency and --request-rate: one of them says how much there is to do; leave the other out"
        )
    is_open = asked.request_rate or asked.tpot_target
    load = Workload(
        asked.input_len,
        asked.output_len,
        asked.concurrency or (0 if is_open else CONCURRENCY),
        asked.request_rate,
        asked.tpot_target / 1e3,
        asked.ttft_target / 1e3,
        asked.expert_skew,
    )
    machine = hardware(asked.machine, options.parallel.nnodes) if asked.machine else None
    layout = None if machine is None else _layout(options, machine)
    return PlanRequest(load, machine, layout, asked.batches, asked.contexts or CONTEXTS)


def _layout(options: Options, machine: Hardware) -> ParallelLayout | None:
    """The layout that the flags name, in as many copies as --dp-size says, or else as the machine has room for; None
    where they name none.
    """
    default = ParallelOptions()
    of_nodes = {name: getattr(default, name) for name in ("nnodes", "node_rank", "dist_init_addr", "launcher")}
    wish = dataclasses.replace(options.parallel, **of_nodes)
    if wish == default:
        return None
    # this loads torch, which --help need not
    from thalweg.launch.planning.layouts import ParallelLayout, why_not_on_nodes

    attention_dp = wish.dp_size if wish.enable_dp_attention else 1
    one = ParallelLayout(
        wish.tp_size,
        attention_dp,
        wish.ep_size,
        wish.pp_size,
        cp=wish.attn_cp_size,
        dcp=wish.dcp_size,
        shard_indexer=wish.shard_indexer,
    )
    if one.tp % one.dp:
        raise UnsupportedConfig(f"--dp-size {one.dp} does not divide --tp-size {one.tp}; use a divisor, or more GPUs")
    if one.tp % (one.dp * one.cp):
        raise UnsupportedConfig(
            f"--attn-cp-size {one.cp} does not divide the GPUs of an attention; use a divisor of {one.tp // one.dp}"
        )
    if machine.gpus % one.gpus:
        raise UnsupportedConfig(
            f"--tp-size {one.tp}, --pp-size {one.pp}: {one.gpus} GPUs a copy, of which {machine.name} has no whole"
            f" number; use a divisor of {machine.gpus}"
        )
    room, asked = machine.gpus // one.gpus, 1 if wish.enable_dp_attention else wish.dp_size
    if machine.gpus > machine.gpus_of_node and (reason := why_not_on_nodes(one, machine.gpus_of_node)):
        raise UnsupportedConfig(f"--tp-size {one.tp}, --pp-size {one.pp}: {reason}")
    if asked > room:
        raise UnsupportedConfig(f"--dp-size {asked}: {machine.name} has room for {room} copies of {one.gpus} GPUs")
    return replace(one, copies=asked if asked > 1 else room)
