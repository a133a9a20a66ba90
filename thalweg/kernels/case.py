"""A case of a kernel: inputs, the exact result, a tolerance, and the cost. Tests, benchmarks and rooflines read
cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.launch import triton_available

Inputs = dict[str, Any]
Run = Callable[..., Any]  # keyword arguments → a tuple of tensors


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A small correctness case."""

    name: str
    inputs: Inputs  # keyword arguments of every backend, which may edit the tensors: see `fresh_inputs`
    exact: tuple[Tensor, ...]  # in float64, by the definition and not by a backend
    tolerance: float  # of max |difference| / max |exact|; 0 is equality
    # of an ideal implementation; of operations without sizes, whose small cases are timed
    flops: int = 0
    bytes: int = 0

    def fresh_inputs(self) -> Inputs:
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.inputs.items()}

    def errors(self, results: tuple[Tensor, ...]) -> tuple[float, ...]:
        """max |difference| / max |exact| of each result; infinite where a result is not a number."""
        pairs = zip(results, self.exact, strict=True)
        return tuple(_error(result.double(), exact.double()) for result, exact in pairs)


def _error(result: Tensor, exact: Tensor) -> float:
    if result.shape != exact.shape:
        return float("inf")
    equal = result == exact  # equal infinities have no difference
    difference = (result - exact).abs().masked_fill(equal, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = exact.abs().masked_fill(exact.isinf(), 0.0).max().clamp_min(torch.finfo(torch.float64).tiny)
    return float(difference.max() / scale)


@dataclass(frozen=True, slots=True)
class TimedCase:
    """A case of a model's size, to be timed. Results are compared with the reference: float64 would take too long."""

    name: str
    # → keyword arguments of every backend, on the generator's device, new at each call, so that repeated calls do not
    # find them in a cache. The second argument is an earlier result, whose large parts may be used again.
    draw: Callable[[torch.Generator, Inputs | None], Inputs]
    backends: dict[str, Run]  # the reference first; a backend may write into its inputs
    cost: Callable[[Inputs], tuple[float, float]]  # FLOPs and bytes of an ideal implementation
    math: str  # the ceiling of the FLOPs: "float32", "bf16" or "fp8"
    tolerance: float  # of max |difference from the reference| / max |reference|
    compared: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda results: results  # what is compared of codes


Sizes = Callable[[torch.device], Iterator[TimedCase]]


def no_sizes(device: torch.device) -> Iterator[TimedCase]:
    """For an operation whose small cases are timed instead."""
    return iter(())


@dataclass(frozen=True, slots=True)
class Operation:
    """The cases and backends of one operation."""

    cases: Callable[[torch.Generator], Iterator[KernelCase]]
    backends: dict[str, Run]  # the reference first
    sizes: Sizes = no_sizes


def with_triton(reference: Run, triton: Run, device: torch.device | None = None) -> dict[str, Run]:
    """The reference, and the Triton kernels where they run: on a GPU, to which inputs are copied. A device: only if it
    is a GPU.
    """

    def on_gpu(**inputs: Any) -> tuple[Tensor, ...]:
        device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
        there = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return tuple(result.to(device) for result in triton(**there))

    wanted = device is None or device.type == "cuda"
    return {"ref": reference} | ({"triton": on_gpu} if wanted and triton_available() else {})


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)


def draw_tensor(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers on the generator's device; e4m3 ones have random bits, of magnitudes below 2."""
    if dtype == torch.float8_e4m3fn:
        bits = torch.randint(0, 256, shape, generator=generator, device=generator.device, dtype=torch.uint8)
        return bits.bitwise_and_(0xBF).view(dtype)
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype)


def fp8_weight(generator: torch.Generator, *shape: int, scale: float = 0.02) -> tuple[Tensor, Tensor]:
    """Random e4m3 codes, and scales up to `scale` for blocks of 128 × 128 of the last two dims. Scales lie far from one
    another, so that a wrong one shows beside the noise of FP8.
    """
    *lead, rows, columns = shape
    blocks = (*lead, -(-rows // 128), columns // 128)
    scales = torch.rand(*blocks, generator=generator, device=generator.device).mul_(scale)
    return draw_tensor(generator, *shape, dtype=torch.float8_e4m3fn), scales


def size(*tensors: Tensor) -> int:
    """Bytes of these tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def model_dtype(device: torch.device) -> torch.dtype:
    """The dtype of a model's activations on this device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def tolerance_of(dtype: torch.dtype) -> float:
    """A tolerance for sums of some hundred products in this dtype."""
    return {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
