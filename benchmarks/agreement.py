"""Microseconds in which data-parallel ranks agree on a step: each writes its record, and reads those of all.

    python -m benchmarks.agreement [--ranks 4] [--rounds 20000] [--out FILE]

The ranks do nothing else, so this is what agreeing adds to a step. Needs a core for each rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

from thalweg.bench.results import provenance
from thalweg.core.agreement import RankStep, coordinate_step
from thalweg.parallel.shared_memory import WakePipe
from thalweg.parallel.step_records import StepExchange, StepRecords

WARM = 500  # rounds that are not counted


def rank(records: StepRecords, number: int, rounds: int, answer: Connection) -> None:
    exchange, seconds = StepExchange(records, number), []
    for step in range(rounds + WARM):
        begun = time.perf_counter()
        coordinate_step(exchange.exchange(RankStep(step, rows=16, tokens=16, sampled_rows=16)))
        seconds.append(time.perf_counter() - begun)
    answer.send(seconds[WARM:])


def exchange_us(ranks: int, rounds: int) -> tuple[float, float]:
    """Median and 99th percentile of the microseconds of a round, of all ranks."""
    spawn, ends = multiprocessing.get_context("spawn"), [multiprocessing.Pipe() for _ in range(ranks)]
    records = StepRecords([WakePipe() for _ in ends], [f"rank {i}" for i in range(ranks)], timeout=30.0)
    processes = [
        spawn.Process(target=rank, args=(records, number, rounds, there)) for number, (_, there) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    us = [1e6 * seconds for here, _ in ends for seconds in here.recv()]
    for process in processes:
        process.join()
    return round(median(us), 2), round(quantiles(us, n=100)[-1], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    median_us, p99_us = exchange_us(asked.ranks, asked.rounds)
    result = {
        "ranks": asked.ranks,
        "rounds": asked.rounds,
        "median_us": median_us,
        "p99_us": p99_us,
        **provenance("agreement.py", sys.argv[1:], {}),
    }
    print(json.dumps({name: result[name] for name in ("ranks", "rounds", "median_us", "p99_us")}))
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
