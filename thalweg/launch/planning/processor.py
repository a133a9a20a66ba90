"""What this machine's processor does at best, measured in a moment: a floor of a CPU has no data sheet."""

from __future__ import annotations

import time
from typing import Callable

import torch

from thalweg.launch.planning.floors import Ceilings

READ = 1 << 26  # float32 numbers, beyond most caches
SIDE = 1024  # of the products
ROUNDS = 5


def measure(threads: int) -> Ceilings:
    """A sum over 256 MiB and float32 products, the fastest of some rounds each, on so many threads; a third of a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        numbers, square = torch.ones(READ), torch.rand(SIDE, SIDE)
        read = 4 * READ / _seconds(numbers.sum)
        rate = 2 * SIDE**3 / _seconds(lambda: square @ square)
    finally:
        torch.set_num_threads(before)
    return Ceilings(read, rate, rate)


def _seconds(call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best
