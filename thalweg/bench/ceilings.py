"""Peak read bandwidth and matmul rates of a GPU or CPU, measured in the same run as the results compared with them."""

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
    """Peak rates of a GPU."""
    top = rates(torch.device("cuda"))
    return Ceilings(top["read"], top["bf16"], top["fp8"])


def rates(device: torch.device) -> dict[str, float]:
    """By name: "read" in bytes a second, of a read-only sum; "float32" (without tf32), "bf16" and, on a GPU, "fp8"
    (with a scale a tensor, where it has that) products of random numbers in FLOP/s. Of a CPU with the threads that
    torch has. Frees what it takes.
    """
    types = {"float32": torch.float32, "bf16": torch.bfloat16}
    if device.type != "cuda":
        return {"read": processor.read()} | {name: processor.product(dtype) for name, dtype in types.items()}
    top = {"read": _read()} | {name: _product(dtype) for name, dtype in types.items()}
    top["fp8"] = _fp8() if torch.cuda.get_device_capability() >= (8, 9) else top["bf16"]
    torch.cuda.empty_cache()
    return top


def _read() -> float:
    big = torch.rand(READ, dtype=torch.float32, device="cuda")
    return big.numel() * big.itemsize / _seconds(big.sum)


def _product(dtype: torch.dtype) -> float:
    side = PLAIN_SIDE if dtype == torch.float32 else SIDE
    a, b = (torch.randn(side, side, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: a @ b)


def _fp8() -> float:
    a, b = (torch.randn(SIDE, SIDE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    product = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return 2 * SIDE**3 / _seconds(product)


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of one call, the fastest of three rounds."""
    call()
    return min(stopwatch.rounds(call, 10, 3))
