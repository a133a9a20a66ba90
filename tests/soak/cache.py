"""Millions of random operations on the page allocator and the prefix cache.

python -m tests.soak.cache --operations 1000000
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from rich.progress import track

from tests.null.sim.cache_driver import Driver
from tests.soak.report import write

CHUNK = 5000  # operations of one driver; the next seed draws another pool
POOLS = ((12, 1), (25, 2), (40, 3), (80, 2), (200, 2), (60, 4))  # pages, page size


def main(operations: int, seed: int) -> Counter[str]:
    """Runs `operations` operations; raises AssertionError at the first wrong one."""
    started = time.monotonic()
    total: Counter[str] = Counter()
    chunks = -(-operations // CHUNK)
    for i in track(range(chunks), description="cache"):
        pages, size = POOLS[i % len(POOLS)]
        size_of_chunk = min(CHUNK, operations - i * CHUNK)
        try:
            total += Driver(seed + i, pages, size, audit=25).run(size_of_chunk)
        except Exception as error:
            error.add_note(f"again: Driver({seed + i}, {pages}, {size}, audit=1).run({size_of_chunk})")
            raise
    command = f"python -m tests.soak.cache --operations {operations} --seed {seed}"
    path = write(
        "cache", command, time.monotonic() - started, {"operations": operations, **dict(sorted(total.items()))}
    )
    print(f"{operations} operations: nothing leaked, freed twice or shared wrongly; {path.name} written")
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    main(args.operations, args.seed)
