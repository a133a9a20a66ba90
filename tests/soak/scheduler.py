"""Thousands of random mixes on the simulated device, each compared with a sequential decoder.

python -m tests.soak.scheduler --mixes 20000
"""

from __future__ import annotations

import argparse
import time

from rich.progress import track

from tests.null.sim.mixes import Result, mix
from tests.soak.report import write


def main(mixes: int, seed: int) -> Result:
    """Runs `mixes` mixes; raises at the first whose tokens, pages or slots are wrong."""
    started = time.monotonic()
    results = []
    for i in track(range(seed, seed + mixes), description="mixes"):
        try:
            results.append(mix(i))
        except Exception as error:
            error.add_note(f"again: mix({i})")
            raise
    total = Result(*map(sum, zip(*results, strict=True)))
    command = f"python -m tests.soak.scheduler --mixes {mixes} --seed {seed}"
    path = write("scheduler", command, time.monotonic() - started, {"mixes": mixes, **total._asdict()})
    print(f"{mixes} mixes: every token equals the sequential decoder's; {path.name} written")
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    main(args.mixes, args.seed)
