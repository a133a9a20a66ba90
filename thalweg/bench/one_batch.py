"""`thalweg bench one-batch`: prefill and decode of fixed batches in this process, without HTTP, step by step."""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from thalweg.bench import ceilings, coverage
from thalweg.bench.in_process import (
    Lengths,
    Timing,
    add_batches,
    configuration,
    middle,
    positive,
    random_batch,
    room_for,
    start,
    time_batch,
)
from thalweg.bench.metrics import percentile
from thalweg.bench.results import provenance, write
from thalweg.bench.usage import status, unless
from thalweg.config.args import OptionsParser, options_parser, parse_options
from thalweg.config.options import Options
from thalweg.engine.local import LocalEngine
from thalweg.launch.planning import roofline
from thalweg.launch.planning.roofline import Ceilings
from thalweg.launch.resolved import Resolved
from thalweg.models.catalog import read_facts

SHOWN_STEPS = 5  # decode steps that are printed one by one, as SGLang does
WARM_UP_TOKENS = 8
UNKNOWN_WIDTH = 120  # columns, where no terminal and no COLUMNS say how many there are

Case = tuple[int, int, int]  # batch size, input length, output length


def _parser() -> OptionsParser:
    parser = options_parser(
        "thalweg bench one-batch",
        "Times prefill and decode of batches of random tokens: every batch size with every input and output length.",
        only=("model", "load", "memory", "schedule", "speculative"),
    )
    group = parser.add_argument_group("Batches")
    add = group.add_argument
    add_batches(add)
    add("--output-len", type=positive, nargs="+", default=[16], metavar="N", help="tokens to generate (default: 16)")
    add(
        "--repeat",
        type=positive,
        default=1,
        metavar="N",
        help="runs of each case; the fastest is reported (default: 1)",
    )
    add("--run-name", default="default", help="a name that goes into the result")
    add("--result-filename", default="", metavar="FILE", help="write the result; .jsonl gets one line more")
    add("--bench-seed", type=int, default=1, metavar="N", help="of the random tokens (default: 1)")
    return parser


def shares(
    resolved: Resolved, case: Case, timing: Timing, top: Ceilings, covered: tuple[float, ...]
) -> dict[str, object]:
    """Floors in seconds, and what share of them was reached. covered: distinct experts of each layer in a decode step,
    () without experts.
    """
    batch, input_len, output_len = case
    facts = read_facts(resolved.path)
    prefill = roofline.phases(facts, roofline.StepShape(batch, input_len, input_len))
    decode = roofline.phases(facts, roofline.StepShape(batch, 1, input_len + output_len // 2, covered))
    step = middle(timing.decode)
    found: dict[str, object] = {
        "prefill_floor": roofline.seconds(prefill, top),
        "prefill_share": roofline.seconds(prefill, top) / timing.prefill,
        "decode_floor": roofline.seconds(decode, top),
        "decode_share": roofline.seconds(decode, top) / step if step else 0.0,
        "decode_floor_by_phase": roofline.by_name(decode, top),
        "prefill_floor_by_phase": roofline.by_name(prefill, top),
    }
    if covered:
        assert facts.moe is not None
        found |= {"experts_a_layer": covered, "experts_if_uniform": roofline.uniform(facts.moe, batch)}
    return found


def report(case: Case, timing: Timing, run_name: str) -> dict[str, object]:
    """The numbers of a case, under SGLang's keys; latencies in seconds, throughputs in tokens a second."""
    batch, input_len, output_len = case
    step = middle(timing.decode)
    wrote = (
        batch * (output_len - 1) / len(timing.decode) if timing.decode else 0.0
    )  # of a step: more than `batch` where drafts were right
    return {
        "run_name": run_name,
        "batch_size": batch,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency": timing.prefill,
        "prefill_throughput": batch * input_len / timing.prefill,
        "median_decode_latency": step,
        "median_decode_throughput": wrote / step if step else 0.0,
        "p99_decode_latency": percentile(sorted(timing.decode), 99) if timing.decode else 0.0,
        "total_latency": timing.total,
        "overall_throughput": batch * (input_len + output_len) / timing.total,
        "output_throughput": batch * output_len / timing.total,
    }


def lines(case: Case, timing: Timing, result: dict[str, object]) -> list[str]:
    """What is printed of a case, in SGLang's words."""
    batch = case[0]

    def line(head: str, seconds: object, rate: object, of: str = "") -> str:
        return f"{head} {of}latency: {seconds:6.5f} s, {of}throughput: {rate:9.2f} token/s"

    shown = [f"Benchmark: batch size {batch}, input {case[1]}, output {case[2]}"]
    shown.append(line("Prefill.", result["prefill_latency"], result["prefill_throughput"]))
    for i, seconds in enumerate(timing.decode[:SHOWN_STEPS]):
        shown.append(line(f"Decode {i}. Batch size: {batch},", seconds, batch / seconds))
    if timing.decode:
        shown.append(
            line("Decode. ", result["median_decode_latency"], result["median_decode_throughput"], of="median ")
        )
    shown.append(line("Total. ", result["total_latency"], result["overall_throughput"]))
    if "accept_length" in result:
        shown.append(
            f"Accept length: {result['accept_length']:.2f}, share of drafts accepted: {result['accept_rate']:.3f}"
        )
    if "decode_floor" in result:
        for phase in ("prefill", "decode"):
            shown.append(
                f"Floor of {phase}: {result[f'{phase}_floor']:6.5f} s, share reached: {result[f'{phase}_share']:.3f}"
            )
    covered = result.get("experts_a_layer")
    if isinstance(covered, tuple):
        least, mean, most = min(covered), sum(covered) / len(covered), max(covered)
        uniform = result["experts_if_uniform"]
        shown.append(
            f"Distinct experts a layer: {mean:.1f} ({least:.1f} to {most:.1f}); uniform routing: {uniform:.1f}"
        )
    return shown


def ceilings_of(config: Options) -> Ceilings | None:
    """Of the GPU that the run will use; None on a CPU, whose floor is not known."""
    if config.load.device == "cpu" or not torch.cuda.is_available():
        return None
    return ceilings.measure()


def measure(engine: LocalEngine, resolved: Resolved, case: Case, repeat: int, rng: Random) -> list[Timing]:
    """A short warm-up of the same shape, then `repeat` runs, each with tokens never seen before."""
    batch, input_len, output_len = case
    time_batch(engine, random_batch(resolved, batch, input_len, rng), min(output_len, WARM_UP_TOKENS))
    return [time_batch(engine, random_batch(resolved, batch, input_len, rng), output_len) for _ in range(repeat)]


def each(runs: Sequence[Timing]) -> list[dict[str, float]]:
    """The latencies of every run in seconds, from which `bench compare` knows the noise."""
    return [
        {"prefill_latency": one.prefill, "median_decode_latency": middle(one.decode), "total_latency": one.total}
        for one in runs
    ]


def table(results: Sequence[dict[str, object]]) -> Table:
    """All cases on one page."""
    shown = Table(title="one batch", title_justify="left")
    for head in ("batch", "input", "output", "prefill s", "prefill tok/s", "decode ms", "decode tok/s", "total s"):
        shown.add_column(head, justify="right")
    for r in results:
        step = r["median_decode_latency"]
        assert isinstance(step, float)
        numbers = (f"{r['prefill_latency']:.4f}", f"{r['prefill_throughput']:.0f}", f"{1000 * step:.2f}")
        rate, total = f"{r['median_decode_throughput']:.1f}", f"{r['total_latency']:.3f}"
        shown.add_row(str(r["batch_size"]), str(r["input_len"]), str(r["output_len"]), *numbers, rate, total)
    return shown


def run(argv: list[str]) -> tuple[list[dict[str, object]], str]:
    """Measures every case and prints it at once; Ctrl-C or an error ends the list early, and what there is of it is
    written. The results, and what ended them early, "" if nothing did. Raises ThalwegError or ResultError.
    """
    parsed = parse_options(_parser(), argv)
    args: argparse.Namespace = parsed.args
    cases: list[Case] = list(itertools.product(args.batch_size, args.input_len, args.output_len))
    room = room_for(parsed.options, max(args.batch_size), max(args.input_len), max(args.output_len))
    top = ceilings_of(room)
    resolved, engine = start(room, Lengths(max(args.input_len), max(args.output_len)))
    rng, results, ended = Random(args.bench_seed), list[dict[str, object]](), "an error"
    console = Console(stderr=True)
    try:
        with Progress(console=console, disable=not console.is_terminal) as bar:
            for case in bar.track(cases, description="cases"):
                before = engine.loop.stats().acceptance
                runs = measure(engine, resolved, case, args.repeat, rng)
                drafts = engine.loop.stats().acceptance.since(before)
                timing = min(runs, key=lambda one: one.total)
                steps = [round(seconds, 7) for seconds in timing.decode]
                results.append(report(case, timing, args.run_name) | {"runs": each(runs), "decode_latencies": steps})
                if drafts.mean_length is not None:
                    results[-1] |= {"accept_length": drafts.mean_length, "accept_rate": drafts.rate}
                if top is not None:
                    covered = coverage.of_decode(engine, random_batch(resolved, case[0], case[1], rng))
                    results[-1] |= shares(resolved, case, timing, top, covered)
                print("\n".join(lines(case, timing, results[-1])))
        ended = ""
    except KeyboardInterrupt:
        ended = "Ctrl-C"
    finally:
        Console(width=shutil.get_terminal_size((UNKNOWN_WIDTH, 0)).columns).print(table(results))
        if args.result_filename:
            told = provenance("bench one-batch", argv, configuration(resolved))
            measured = {} if top is None else {"ceilings": asdict(top)}
            early = {"partial": bool(ended), "ended": ended}
            write(Path(args.result_filename), {"results": results, **early, **measured, **told})
    return results, ended


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, 1: it could not run or a result could not be written, 2: it was asked for wrongly, 130: Ctrl-C, what was
    measured is told and written.
    """
    return status("thalweg bench one-batch", lambda words: unless(run(words)[1], 0), argv)
