"""Times forwards by decode rows, prompt tokens and context, for `benchmarks/scheduling.py`.

    python benchmarks/gpu/step_times.py FOLDER --result-filename benchmarks/simulation/step_times_h100_v2_lite.json

Weights are random. Sampling is not part of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from thalweg.bench.results import provenance, write
from thalweg.config.tree import options_of
from thalweg.core.plan import Row
from thalweg.core.step_times import StepTimes
from thalweg.engine.calibration import Calibrator
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve

ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 7900)
LONG = 30000  # tokens of a long context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--result-filename", type=Path, required=True)
    args = parser.parse_args()
    wishes = {"max_running_requests": 257, "chunked_prefill_size": 8192, "context_length": 40000, "warmup": False}
    options = options_of(model=str(args.model), load_format="dummy", random_seed=1, **wishes)
    engine = LocalEngine(resolve(options, weights=False).engine)
    of = Calibrator(engine.config, engine.runner)

    def context(rows: int, tokens: int) -> float:
        return of.forward_seconds(Row(slot, slot, tokens - 1, 1, 0, True) for slot in range(rows))

    def chunk(start: int) -> float:
        return of.forward_seconds([Row(0, 0, start, 4096, 0, True)])

    def line(rows: int, tokens: Iterable[int]) -> tuple[tuple[int, float], ...]:
        return tuple((count, of.mixed_seconds(rows, count)) for count in tokens)

    times = StepTimes(
        decode=tuple((rows, of.mixed_seconds(rows, 0)) for rows in ROWS),
        mixed=tuple((rows, line(rows, TOKENS)) for rows in ROWS),
        context=1024,
        context_seconds=(context(64, 16384) - context(64, 1024)) / (64 * (16384 - 1024)),
        pair_seconds=(chunk(LONG) - chunk(0)) / (4096 * LONG),
    )
    about = provenance("benchmarks/gpu/step_times.py", sys.argv[1:], {})
    write(args.result_filename, {"times": msgspec.to_builtins(times), **about})


if __name__ == "__main__":
    main()
