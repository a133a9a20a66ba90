"""`thalweg bench structured`: the step rate of a batch whose rows are all under a grammar, against that of the same
batch without.

The two take turns, so that a machine that does other things too slows down both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from rich.console import Console
from rich.progress import Progress

from thalweg.bench.in_process import positive
from thalweg.bench.results import provenance, write
from thalweg.bench.usage import Parser, status
from thalweg.config.tree import options_of
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve

PROMPT = 32  # tokens
WARM_UP_STEPS = 8
# Long enough that no row ends while it is measured; strings, numbers and choices take turns.
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "mood": {"enum": ["merry", "sad", "neither"]},
        },
        "required": ["name", "count", "mood"],
        "additionalProperties": False,
    },
}
HELD = Grammar("json_schema", json.dumps(SCHEMA))


def step_seconds(engine: LocalEngine, batch: int, steps: int, seed: int, grammar: Grammar) -> float:
    """The median duration of a decode step of `batch` rows."""
    rng = Random(seed)
    for i in range(batch):
        prompt = [rng.randrange(3, engine.vocab - 64) for _ in range(PROMPT)]
        params = SamplingParams(temperature=1.0, seed=seed + i, max_tokens=steps + 24, ignore_eos=not grammar.is_set)
        engine.submit(prompt, params, grammar=grammar)
    started: set[int] = set()
    while len(started) < batch:
        started |= {delta.uid for delta in engine.step()}
    durations = []
    for _ in range(steps):
        before = time.perf_counter()
        engine.step()
        durations.append(time.perf_counter() - before)
    while not engine.idle:
        engine.step()
    return median(durations)


@dataclass(slots=True)
class Mode:
    """The batch with the schedule so or so. rounds: seconds of a step without and with the grammar, of each."""

    overlap: bool
    rounds: list[tuple[float, float]] = field(default_factory=list)

    def measure(self, args: argparse.Namespace, progress: Progress) -> None:
        """Raises ThalwegError. What is done before an interruption stays in `rounds`."""
        wishes = {"context_length": 1024, "enable_overlap_schedule": self.overlap, "max_running_requests": args.batch}
        engine = LocalEngine(resolve(options_of(model=args.model, **wishes), progress=False).engine)
        for grammar in (NO_GRAMMAR, HELD):
            step_seconds(engine, args.batch, WARM_UP_STEPS, 0, grammar)
        task = progress.add_task(f"overlap {'on' if self.overlap else 'off'}", total=args.rounds)
        for seed in range(args.rounds):
            free, held = (step_seconds(engine, args.batch, args.steps, seed, grammar) for grammar in (NO_GRAMMAR, HELD))
            self.rounds.append((free, held))
            progress.advance(task)

    def row(self, args: argparse.Namespace) -> dict[str, object]:
        """Step rates (a second) of both, medians over the rounds, and the share that is kept."""
        free, held = (median(seconds) for seconds in zip(*self.rounds, strict=True))
        return {
            "overlap": self.overlap,
            "batch": args.batch,
            "steps": args.steps,
            "rounds": len(self.rounds),
            "free_steps_per_second": 1 / free,
            "grammar_steps_per_second": 1 / held,
            "kept": free / held,
        }


def line(row: Mapping[str, object]) -> str:
    return (
        f"overlap {'on ' if row['overlap'] else 'off'}  {row['free_steps_per_second']:.1f} steps/s without, "
        f"{row['grammar_steps_per_second']:.1f} with a grammar in each of {row['batch']} rows: {row['kept']:.1%} kept"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="thalweg bench structured",
        description="What grammars cost: the step rate of a batch with and without them.",
    )
    add = parser.add_argument
    add("--model", "--model-path", default="models/tiny", help="folder of the checkpoint (default: %(default)s)")
    add("--batch", type=positive, default=32, metavar="N", help="sequences at a time (default: %(default)s)")
    add("--steps", type=positive, default=60, metavar="N", help="decode steps of a round (default: %(default)s)")
    add("--rounds", type=positive, default=5, metavar="N", help="of both in turn; medians count (default: %(default)s)")
    add("--output-file", "--output", default="", metavar="FILE", help="write the result as JSON")
    return parser


def run(words: Sequence[str]) -> int:
    """Measures and prints; Ctrl-C keeps the rounds that are done. Raises ThalwegError or ResultError."""
    args = _parser().parse_args(words)
    modes, console, ended = (Mode(False), Mode(True)), Console(stderr=True), ""
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            for mode in modes:
                mode.measure(args, progress)
    except KeyboardInterrupt:
        ended = "Ctrl-C"
    rows = [mode.row(args) for mode in modes if mode.rounds]
    for row in rows:
        print(line(row))
    if args.output_file and rows:
        source = {"schema": SCHEMA, "prompt_tokens": PROMPT, "model": args.model}
        result = {"results": rows, "partial": bool(ended), "ended": ended}
        write(Path(args.output_file), {**provenance("bench structured", list(words), source), **result})
    if ended:
        print(f"PARTIAL: {ended}; the numbers are of the rounds that were done", file=sys.stderr)
    return 130 if ended else 0


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: something is wrong with the model or the file; 2: it was asked for wrongly; 130: Ctrl-C, what was
    measured is told and written.
    """
    return status("thalweg bench structured", run, argv)
