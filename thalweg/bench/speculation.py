"""`thalweg bench speculation`: speed of decoding by batch and by drafts a step, with an acceptance that is measured or imposed.

With random weights no draft is right; imposed, the speed is what it would be if as many were. What is written then means nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
from rich.console import Console
from rich.table import Table

from thalweg.bench.in_process import configuration, fits, positive, random_batch, room_for, time_batch
from thalweg.bench.results import ResultError, provenance, write
from thalweg.config.args import Parser, config_parser, parse_config
from thalweg.core.errors import CannotServe, ThalwegError
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved

WARM_UP_TOKENS = 8
ADAPTIVE = -1  # a width: as many as the engine chooses

Row = dict[str, object]


def _parser() -> Parser:
    parser = config_parser(
        "thalweg bench speculation",
        "Times decoding of batches of random tokens, for each number of drafts a step.",
        only=("model", "load", "memory", "schedule", "speculative"),
    )
    add = parser.add_argument_group("Batches").add_argument
    add("--batch-size", type=positive, nargs="+", default=[1], metavar="N", help="sequences at a time (default: 1)")
    add("--input-len", type=positive, default=1024, metavar="N", help="tokens of each prompt (default: 1024)")
    add("--output-len", type=positive, default=128, metavar="N", help="tokens to generate (default: 128)")
    add(
        "--widths",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3],
        metavar="N",
        help="drafts a step; -1: as many as the engine chooses, up to the largest of the others (default: 0 1 2 3)",
    )
    add(
        "--accept-length",
        type=float,
        default=0.0,
        metavar="X",
        help="tokens that a verification brings on average, imposed (default: what is really accepted)",
    )
    add("--result-filename", default="", metavar="FILE", help="write the result; .jsonl gets one line more")
    add("--bench-seed", type=int, default=1, metavar="N", help="of the random tokens (default: 1)")
    return parser


def case(engine: LocalEngine, resolved: Resolved, batch: int, args: argparse.Namespace, rng: Random) -> Row:
    """One batch: seconds of a step, tokens a second after the first step, and tokens of a verification."""
    fits(engine, args.input_len, args.output_len)
    time_batch(engine, random_batch(resolved, batch, args.input_len, rng), WARM_UP_TOKENS)
    before = engine.loop.stats()
    timing = time_batch(engine, random_batch(resolved, batch, args.input_len, rng), args.output_len)
    after = engine.loop.stats()
    verified = after.verifications - before.verifications
    seconds = sum(timing.decode)
    return {
        "batch_size": batch,
        "decode_throughput": batch * (args.output_len - 1) / seconds if seconds else 0.0,
        "step_latency": seconds / len(timing.decode) if timing.decode else 0.0,
        "steps": len(timing.decode),
        "accept_length": 1 + (after.accepted_tokens - before.accepted_tokens) / verified if verified else 1.0,
        "drafted_tokens": after.drafted_tokens - before.drafted_tokens,
    }


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="speculation", title_justify="left")
    for head in ("drafts", "batch", "ms a step", "accept length", "tok/s"):
        shown.add_column(head, justify="right")
    for row in rows:
        width = "adaptive" if row["width"] == ADAPTIVE else str(row["width"])
        step, length, rate = row["step_latency"], row["accept_length"], row["decode_throughput"]
        assert isinstance(step, float) and isinstance(length, float) and isinstance(rate, float)
        shown.add_row(width, str(row["batch_size"]), f"{1e3 * step:.2f}", f"{length:.2f}", f"{rate:.1f}")
    return shown


def run(argv: list[str]) -> list[Row]:
    """Measures every width, an engine each, and every batch. Raises ThalwegError or ResultError."""
    parsed = parse_config(_parser(), argv)
    args: argparse.Namespace = parsed.rest
    most = max([1, *args.widths])
    config = room_for(parsed.config, max(args.batch_size), args.input_len, args.output_len + most)
    resolved = resolve(config)
    if not resolved.engine.drafter:
        raise CannotServe("speculative_algorithm: nothing drafts here; use --speculative-algorithm NEXTN or NGRAM")
    if args.accept_length and args.accept_length < 1:
        raise CannotServe(f"--accept-length: a verification brings at least 1 token, got {args.accept_length}")
    rows: list[Row] = []
    for width in args.widths:
        adaptive = width == ADAPTIVE
        times = None if adaptive else ()
        settings = msgspec.structs.replace(resolved.engine, width=most if adaptive else width, times=times)
        engine = LocalEngine(msgspec.structs.replace(settings, imposed=args.accept_length))
        for batch in args.batch_size:
            rng = Random(args.bench_seed)
            rows.append({"width": width, **case(engine, resolved, batch, args, rng)})
            print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), file=sys.stderr)
        del engine
    Console().print(table(rows))
    if args.result_filename:
        told = provenance("bench speculation", argv, configuration(resolved))
        asked = {"accept_length": args.accept_length, "input_len": args.input_len, "output_len": args.output_len}
        write(Path(args.result_filename), {"results": rows, **asked, **told})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, 1: it could not start or nothing was measured."""
    try:
        return 0 if run(list(sys.argv[1:] if argv is None else argv)) else 1
    except (ThalwegError, ResultError) as error:
        print(f"thalweg bench speculation: {error}", file=sys.stderr)
        return 1
