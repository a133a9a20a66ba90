"""`thalweg roofline`: a step's time by operation, each against the hardware's limit, the gaps between them, and where
most time is lost. A limit is the least time that reading the operation's bytes or computing its FLOPs can take.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from thalweg.bench import ceilings, coverage, step_profile
from thalweg.bench.command import ENGINE_FLAGS, OUTPUT, PartialRun, command, parse_engine_flags
from thalweg.bench.display import show
from thalweg.bench.in_process import (
    BENCH_SEED,
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
from thalweg.bench.results import save
from thalweg.bench.step_profile import COMMUNICATION, ProfiledStep
from thalweg.config.machine import Machine
from thalweg.config.machines import hardware_of
from thalweg.config.options import Options
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.messages import StartProfile, StopProfile
from thalweg.engine.local import LocalEngine
from thalweg.launch.planning import roofline
from thalweg.launch.planning.collectives import sending_seconds
from thalweg.launch.planning.layouts import layout_of
from thalweg.launch.planning.roofline import Ceilings, StepShape
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.report import make_table
from thalweg.models.catalog import read_facts

TOP = 5  # losses in words
KERNELS = 12  # of an operation in a result
SHOWN_KERNELS = 2  # in the table
EAGER_STEPS = 3  # decode steps that name the operations of the kernels
GAPS = "gaps"
PROFILES_S = 30.0  # until all processes have written theirs
EPILOG = """\
examples:
  thalweg roofline models/tiny
  thalweg roofline org/name --load-format dummy --batch-size 32 --context 1024
  thalweg roofline --trace profiles/thalweg-20260101-120000-000000-1.trace.json.gz

A profiled step is slower, on a CPU by a tenth or more; the time of steps without a profile is printed too."""
FLAGS = f"""
--trace       path        a profile of /start_profile, in place of a run; forward and sampling by kernel, without limits
--batch-size  count...=1  sequences at a time
--context     count=1024  tokens of each before the first decode step
--steps       count=24    decode steps that are profiled
--perfetto    path        keep the profile of the run, for ui.perfetto.dev
{OUTPUT}
{BENCH_SEED}
"""
COLUMNS = {
    "operation": "{operation}",
    "most in": lambda row: ", ".join(f"{line['name']} {line['us']:.1f}" for line in row["lines"][:SHOWN_KERNELS]),
    "spans": "{count:.0f}",
    "µs": "{us:.1f}",
    "of step": lambda row: f"{row['us'] / row['step']:.1%}",
    "limit µs": "{floor_us:.1f}",
    "reached": lambda row: f"{row['floor_us'] / row['us']:.2f}" if row["floor_us"] and row["us"] else "",
    "lost µs": "{lost_us:.1f}",
}

Limits = Mapping[str, float]  # seconds by phase


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of an operation, or the gaps before one, in a step."""

    name: str
    count: float
    us: float  # all together


@dataclass(frozen=True, slots=True)
class OperationTime:
    """One operation of a step, or its gaps: times in which nothing ran."""

    operation: str
    count: float
    us: float  # by which it delayed the end of the step
    floor_us: float | None  # None where nothing must be read or computed
    lost_us: float  # above the limit
    lines: tuple[KernelTime, ...]  # its first kernels, the longest first; of the gaps the kernels after them

    def in_words(self, step_us: float) -> str:
        """Its loss."""
        above = "without a limit"
        if self.floor_us is not None:
            slower = self.us / max(self.floor_us, 1e-9)
            above = f"above the limit of {_us(self.floor_us)}: it takes {_us(self.us)}, {slower:.1f} times as long"
        most = "".join(f"; most in {line.count:.4g} x `{line.name}` {_us(line.us)}" for line in self.lines[:1])
        share = f"{_us(self.lost_us)} ({self.lost_us / step_us:.0%} of the step)"
        return f"{self.operation}: {share} {above}, {self.count:.4g} x{most}"


def _us(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.1f} µs"


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Steps of one kind."""

    rows: int
    tokens: int
    steps: int
    us: float  # mean of a step
    floor_us: float | None  # None where no limit is known
    parts: tuple[OperationTime, ...]  # the longest first; with the gaps they add up to the step

    def losses(self) -> list[str]:
        """The places where most time is lost, in words."""
        ordered = sorted(self.parts, key=lambda part: -part.lost_us)[:TOP]
        return [part.in_words(self.us) for part in ordered if part.lost_us > 0]


def break_down(steps: Sequence[ProfiledStep], limits: Limits) -> StepBreakdown:
    """The mean of steps of one kind. limits: {} where none are known."""
    us: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # by operation and kernel
    for step in steps:
        for span, gap, added in step_profile.delays(step):
            us[span.operation][span.name].append(added)
            if gap:
                us[GAPS][span.name].append(gap)
        if (after := step.end - max(span.end for span in step.spans)) > 0:
            us[GAPS]["the next step"].append(after)
    limit_us: dict[str, float] = defaultdict(float)
    for phase, seconds in limits.items():
        limit_us[step_profile.ATTENTION if phase == "index" else phase] += 1e6 * seconds
    parts = []
    for operation in us.keys() | limit_us.keys():
        lines = [KernelTime(name, len(all) / len(steps), sum(all) / len(steps)) for name, all in us[operation].items()]
        limit, total = limit_us.get(operation), sum(line.us for line in lines)
        longest = tuple(sorted(lines, key=lambda line: -line.us)[:KERNELS])
        count = sum(line.count for line in lines)
        parts.append(OperationTime(operation, count, total, limit, total - (limit or 0.0), longest))
    durations, known = [step.end - step.begin for step in steps], sum(limit_us.values()) if limits else None
    ordered = tuple(sorted(parts, key=lambda part: (-part.us, part.operation)))
    kind = steps[0].rows, steps[0].tokens, len(steps)
    return StepBreakdown(*kind, fmean(durations), known, ordered)


class RooflineRun(NamedTuple):
    """The breakdowns of a profile."""

    steps: list[StepBreakdown]
    facts: dict[str, Any]  # further fields of the result


def profiled(engine: LocalEngine, prompts: Sequence[list[Tokens]], steps: int, folder: Path) -> Path:
    """Profiles two batches: the first eagerly, for the operations, the second as it is served. Returns the trace."""
    gpu = engine.runner.planes.device.type == "cuda"
    engine.control(StartProfile(id=1, folder=str(folder), gpu=gpu))
    with step_profile.operation_ranges(engine):
        run_all(engine, [exactly(prompt, EAGER_STEPS + 1) for prompt in prompts[0]])
    run_all(engine, [exactly(prompt, steps + 1) for prompt in prompts[1]])
    return Path(engine.control(StopProfile(id=2)))


def rank_waits(engine: LocalEngine, own: Path, steps: Sequence[ProfiledStep]) -> step_profile.RankWaits | None:
    """By the profiles that all processes write into one folder. None without others, and on a CPU. own: this
    process's, with these steps.
    """
    others, deadline = engine.config.copy_processes - 1, time.monotonic() + PROFILES_S
    if engine.config.copies > 1:  # they wait for nobody
        return None
    while others and time.monotonic() < deadline:
        paths = [path for path in own.parent.glob("*.json.gz") if path != own]
        with suppress(UnsupportedConfig):  # one is being written
            if len(paths) == others:
                return step_profile.rank_waits([steps, *(step_profile.read(path).steps for path in paths)])
        time.sleep(0.1)
    return None


def show_steps(steps: Sequence[StepBreakdown]) -> None:
    for step in steps:
        title = f"{step.rows} rows, {step.tokens} tokens: {step.us / 1e3:.3f} ms a step, mean of {step.steps}"
        if limit := step.floor_us:
            title += f"; limit {limit / 1e3:.3f} ms, share reached {limit / step.us:.2f}"
        show(make_table(title, COLUMNS, [asdict(part) | {"step": step.us} for part in step.parts], left=2))
        print(f"Where most time of a step of {step.rows} rows and {step.tokens} tokens is lost:")
        print("".join(f"  {place}. {text}\n" for place, text in enumerate(step.losses(), 1)))


def of_trace(trace: Path) -> Iterator[RooflineRun]:
    """Options read from a file. Raises UnsupportedConfig."""
    kinds = step_profile.steps_by_kind(step_profile.read(trace).steps)
    yield RooflineRun([break_down(steps, {}) for steps in kinds.values()], {})


def of_model(args: Any, options: Options) -> tuple[dict[str, object], dict[str, object], Iterator[RooflineRun]]:
    """Fields of the result, the configuration, and a run in this process for each batch size, made when it is asked
    for. Raises ThalwegError.
    """
    gpu = options.load.device != "cpu" and torch.cuda.is_available()
    rates = ceilings.rates(torch.device("cuda")) if gpu else {}  # while memory is free
    room = reserve(options, max(args.batch_size), args.context, args.steps + 1)
    resolved, engine = start(room, Lengths(args.context, args.steps, "--context {} and --steps {}", 1))
    rates = rates or ceilings.rates(torch.device("cpu"))  # with the threads that the engine has set
    config = engine.config
    products = rates["bf16" if config.dtype == "bfloat16" else "float32"]
    top = Ceilings(rates["read"], products, rates.get("fp8", products))
    plain = config.device == "cpu" or config.kernels.decode == "reference"  # quantized weights are dequantized
    layout, hardware = layout_of(config), hardware_of(Machine.here())
    facts = read_facts(resolved.path, config.index_topk_pattern)
    model = PlannedModel(facts, config.dtype, plain, config.kernels).on(layout)
    rng = Random(args.bench_seed)

    def limits(rows: int, tokens: int, covered: tuple[float, ...]) -> Limits:
        """Limits of a step of equal rows: a decode step in the middle of the run, or a prompt from its beginning.
        covered: distinct experts of each layer in a decode step.
        """
        new = max(1, tokens // rows)
        context, busy = new if new > 1 else args.context + args.steps // 2, min(max(args.batch_size), layout.dp)
        shape = StepShape(rows, new, context, () if new > 1 else covered, attentions=busy)
        sending = sending_seconds(facts, shape, layout, hardware)
        return roofline.by_name(roofline.phases(model, shape), top) | ({COMMUNICATION: sending} if sending else {})

    def run_of(rows: int) -> RooflineRun:
        """Without a profile first, which warms up too."""

        def batch() -> list[Tokens]:
            return random_batch(resolved, rows, args.context, rng)

        time_batch(engine, batch(), 8)
        alone = time_batch(engine, batch(), args.steps + 1)
        with tempfile.TemporaryDirectory() as folder:
            path = profiled(engine, (batch(), batch()), args.steps, Path(folder))
            profile = step_profile.read(path)
            waits = rank_waits(engine, path, profile.steps)
            if (kept := args.perfetto) is not None:
                kept = kept if len(args.batch_size) == 1 else kept.with_name(f"b{rows}-{kept.name}")
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, kept)
                print(f"{kept}: open it at https://ui.perfetto.dev")
        covered = coverage.of_decode(engine, batch())
        prefill, decode = alone.prefill * 1e3, median(alone.decode) * 1e3
        print(f"batch size {rows}, without a profile: prefill {prefill:.2f} ms, median decode step {decode:.3f} ms")
        fields = {"batch_size": rows, "experts_a_layer": covered}
        fields |= {"unprofiled_decode_ms": decode, "unprofiled_prefill_ms": prefill}
        if waits is not None:
            late = ", ".join(_us(us) for us in waits.waiting)
            print(f"collectives: {_us(waits.sending)} a step; ranks wait for slower ones besides: {late}")
            fields["collectives_us"] = waits._asdict()
        kinds = step_profile.steps_by_kind(profile.steps)
        return RooflineRun([break_down(each, limits(*kind, covered)) for kind, each in kinds.items()], fields)

    common = {"model": resolved.path.resolve().name, "context": args.context, "ceilings": asdict(top)}
    return common, configuration(resolved), map(run_of, args.batch_size)


def run(argv: list[str]) -> list[RooflineRun]:
    """Measures or reads; prints each run and writes all of them, also where Ctrl-C or an error ends it. Raises
    ThalwegError, KeyboardInterrupt.
    """
    text = "Where a step's time goes: each operation against the hardware's limit, the gaps, the five largest losses."
    args, options = parse_engine_flags(
        argv, "thalweg roofline", text, {"This command": FLAGS}, (*ENGINE_FLAGS[:4], "parallel"), EPILOG
    )
    common, settings, measured = of_model(args, options) if args.trace is None else ({}, {}, of_trace(args.trace))
    runs = list[RooflineRun]()
    with PartialRun() as partial:
        for one in measured:
            runs.append(one)
            show_steps(one.steps)
    rows = [{**one.facts, "steps": [asdict(step) | {"lost": step.losses()} for step in one.steps]} for one in runs]
    save(args.output_file, "roofline", argv, settings, {**common, "runs": rows, **partial.as_json()})
    partial.finish()
    return runs


@command("thalweg roofline")
def main(argv: list[str]) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    return int(not run(argv))
