"""`thalweg bench one-batch`: prefill and decode of fixed batches in this process, without HTTP, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from random import Random
from typing import Any

import torch

from thalweg.bench import ceilings, coverage, filled_cache
from thalweg.bench.command import OUTPUT, PartialRun, command, parse_engine_flags
from thalweg.bench.display import progress_bar, show
from thalweg.bench.floor import ServedModel, step_seconds
from thalweg.bench.in_process import (
    BATCHES,
    BENCH_SEED,
    Lengths,
    Timing,
    Tokens,
    configuration,
    random_batch,
    reserve,
    start,
    time_batch,
)
from thalweg.bench.results import save
from thalweg.bench.statistics import median
from thalweg.config.machine import Machine
from thalweg.config.machines import hardware_of
from thalweg.core.errors import InsufficientMemory
from thalweg.engine.local import LocalEngine
from thalweg.launch.planning.roofline import Ceilings, divided
from thalweg.launch.report import make_table
from thalweg.launch.resolved import Resolved

WARM_UP_TOKENS = 8
FLAGS = f"""
{BATCHES}
--output-len --output  count...=16   tokens to generate
--repeat      count=1       runs of each case; the fastest is reported
--fill-cache  switch        random vectors are the context: only the last page of a prompt, or less, is computed
--run-name    name=default  a name in the result
{BENCH_SEED}
{OUTPUT}
"""
COLUMNS = {
    "batch": "{batch_size}", "in": "{input_len}", "out": "{output_len}",
    "prefill s": "{prefill_latency:.4f}", "prefill tok/s": "{prefill_throughput:.0f}",
    "total s": "{total_latency:.2f}", "decode tok/s": "{median_decode_throughput:.1f}",
    "decode ms": lambda row: f"{1000 * row['median_decode_latency']:.2f}",
    "accept length": "{accept_length:.2f}",
    "of the limit": "{decode_share:.1%}",
}  # fmt: skip

# of rows, left out where the prompts are not computed
OF_PROMPTS = ("prefill_latency", "prefill_throughput", "total_latency", "overall_throughput", "output_throughput")

Case = tuple[int, int, int]  # batch size, input length, output length
Row = dict[str, Any]


def shares(
    resolved: Resolved, case: Case, timing: Timing, top: Ceilings, covered: tuple[float, ...], is_filled: bool
) -> Row:
    """The hardware's limits in seconds, and the share of them that was reached. covered: distinct experts of each layer
    in a decode step, () without experts. is_filled: nothing is said of prompts that were not computed.
    """
    batch, input_len, output_len = case
    model, hardware = ServedModel.of(resolved.path, resolved.engine), hardware_of(Machine.here())
    shapes = {
        "prefill": divided(model.layout, batch, input_len, input_len),
        "decode": divided(model.layout, batch, 1, input_len + output_len // 2, covered=covered),
    }
    seconds, row = {"prefill": timing.prefill, "decode": median(timing.decode)}, Row()
    for name, shape in list(shapes.items())[is_filled:]:
        limit = row[f"{name}_floor"] = step_seconds(model, shape, top, hardware)
        row[f"{name}_share"] = limit / seconds[name] if seconds[name] else 0.0
    return row | ({"experts_a_layer": covered} if covered else {})


def report(case: Case, timing: Timing, run_name: str) -> Row:
    """The numbers of a case, under SGLang's keys; latencies in seconds, throughputs in tokens a second."""
    batch, input_len, output_len = case
    step = median(timing.decode)
    tokens = batch * (output_len - 1) / max(len(timing.decode), 1)  # of a step: more than `batch` with accepted drafts
    return {
        "run_name": run_name,
        "batch_size": batch,
        "input_len": input_len,
        "output_len": output_len,
        **timing.as_json(),
        "prefill_throughput": batch * input_len / timing.prefill,
        "median_decode_throughput": tokens / step if step else 0.0,
        "overall_throughput": batch * (input_len + output_len) / timing.total,
        "output_throughput": batch * output_len / timing.total,
    }


def measure(engine: LocalEngine, batches: Iterator[list[Tokens]], output_len: int, repeat: int) -> list[Timing]:
    """A short warm-up of the same shape, then `repeat` runs."""
    time_batch(engine, next(batches), min(output_len, WARM_UP_TOKENS))
    return [time_batch(engine, next(batches), output_len) for _ in range(repeat)]


def batches_of(
    engine: LocalEngine, resolved: Resolved, case: Case, is_filled: bool, seed: int, rng: Random
) -> Iterator[list[Tokens]]:
    """Prompts of a case: new ones each time, or the same ones, which the cache has. seed: of what it has."""
    if is_filled:
        prompts = filled_cache.prompts_of_own_pages(resolved, *case[:2], rng)
        while True:
            engine.fill_cache(prompts, seed)
            yield prompts
    while True:
        yield random_batch(resolved, *case[:2], rng)


@command("thalweg bench one-batch")
def main(argv: list[str]) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    text = "Times prefill and decode of batches of random tokens: every batch size with every input and output length."
    args, options = parse_engine_flags(argv, "thalweg bench one-batch", text, {"Batches": FLAGS})
    cases: list[Case] = list(itertools.product(args.batch_size, args.input_len, args.output_len))
    longest = Lengths(max(args.input_len), max(args.output_len))
    on_gpu = options.load.device != "cpu" and torch.cuda.is_available()  # the limits of a CPU are not measured
    top = ceilings.measure() if on_gpu else None
    batch = max(args.batch_size)
    try:
        options = reserve(options, batch, longest.input, longest.output, args.fill_cache)
        resolved, engine = start(options, longest)
    except InsufficientMemory as error:
        raise InsufficientMemory(
            f"--batch-size {batch}, {longest.input + longest.output} tokens each: {error}"
        ) from error
    rng, rows = Random(args.bench_seed), list[Row]()
    if args.fill_cache:
        filled_cache.check(engine, "--fill-cache")
    with PartialRun() as run, progress_bar("cases", len(cases)) as bar:
        for case in cases:
            before = engine.loop.stats().acceptance
            batches = batches_of(engine, resolved, case, args.fill_cache, args.bench_seed, rng)
            runs = measure(engine, batches, case[2], args.repeat)
            drafts = engine.loop.stats().acceptance.since(before)
            timing = min(runs, key=lambda each: each.total)
            row = report(case, timing, args.run_name) | {"runs": [each.as_json() for each in runs]}
            if args.fill_cache:
                row = {name: value for name, value in row.items() if name not in OF_PROMPTS} | {"filled": True}
            row["decode_latencies"] = [round(seconds, 7) for seconds in timing.decode]
            if drafts.mean_length is not None:
                row |= {"accept_length": drafts.mean_length, "accept_rate": drafts.rate}
            if top is not None:
                covered = coverage.of_decode(engine, next(batches))
                row |= shares(resolved, case, timing, top, covered, args.fill_cache)
            rows.append(row)
            bar.advance()
    show(make_table("one batch", COLUMNS, rows))
    measured = {"results": rows, **run.as_json()} | ({} if top is None else {"ceilings": asdict(top)})
    save(args.output_file, "bench one-batch", argv, configuration(resolved), measured)
    return run.finish()
