"""`thalweg plan`."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from thalweg.config.args import OptionsParser, options_parser, parse_options
from thalweg.config.machines import CHIPS, Hardware, hardware
from thalweg.config.options import Options
from thalweg.config.tree import replace
from thalweg.core.errors import CheckpointError, UnsupportedConfig

if TYPE_CHECKING:
    from thalweg.launch.planning.forecast import Forecast, PlanRequest
    from thalweg.launch.planning.layouts import ParallelLayout

Check = Callable[["Forecast", Sequence[str], argparse.Namespace, Console], int]

WIDTH = 120
SECTIONS = ("model", "load", "memory", "schedule", "speculative", "sampling", "parallel")
CONCURRENCY = 32  # where nothing is said
CONTEXTS = (1024, 4096, 16384)
EPILOG = f"""\
examples:
  thalweg plan models/tiny                                   what would be chosen here and why, memory, floors
  thalweg plan org/name --machine h200x8                     the same for eight H200s, and the best layout
  thalweg plan config.json --machine h100x8 --request-rate 4 --input-len 4000 --output-len 500 --tpot-target 30
  thalweg plan org/name --machine b200x8 --tp-size 8 --dp-size 8 --ep-size 8 --concurrency 1024
  thalweg plan models/tiny --check                           compares the memory of an engine with the forecast

MODEL may be a config.json alone. Machines: {", ".join(CHIPS)}, each with x and a number of GPUs. A floor is what no
program can be faster than: every weight and the context read once, or every product at the data sheet's rate, whichever
takes longer. docs/plan.md has the formulas."""


def main(argv: Sequence[str], notify: Callable[[str], None], check: Check) -> int:
    """Prints the plan, or what `check` makes of it; returns the exit status. Raises UnsupportedConfig,
    CheckpointError.
    """
    parser = _parser()
    parsed = parse_options(parser, argv)
    for notice in parsed.notices:
        notify(notice)
    asked = parsed.args
    console = Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH, highlight=False)
    if asked.check and asked.machine:
        raise UnsupportedConfig("--check: compares with an engine on this machine; leave --machine out")
    from thalweg.launch.planning.forecast import forecast
    from thalweg.launch.planning.show import as_json, show

    with _in_a_folder(parsed.options) as config:
        made = forecast(config, wanted(config, asked))
        if over := [f"{one:,}" for one in asked.contexts or () if one > made.facts.context]:
            notify(
                f"--contexts {', '.join(over)}: the model has {made.facts.context:,} tokens; what is longer is left out"
            )
        if asked.check:
            return check(made, argv, asked, console)
    if asked.json:
        print(json.dumps(as_json(made, parsed.options), indent=2))
    else:
        show(made, parsed.options, console)
    return 0


@contextmanager
def _in_a_folder(config: Options) -> Iterator[Options]:
    """The same with a model that is a folder where it was a config.json alone. Raises UnsupportedConfig where that
    cannot be read.
    """
    path = Path(config.model.model).expanduser()
    if path.suffix != ".json" or not path.is_file():
        yield config
        return
    with TemporaryDirectory(prefix="thalweg-plan-") as folder:
        try:
            shutil.copyfile(path, Path(folder, "config.json"))
        except OSError as error:
            raise UnsupportedConfig(f"model: {path}: {error.strerror}") from error
        try:
            yield replace(config, model=folder)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(Path(folder, "config.json")), str(path))) from error


def _parser() -> OptionsParser:
    parser = options_parser(
        "thalweg plan",
        "What would be chosen for a model and why, what it takes of memory, and what a machine could do with it at"
        " best. Loads no weights.",
        EPILOG,
        SECTIONS,
    )
    add = parser.add_argument_group("This command").add_argument
    positive, amount = _number(int, 1), _number(float, 0)
    add("--json", action="store_true", help="print one JSON object")
    add("--machine", metavar="NAME", help="plan for this machine, such as h200x8 (default: this one)")
    add("--input-len", type=positive, default=0, metavar="N", help="tokens of a prompt (default: 1024)")
    add("--output-len", type=positive, default=0, metavar="N", help="tokens of an answer (default: 256)")
    load = "requests at a time on the whole machine"
    add("--concurrency", type=positive, metavar="N", help=f"{load} (default: {CONCURRENCY})")
    add("--request-rate", type=amount, metavar="X", help="requests a second, in place of --concurrency")
    target = "milliseconds that {} may take; alone: as many requests as it allows"
    add("--tpot-target", type=amount, metavar="MS", help=target.format("a token of an answer"))
    add("--ttft-target", type=amount, metavar="MS", help="milliseconds that the first token of a prompt may take")
    add(
        "--batches",
        type=positive,
        nargs="+",
        default=[1, 8, 32, 128],
        metavar="N",
        help="requests of the floors (default: 1 8 32 128)",
    )
    contexts = " ".join(map(str, CONTEXTS))
    add("--contexts", type=positive, nargs="+", metavar="N", help=f"tokens of the floors (default: {contexts})")
    skewed = (
        "popularity of experts: the i-th best is chosen in proportion to i to the power of -X (default: 0, uniform)"
    )
    add("--expert-skew", type=amount, default=0.0, metavar="X", help=skewed)
    add("--check", action="store_true", help="start an engine here and compare its memory with the forecast")
    return parser


def wanted(config: Options, asked: argparse.Namespace) -> PlanRequest:
    """What the flags ask for. Raises UnsupportedConfig for a load or a layout that cannot be."""
    from thalweg.launch.planning.forecast import PlanRequest
    from thalweg.launch.planning.search import Workload

    if asked.concurrency and asked.request_rate:
        raise UnsupportedConfig(
            "--concurrency and --request-rate: one of them says how much there is to do; leave the other out"
        )
    open_ended = asked.request_rate or asked.tpot_target
    load = Workload(
        asked.input_len,
        asked.output_len,
        asked.concurrency or (0 if open_ended else CONCURRENCY),
        asked.request_rate or 0.0,
        (asked.tpot_target or 0.0) / 1e3,
        (asked.ttft_target or 0.0) / 1e3,
        asked.expert_skew,
    )
    machine = hardware(asked.machine) if asked.machine else None
    layout = None if machine is None else _layout(config, machine)
    return PlanRequest(load, machine, layout, tuple(asked.batches), tuple(asked.contexts or CONTEXTS))


def _layout(config: Options, machine: Hardware) -> ParallelLayout | None:
    """The layout that the flags name, in as many copies as the machine has room for; None where they name none."""
    wish = config.parallel
    if wish == type(wish)():
        return None
    from thalweg.launch.planning.layouts import ParallelLayout  # loads torch, which --help need not

    one = ParallelLayout(wish.tp_size, wish.dp_size, wish.ep_size, wish.pp_size)
    if machine.gpus % one.gpus:
        raise UnsupportedConfig(
            f"--tp-size {one.tp}, --pp-size {one.pp}: {one.gpus} GPUs a copy, of which {machine.name} has no whole"
            f" number; use a divisor of {machine.gpus}"
        )
    return ParallelLayout(one.tp, one.dp, one.ep, one.pp, machine.gpus // one.gpus)


def _number(kind: type, least: int) -> Callable[[str], Any]:
    """An argparse type."""

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    return read
