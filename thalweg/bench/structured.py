"""`thalweg bench structured`: the step rate of a batch whose rows are all under a grammar, against that of the same batch without.

The two take turns, so that a machine that does other things too slows down both."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

from thalweg.bench.results import ResultError, provenance, write
from thalweg.config.tree import config_of
from thalweg.core.errors import ThalwegError
from thalweg.core.grammar import FREE, Grammar
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve

PROMPT = 32  # tokens
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
        params = SamplingParams(temperature=1.0, seed=seed + i, max_tokens=steps + 24, ignore_eos=not grammar.on)
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


def measure(model: str, batch: int, steps: int, rounds: int, overlap: bool) -> dict[str, object]:
    """Step rates (a second) of both, median over the rounds, and the share that is kept."""
    config = config_of(model=model, context_length=1024, enable_overlap_schedule=overlap, max_running_requests=batch)
    engine = LocalEngine(resolve(config, progress=False).engine)
    for grammar in (FREE, HELD):
        step_seconds(engine, batch, 8, 0, grammar)
    free, held = [], []
    for seed in range(rounds):
        free.append(step_seconds(engine, batch, steps, seed, FREE))
        held.append(step_seconds(engine, batch, steps, seed, HELD))
    return {
        "overlap": overlap,
        "batch": batch,
        "steps": steps,
        "rounds": rounds,
        "free_steps_per_second": 1 / median(free),
        "grammar_steps_per_second": 1 / median(held),
        "kept": median(free) / median(held),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a mode; 1 where something is wrong with the model or the file."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="thalweg bench structured", description=__doc__)
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    asked = parser.parse_args(words)
    try:
        found = [measure(asked.model, asked.batch, asked.steps, asked.rounds, overlap) for overlap in (False, True)]
        for one in found:
            print(
                f"overlap {'on ' if one['overlap'] else 'off'}  {one['free_steps_per_second']:.1f} steps/s without, "
                f"{one['grammar_steps_per_second']:.1f} with a grammar in each of {one['batch']} rows: "
                f"{one['kept']:.1%} kept"
            )
        if asked.output is not None:
            source = {"schema": SCHEMA, "prompt_tokens": PROMPT, "model": asked.model}
            write(asked.output, {**provenance("bench structured", words, source), "results": found})
    except (ThalwegError, ResultError) as error:
        print(f"structured: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
