"""`thalweg roofline`: a step's time by operation, each against its floor, the gaps between them, and where most time is
lost.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from rich.table import Table

from thalweg.bench import ceilings, coverage, step_breakdown, timeline, trace
from thalweg.bench.command import OUTPUT, PartialRun, add_flags, exit_status
from thalweg.bench.display import make_table, show
from thalweg.bench.in_process import (
    BENCH_SEED,
    ENGINE_FLAGS,
    Lengths,
    Tokens,
    configuration,
    exactly,
    random_batch,
    reserve,
    run_all,
    start,
    time_batch,
)
from thalweg.bench.results import provenance, write
from thalweg.bench.statistics import median
from thalweg.bench.step_breakdown import StepBreakdown
from thalweg.config.args import OptionsParser, ParsedOptions, options_parser, parse_options
from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.messages import StartProfile, StopProfile
from thalweg.engine.local import LocalEngine
from thalweg.kernels import names
from thalweg.launch.hub import locate
from thalweg.launch.planning import roofline
from thalweg.launch.planning.layouts import ONE
from thalweg.launch.planning.roofline import Ceilings
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.resolved import Resolved
from thalweg.models.catalog import read_facts

KERNELS = 12  # of an operation in a result
SHOWN_KERNELS = 2  # in the table
EPILOG = """\
examples:
  thalweg roofline models/tiny
  thalweg roofline org/name --load-format dummy --batch-size 32 --context 1024
  thalweg roofline --trace profiles/thalweg-20260101-120000-000000-1.trace.json.gz
  thalweg roofline models/tiny --trace FILE --context 4096     with the floors of that model

A profiled step is slower than others, on a CPU by a tenth or more; the time of steps without a profile is printed too."""
FLAGS = f"""
--trace       path        a profile of /start_profile, in place of a run
--batch-size  count...=1  sequences at a time
--context     count=1024  tokens of each before the first decode step
--steps       count=24    decode steps that are profiled
--perfetto    path        write engine and device on one time line, for ui.perfetto.dev
{OUTPUT}
{BENCH_SEED}
"""


@dataclass(frozen=True, slots=True)
class FloorModel:
    """Computes floors."""

    facts: ModelFacts
    model: PlannedModel
    top: Ceilings
    context: int  # of a decode step, in tokens
    covered: tuple[float, ...] = ()  # distinct experts of each layer in a decode step

    def floors(self, rows: int, tokens: int) -> dict[str, float]:
        """Seconds by phase of a step of equal rows: a decode step behind the context, or a prompt from its
        beginning.
        """
        new = max(1, tokens // rows)
        decode = new == 1
        shape = roofline.StepShape(rows, new, self.context if decode else new, self.covered if decode else ())
        return roofline.by_name(roofline.phases(self.model.on(ONE), shape), self.top)


class RooflineRun(NamedTuple):
    """A profile and its breakdowns."""

    steps: list[StepBreakdown]
    profile: trace.StepProfile
    facts: dict[str, Any]  # further fields of the result


def _parser() -> OptionsParser:
    text = "Where a step's time goes: each operation against its floor, the gaps, and the five largest losses."
    parser = options_parser("thalweg roofline", text, EPILOG, ENGINE_FLAGS[:4])
    add_flags(parser, "This command", FLAGS)
    return parser


def shapes_of(facts: ModelFacts) -> trace.WeightShapes:
    """The weights of this model, by which a CPU's products are told apart."""
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
    return trace.WeightShapes(by_weight, by_size)


def ground(
    facts: ModelFacts, rates: dict[str, float], device: str, dtype: str, kernels: KernelConfig, context: int
) -> FloorModel:
    """rates: of `ceilings.rates`."""
    plain = device == "cpu" or kernels.decode == "reference"  # whose FP8 weights are dequantized when they are loaded
    products = rates["bf16" if dtype == "bfloat16" else "float32"]
    top = Ceilings(rates["read"], products, rates.get("fp8", products))
    return FloorModel(facts, PlannedModel(facts, dtype, plain, kernels), top, context)


def profiled(engine: LocalEngine, prompts: Sequence[Sequence[int]], steps: int, folder: Path) -> Path:
    """Computes this batch with a profile around all of it; returns the trace."""
    gpu = engine.runner.planes.device.type == "cuda"
    engine.control(StartProfile(id=1, folder=str(folder), gpu=gpu, shapes=not gpu))
    run_all(engine, [exactly(prompt, steps + 1) for prompt in prompts])
    return Path(engine.control(StopProfile(id=2)))


def table(step: StepBreakdown) -> Table:
    title = f"{step.rows} rows, {step.tokens} tokens: {step.us / 1e3:.3f} ms a step, mean of {step.steps}"
    if floor := step.floor_us:
        title += f"; floor {floor / 1e3:.3f} ms, share reached {floor / step.us:.2f}"
    rows = []
    for part in step.parts:
        known = part.floor_us is not None
        kernels = ", ".join(f"{kernel.name} {kernel.us:.1f}" for kernel in part.lines[:SHOWN_KERNELS])
        row = asdict(part) | {"lost": part.lost_us, "kernels": kernels, "floor": "–", "reached": "–"}
        if known and part.us:
            row |= {"floor": f"{part.floor_us:.1f}", "reached": f"{(part.floor_us or 0.0) / part.us:.2f}"}
        rows.append(row | {"share": part.us / step.us})
    gaps = step.gaps
    before = ", ".join(f"{kernel.name} {kernel.us:.1f}" for kernel in gaps.before[:SHOWN_KERNELS])
    gap = {"operation": step_breakdown.GAPS, "count": gaps.count, "us": gaps.us, "share": gaps.us / step.us}
    rows.append(gap | {"floor": "–", "reached": "–", "lost": gaps.us, "kernels": f"before {before}"})
    return make_table(
        title,
        {
            "operation": "{operation}",
            "most in": "{kernels}",
            "spans": "{count:.0f}",
            "µs": "{us:.1f}",
            "of step": "{share:.1%}",
            "floor µs": "{floor}",
            "reached": "{reached}",
            "lost µs": "{lost:.1f}",
        },
        rows,
        left=2,
    )


def show_steps(steps: Sequence[StepBreakdown]) -> None:
    for step in steps:
        show(table(step))
        print(f"Where most time of a step of {step.rows} rows and {step.tokens} tokens is lost:")
        for place, text in enumerate(step_breakdown.words(step), 1):
            print(f"  {place}. {text}")
        print()


def as_json(step: StepBreakdown) -> dict[str, object]:
    fields = asdict(step) | {"floor_us": step.floor_us, "lost": step_breakdown.words(step)}
    for part in fields["parts"]:
        part["lines"] = part["lines"][:KERNELS]
    return fields


def _breakdowns(profile: trace.StepProfile, floors: FloorModel | None) -> list[StepBreakdown]:
    """Of the typical steps of each kind, the most frequent kind first."""
    return [
        step_breakdown.break_down(step_breakdown.typical_steps(steps), floors.floors(*kind) if floors else {})
        for kind, steps in step_breakdown.steps_by_kind(profile.steps).items()
    ]


def of_trace(parsed: ParsedOptions) -> tuple[dict[str, object], Iterator[RooflineRun]]:
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
        return {}, iter([RooflineRun(_breakdowns(profile, None), profile, {})])
    load, device = parsed.options.load, "cuda" if here else "cpu"
    if load.threads is not None:
        torch.set_num_threads(load.threads)
    dtype = load.dtype or ("bfloat16" if here else "float32")
    kernels = KernelConfig(decode="triton" if here else "reference", kv=parsed.options.memory.kv_cache_dtype or "")
    under = ground(facts, ceilings.rates(torch.device(device)), device, dtype, kernels, args.context)
    return {"ceilings": asdict(under.top)}, iter([RooflineRun(_breakdowns(profile, under), profile, {})])


def of_model(parsed: ParsedOptions) -> tuple[dict[str, object], Iterator[RooflineRun]]:
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


def _of_batch(
    resolved: Resolved, engine: LocalEngine, under: FloorModel, case: tuple[int, int, int], rng: Random
) -> RooflineRun:
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
    return RooflineRun(_breakdowns(profile, replace(under, covered=covered)), profile, told)


def run(argv: list[str]) -> list[RooflineRun]:
    """Measures or reads; prints each run and writes all of them, also where Ctrl-C or an error ends it. Raises
    ThalwegError, KeyboardInterrupt.
    """
    parsed = parse_options(_parser(), argv)
    args: Any = parsed.args
    if args.trace is None and not parsed.options.model.model:
        raise UnsupportedConfig("give a model to run, or --trace FILE with a profile of one; see --help")
    common, measured = (of_model if args.trace is None else of_trace)(parsed)
    settings, runs = common.pop("configuration", {}), list[RooflineRun]()
    assert isinstance(settings, dict)
    with PartialRun() as partial:
        for one in measured:
            runs.append(one)
            show_steps(one.steps)
            if (path := args.perfetto) is not None:
                size = one.facts.get("batch_size")
                if size is not None and len(args.batch_size) > 1:
                    path = path.with_name(f"b{size}-{path.name}")
                timeline.write(path, one.profile)
                print(f"{path}: open it at https://ui.perfetto.dev")
    if args.output_file:
        rows = [{**one.facts, "steps": [as_json(step) for step in one.steps]} for one in runs]
        result = {**common, "runs": rows, **partial.as_json()}
        write(Path(args.output_file), result | provenance("roofline", argv, settings))
    if partial.finish():
        raise KeyboardInterrupt
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    return exit_status("thalweg roofline", lambda words: int(not run(words)), argv)
