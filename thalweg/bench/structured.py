"""`thalweg bench structured`: the step rate of a batch whose rows all have a grammar, against the same batch without.
The two alternate, so that other work on the machine slows both.
"""

from __future__ import annotations

import json
from contextlib import closing
from random import Random
from statistics import median
from typing import Any

from thalweg.bench.command import OUTPUT, CommandParser, PartialRun, add_flags, command
from thalweg.bench.display import progress_bar
from thalweg.bench.in_process import Generation, generate
from thalweg.bench.results import save
from thalweg.config.tree import options_of
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve

PROMPT_TOKENS = 32
WARM_UP_STEPS = 8
# Long enough that no row ends while it is measured; strings, numbers and choices alternate.
SCHEMA = """
{"type": "array", "minItems": 200, "items": {
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 24},
    "count": {"type": "integer", "minimum": 0, "maximum": 9999},
    "mood": {"enum": ["merry", "sad", "neither"]}
  },
  "required": ["name", "count", "mood"],
  "additionalProperties": false
}}"""
GRAMMARS = (NO_GRAMMAR, Grammar("json_schema", SCHEMA))
FLAGS = f"""
--model --model-path  model=models/tiny  folder of the checkpoint
--batch               count=32            sequences at a time
--steps               count=60            decode steps of a round
--rounds              count=5             of both in turn; the median counts
{OUTPUT}
"""
LINE = (
    "overlap {switch:<3}  {free_steps_per_second:.1f} steps/s without, {grammar_steps_per_second:.1f} with a grammar in"
    " each of {batch} rows: {kept:.1%} kept"
)


def step_seconds(engine: LocalEngine, batch: int, steps: int, seed: int, grammar: Grammar) -> float:
    """The median duration of a decode step of `batch` rows."""
    rng, requests, durations = Random(seed), list[Generation](), list[float]()
    for i in range(batch):
        prompt = [rng.randrange(3, engine.vocab - 64) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=1.0, seed=seed + i, max_tokens=steps + 24, ignore_eos=not grammar.is_set)
        requests.append(Generation(prompt, params, grammar))
    with closing(generate(engine, requests)) as run:
        for step in run:
            if step.started == batch and len(durations) < steps:
                durations.append(step.end - step.begin)
    return median(durations)


@command("thalweg bench structured")
def main(argv: list[str]) -> int:
    """0: done; 1: an error; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    text = "The cost of grammars: the step rate of a batch with and without them."
    parser = CommandParser(prog="thalweg bench structured", description=text)
    add_flags(parser, "", FLAGS)
    args = parser.parse_args(argv)
    rows = list[dict[str, Any]]()
    with PartialRun() as run, progress_bar("rounds", 2 * args.rounds) as bar:
        for overlap in (False, True):
            wishes = {"context_length": 1024, "enable_overlap_schedule": overlap, "max_running_requests": args.batch}
            engine = LocalEngine(resolve(options_of(model=args.model, **wishes), progress=False).engine)
            for grammar in GRAMMARS:
                step_seconds(engine, args.batch, WARM_UP_STEPS, 0, grammar)
            row: dict[str, Any] = {"overlap": overlap, "batch": args.batch, "steps": args.steps}
            rounds = list[list[float]]()
            for seed in range(args.rounds):
                rounds.append([step_seconds(engine, args.batch, args.steps, seed, grammar) for grammar in GRAMMARS])
                free, masked = (median(seconds) for seconds in zip(*rounds, strict=True))
                rates = {"free_steps_per_second": 1 / free, "grammar_steps_per_second": 1 / masked}
                row |= {"rounds": len(rounds), **rates, "kept": free / masked}
                if not seed:
                    rows.append(row)
                bar.advance()
    for row in rows:
        print(LINE.format(switch="on" if row["overlap"] else "off", **row))
    if rows:
        settings = {"schema": json.loads(SCHEMA), "prompt_tokens": PROMPT_TOKENS, "model": args.model}
        save(args.output_file, "bench structured", argv, settings, {"results": rows, **run.as_json()})
    return run.finish()
