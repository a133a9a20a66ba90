"""A case of a kernel: inputs, the exact result, how near one has to come, and what it costs. Tests, benchmarks and rooflines read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

Run = Callable[..., Any]  # keyword arguments → tensors


@dataclass(frozen=True, slots=True)
class Case:
    """inputs: keyword arguments of every backend; a backend may edit tensors among them, so it is given clones.
    exact: in float64, by the definition and not by any backend. tolerance: of max |difference| / max |exact|; 0 is equality.
    flops, bytes: what an ideal implementation computes and moves."""

    name: str
    inputs: dict[str, Any]
    exact: tuple[Tensor, ...]
    tolerance: float
    flops: int
    bytes: int

    def given(self) -> dict[str, Any]:
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.inputs.items()}

    def errors(self, got: tuple[Tensor, ...]) -> tuple[float, ...]:
        """max |difference| / max |exact| of each result; infinite where it is not a number."""
        pairs = zip(got, self.exact, strict=True)
        return tuple(_error(result.double(), exact.double()) for result, exact in pairs)


def _error(got: Tensor, exact: Tensor) -> float:
    if got.shape != exact.shape:
        return float("inf")
    same = got == exact  # equal infinities have no difference
    difference = (got - exact).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    scale = exact.abs().masked_fill(exact.isinf(), 0.0).max().clamp_min(torch.finfo(torch.float64).tiny)
    return float(difference.max() / scale)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a folder of kernels offers: its cases, drawn from a generator, and its backends by name, the reference first."""

    cases: Callable[[torch.Generator], Iterator[Case]]
    backends: dict[str, Run]


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)


def size(*tensors: Tensor) -> int:
    """Bytes of these tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def precision(dtype: torch.dtype) -> float:
    """A tolerance for sums of some hundred products in this dtype."""
    return {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
