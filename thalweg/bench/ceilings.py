"""What a GPU or a CPU does at best, measured in the same run as what is compared with it."""

from __future__ import annotations

from functools import partial
from typing import Callable

import torch

from thalweg.bench import stopwatch
from thalweg.launch.planning import processor
from thalweg.launch.planning.roofline import Ceilings

SIDE = 8192  # of the products
READ = 1 << 30  # float32 numbers, far beyond any cache
PLAIN_SIDE = 4096  # of products in float32


def measure() -> Ceilings:
    """A read-only sum, a bf16 product and, where the GPU has it, an FP8 one with a scale a tensor, all of random
    numbers. Frees what it takes.
    """
    read, bf16 = _read(), _bf16()
    fp8 = _fp8() if torch.cuda.get_device_capability() >= (8, 9) else bf16
    torch.cuda.empty_cache()
    return Ceilings(read, bf16, fp8)


def rates(device: torch.device) -> dict[str, float]:
    """By name: "read" in bytes a second; "float32" (without tf32), "bf16" and, on a GPU, "fp8" products in FLOP/s. Of a
    CPU with the threads that torch has.
    """
    if device.type != "cuda":
        types = {"float32": torch.float32, "bf16": torch.bfloat16}
        return {"read": processor.read()} | {name: processor.product(dtype) for name, dtype in types.items()}
    a, b = (torch.randn(PLAIN_SIDE, PLAIN_SIDE, device=device) for _ in range(2))
    plain = 2 * PLAIN_SIDE**3 / _seconds(lambda: a @ b)
    top = measure()
    return {"read": top.read, "float32": plain, "bf16": top.bf16, "fp8": top.fp8}


def _read() -> float:
    big = torch.rand(READ, dtype=torch.float32, device="cuda")
    return big.numel() * big.itemsize / _seconds(big.sum)


def _bf16() -> float:
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIDE**3 / _seconds(lambda: a @ b)


def _fp8() -> float:
    a, b = (torch.randn(SIDE, SIDE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return 2 * SIDE**3 / _seconds(product)


def _seconds(call: Callable[[], object]) -> float:
    """Of one call, the fastest of three rounds."""
    call()
    return min(stopwatch.rounds(call, 10, 3))
