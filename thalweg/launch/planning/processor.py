"""Read bandwidth and matmul rate of this machine's CPU, measured in a moment: no data sheet has them."""

from __future__ import annotations

import time
from typing import Callable

import torch

from thalweg.launch.planning.roofline import Ceilings

READ = 1 << 26  # float32 numbers, beyond most caches
SIDE = 1024  # of the products
ROUNDS = 5


def measure(threads: int) -> Ceilings:
    """A sum over 256 MiB and float32 products on so many threads; a third of a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rate = product(torch.float32)
        return Ceilings(read(), rate, rate)
    finally:
        torch.set_num_threads(before)


def read() -> float:
    """Bytes a second of a read-only sum on the threads that torch has, the fastest of some rounds."""
    return 4 * READ / _seconds(torch.ones(READ).sum)


def product(dtype: torch.dtype) -> float:
    """FLOP/s of a product of matrices of this type, measured alike."""
    square = torch.rand(SIDE, SIDE).to(dtype)
    return 2 * SIDE**3 / _seconds(lambda: square @ square)


def _seconds(call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best
