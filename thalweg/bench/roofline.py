"""`thalweg roofline`: a step's time by operation, each against its floor, what lies between them, and where most is
lost.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table

from thalweg.bench import ceilings, coverage, losses, timeline, trace
from thalweg.bench.command import exit_status, positive
from thalweg.bench.in_process import (
    Lengths,
    Tokens,
    configuration,
    random_batch,
    reserve,
    start,
    time_batch,
)
from thalweg.bench.losses import Split
from thalweg.bench.results import provenance, write
from thalweg.bench.statistics import median
from thalweg.config.args import OptionsParser, ParsedOptions, options_parser, parse_options
from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.messages import StartProfile, StopProfile
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.kernels import names
from thalweg.launch.hub import locate
from thalweg.launch.planning import roofline
from thalweg.launch.planning.layouts import ONE
from thalweg.launch.planning.roofline import Ceilings
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.resolved import Resolved
from thalweg.models.catalog import read_facts

STEPS = 24  # decode steps that are profiled
LINES = 12  # kernels of an operation that a result names
SHOWN = 2  # that the table names
UNKNOWN_WIDTH = 140  # columns, where no terminal and no COLUMNS say how many there are


@dataclass(frozen=True, slots=True)
class Ground:
    """What floors are computed from. context: of a decode step, in tokens. prompt: tokens of each row in a step that
    computes prompts.
    """

    facts: ModelFacts
    model: PlannedModel
    top: Ceilings
    context: int
    covered: tuple[float, ...] = ()

    def floors(self, rows: int, tokens: int) -> dict[str, float]:
        """Seconds by phase of a step of equal rows; a decode step's have the context, a prompt's begin it."""
        new = max(1, tokens // rows)
        decode = new == 1
        shape = roofline.StepShape(rows, new, self.context if decode else new, self.covered if decode else ())
        return roofline.by_name(roofline.phases(self.model.on(ONE), shape), self.top)


@dataclass(frozen=True, slots=True)
class Run:
    """A profile and what it says. told: what else is known of the run."""

    splits: list[Split]
    profile: trace.Profile
    told: dict[str, object]


def _parser() -> OptionsParser:
    epilog = """\
examples:
  thalweg roofline models/tiny
  thalweg roofline org/name --load-format dummy --batch-size 32 --context 1024
  thalweg roofline --trace profiles/thalweg-20260101-120000-000000-1.trace.json.gz
  thalweg roofline models/tiny --trace FILE --context 4096     with the floors of that model

A profiled step is slower than others, a CPU's by a tenth or more; the time of steps without a profile is told beside it."""
    parser = options_parser(
        "thalweg roofline",
        "Where a step's time goes: each operation against its floor, the gaps, and the five places where most is lost.",
        epilog,
        ("model", "load", "memory", "schedule"),
    )
    add = parser.add_argument_group("This command").add_argument
    add(
        "--trace",
        type=Path,
        default=None,
        metavar="FILE",
        help="a profile that /start_profile wrote, in place of a run",
    )
    add("--batch-size", type=positive, nargs="+", default=[1], metavar="N", help="sequences at a time (default: 1)")
    add(
        "--context",
        type=positive,
        default=1024,
        metavar="N",
        help="tokens of each before the first decode step (default: 1024)",
    )
    add("--steps", type=positive, default=STEPS, metavar="N", help=f"decode steps that are profiled (default: {STEPS})")
    add(
        "--perfetto",
        type=Path,
        default=None,
        metavar="FILE",
        help="write engine and device on one time line, for ui.perfetto.dev",
    )
    add("--result-filename", default="", metavar="FILE", help="write the result as JSON")
    add("--bench-seed", type=int, default=1, metavar="N", help="of the random tokens (default: 1)")
    return parser


def shapes_of(facts: ModelFacts) -> trace.Shapes:
    """What a CPU's products multiply by, of this model."""
    hidden, by_weight = facts.hidden, {(facts.hidden, 2 * facts.intermediate): names.MLP}
    by_weight[facts.intermediate, hidden] = names.MLP
    by_size: dict[int, str] = {}
    if facts.mla is not None:
        for shape in ((facts.mla.nope, facts.mla.kv_lora), (facts.mla.kv_lora, facts.mla.v)):
            by_weight[shape] = names.PROJECTIONS
    if facts.moe is not None:
        inner = facts.moe.intermediate
        for width in {inner, facts.moe.shared * inner} - {0}:
            by_weight[hidden, 2 * width] = by_weight[width, hidden] = names.EXPERTS
        by_weight[hidden, facts.moe.experts] = names.EXPERTS
        by_size[3 * hidden * inner] = names.EXPERTS
    by_weight[hidden, facts.vocab] = names.HEAD
    return trace.Shapes(by_weight, by_size)


def ground(
    facts: ModelFacts, rates: dict[str, float], device: str, dtype: str, kernels: KernelConfig, context: int
) -> Ground:
    """rates: of `ceilings.rates`."""
    plain = device == "cpu" or kernels.decode == "reference"  # whose FP8 weights are dequantized when they are loaded
    products = rates["bf16" if dtype == "bfloat16" else "float32"]
    top = Ceilings(rates["read"], products, rates.get("fp8", products))
    return Ground(facts, PlannedModel(facts, dtype, plain, kernels), top, context)


def profiled(engine: LocalEngine, prompts: Sequence[Sequence[int]], steps: int, folder: Path) -> Path:
    """Computes this batch with a profile around all of it; the trace."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    gpu = engine.runner.planes.device.type == "cuda"
    engine.control(StartProfile(id=1, folder=str(folder), gpu=gpu, shapes=not gpu))
    for prompt in prompts:
        engine.submit(prompt, params)
    while not engine.idle:
        engine.step()
    return Path(engine.control(StopProfile(id=2)))


def table(split: Split) -> Table:
    floor = split.floor_us
    head = f"{split.rows} rows, {split.tokens} tokens: {split.us / 1e3:.3f} ms a step, mean of {split.steps}"
    if floor:
        head += f"; floor {floor / 1e3:.3f} ms, share reached {floor / split.us:.2f}"
    shown = Table(title=head, title_justify="left")
    shown.add_column("operation", no_wrap=True)
    for name in ("spans", "µs", "of step", "floor µs", "reached", "lost µs"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("most in", overflow="fold")
    for part in split.parts:
        least = "–" if part.floor_us is None else f"{part.floor_us:.1f}"
        reached = f"{part.floor_us / part.us:.2f}" if part.floor_us is not None and part.us else "–"
        most = ", ".join(f"{line.name} {line.us:.1f}" for line in part.lines[:SHOWN])
        shown.add_row(
            part.operation,
            f"{part.count:.0f}",
            f"{part.us:.1f}",
            f"{part.us / split.us:.1%}",
            least,
            reached,
            f"{part.lost_us:.1f}",
            most,
        )
    gaps = split.gaps
    before = ", ".join(f"{line.name} {line.us:.1f}" for line in gaps.before[:SHOWN])
    shown.add_row(
        losses.GAPS,
        f"{gaps.count:.0f}",
        f"{gaps.us:.1f}",
        f"{gaps.us / split.us:.1%}",
        "–",
        "–",
        f"{gaps.us:.1f}",
        f"before {before}",
    )
    return shown


def show(splits: Sequence[Split]) -> None:
    console = Console(width=shutil.get_terminal_size((UNKNOWN_WIDTH, 0)).columns)
    for split in splits:
        console.print(table(split))
        print(f"Where most time of a step of {split.rows} rows and {split.tokens} tokens is lost:")
        for place, text in enumerate(losses.words(split), 1):
            print(f"  {place}. {text}")
        print()


def as_json(split: Split) -> dict[str, object]:
    made = asdict(split) | {"floor_us": split.floor_us, "lost": losses.words(split)}
    for part in made["parts"]:
        part["lines"] = part["lines"][:LINES]
    return made


def _steady(profile: trace.Profile, ground: Ground | None) -> list[Split]:
    """A split of each kind of step, the most frequent first, of its typical steps."""
    return [
        losses.split(losses.typical(mine), ground.floors(*kind) if ground is not None else {})
        for kind, mine in losses.kinds(profile.steps).items()
    ]


def of_trace(parsed: ParsedOptions) -> tuple[dict[str, object], Iterator[Run]]:
    """Of a file. Floors need the model, and a device like the one of the profile for its ceilings. Raises
    ThalwegError.
    """
    args, facts = parsed.args, None
    if parsed.options.model.model:
        wish = parsed.options.model
        facts = read_facts(locate(wish.model, wish.revision, wish.hf_token).folder)
    profile = trace.read(args.trace, trace.NO_SHAPES if facts is None else shapes_of(facts))
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if facts is None or profile.device != here:
        needed = f"this machine has no {profile.device or 'CPU alone'}, whose ceilings would be needed"
        print(f"without floors: {'no model was named' if facts is None else needed}", file=sys.stderr)
        return {}, iter([Run(_steady(profile, None), profile, {})])
    load, device = parsed.options.load, "cuda" if here else "cpu"
    if load.threads is not None:
        torch.set_num_threads(load.threads)
    dtype = load.dtype or ("bfloat16" if here else "float32")
    kernels = KernelConfig(decode="triton" if here else "reference", kv=parsed.options.memory.kv_cache_dtype or "")
    under = ground(facts, ceilings.rates(torch.device(device)), device, dtype, kernels, args.context)
    return {"ceilings": asdict(under.top)}, iter([Run(_steady(profile, under), profile, {})])


def of_model(parsed: ParsedOptions) -> tuple[dict[str, object], Iterator[Run]]:
    """What is known of all runs, and a run in this process for each batch size, made when it is asked for. Raises
    ThalwegError.
    """
    args = parsed.args
    gpu = parsed.options.load.device != "cpu" and torch.cuda.is_available()
    rates = ceilings.rates(torch.device("cuda")) if gpu else {}  # while memory is free
    room = reserve(parsed.options, max(args.batch_size), args.context, args.steps + 1)
    resolved, engine = start(room, Lengths(args.context, args.steps, "--context {} and --steps {}", 1))
    rates = rates or ceilings.rates(torch.device("cpu"))  # with the threads that the engine has set
    settings, middle_of = engine.config, args.context + args.steps // 2
    under = ground(read_facts(resolved.path), rates, settings.device, settings.dtype, settings.kernels, middle_of)
    rng = Random(args.bench_seed)
    told = {"model": resolved.path.resolve().name, "context": args.context, "ceilings": asdict(under.top)}
    runs = (_of_batch(resolved, engine, under, (batch, args.context, args.steps), rng) for batch in args.batch_size)
    return told | {"configuration": configuration(resolved)}, runs


def _of_batch(resolved: Resolved, engine: LocalEngine, under: Ground, case: tuple[int, int, int], rng: Random) -> Run:
    """case: sequences, tokens of each before the first decode step, decode steps. Without a profile first, which warms
    up too.
    """
    count, context, steps = case

    def batch() -> list[Tokens]:
        return random_batch(resolved, count, context, rng)

    time_batch(engine, batch(), 8)
    alone = time_batch(engine, batch(), steps + 1)
    with tempfile.TemporaryDirectory() as folder:
        profile = trace.read(profiled(engine, batch(), steps, Path(folder)), shapes_of(under.facts))
    covered = coverage.of_decode(engine, batch())
    prefill, decode = alone.prefill * 1e3, median(alone.decode) * 1e3
    print(f"batch size {count}, without a profile: prefill {prefill:.2f} ms, median decode step {decode:.3f} ms")
    told = {
        "batch_size": count,
        "experts_a_layer": covered,
        "unprofiled_decode_ms": decode,
        "unprofiled_prefill_ms": prefill,
    }
    return Run(_steady(profile, replace(under, covered=covered)), profile, told)


def _tell(one: Run, args: Namespace) -> None:
    """Prints a run, and writes its time line."""
    show(one.splits)
    if args.perfetto is not None:
        size = one.told.get("batch_size")
        alone = size is None or len(args.batch_size) == 1
        path = args.perfetto if alone else args.perfetto.with_name(f"b{size}-{args.perfetto.name}")
        timeline.write(path, one.profile)
        print(f"{path}: open it at https://ui.perfetto.dev")


def run(argv: list[str]) -> tuple[list[Run], str]:
    """Measures or reads; prints each run and writes all of them, also where Ctrl-C or an error ends it. The runs, and
    what ended them early, "" if nothing did. Raises ThalwegError or ResultError.
    """
    parsed = parse_options(_parser(), argv)
    args = parsed.args
    if args.trace is None and not parsed.options.model.model:
        raise UnsupportedConfig("give a model to run, or --trace FILE with a profile of one; --help tells more")
    told, made = (of_model if args.trace is None else of_trace)(parsed)
    settings = told.pop("configuration", {})
    assert isinstance(settings, dict)
    runs, ended = list[Run](), "an error"
    try:
        for one in made:
            runs.append(one)
            _tell(one, args)
        ended = ""
    except KeyboardInterrupt:
        ended = "Ctrl-C"
    finally:
        if args.result_filename:
            written = [{**one.told, "steps": [as_json(split) for split in one.splits]} for one in runs]
            early = {"partial": bool(ended), "ended": ended}
            write(
                Path(args.result_filename), {**told, "runs": written, **early} | provenance("roofline", argv, settings)
            )
    return runs, ended


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, 1: it could not run or a result could not be written, 2: it was asked for wrongly, 130: Ctrl-C, what was
    measured is told and written.
    """
    return exit_status("thalweg roofline", lambda words: 130 if run(words)[1] else 0, argv)
