"""A case of a kernel: inputs, the exact result, how near one has to come, and what it costs. Tests, benchmarks and
rooflines read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

Run = Callable[..., Any]  # keyword arguments → tensors


@dataclass(frozen=True, slots=True)
class KernelCase:
    """inputs: keyword arguments of every backend; a backend may edit tensors among them, so it is given clones. exact:
    in float64, by the definition and not by any backend. tolerance: of max |difference| / max |exact|; 0 is equality.
    flops, bytes: what an ideal implementation computes and moves.
    """

    name: str
    inputs: dict[str, Any]
    exact: tuple[Tensor, ...]
    tolerance: float
    flops: int
    bytes: int

    def fresh_inputs(self) -> dict[str, Any]:
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


Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TimedCase:
    """A case of a size that models have, to be timed on one device: held against the reference there, since float64
    would take too long.

    draw: keyword arguments of every backend, on the generator's device, new each time, so that calls in a row do not
    find theirs in a cache. It is given those drawn before, of which it may keep what no cache holds. backends: by name,
    the reference first; they may write into what they are given. cost: FLOPs and bytes of an ideal implementation with
    these inputs. math: which ceiling FLOPs are held against, "float32", "bf16" or "fp8". tolerance: of max |difference
    from the reference| / max |reference|. compared: what of the results is compared, where they are codes.
    """

    name: str
    draw: Callable[[torch.Generator, Inputs | None], Inputs]
    backends: dict[str, Run]
    cost: Callable[[Inputs], tuple[float, float]]
    math: str
    tolerance: float
    compared: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda results: results


Sizes = Callable[[torch.device], Iterator[TimedCase]]


def no_sizes(device: torch.device) -> Iterator[TimedCase]:
    """Of an operation whose small cases are timed instead."""
    return iter(())


@dataclass(frozen=True, slots=True)
class Operation:
    """What a folder of kernels offers: its cases, drawn from a generator; its backends by name, the reference first;
    and its cases of models' sizes on a device.
    """

    cases: Callable[[torch.Generator], Iterator[KernelCase]]
    backends: dict[str, Run]
    sizes: Sizes = no_sizes


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)


def draw_tensor(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers on the generator's device; e4m3 ones have random bits, of magnitudes below 2."""
    if dtype == torch.float8_e4m3fn:
        bits = torch.randint(0, 256, shape, generator=generator, device=generator.device, dtype=torch.uint8)
        return bits.bitwise_and_(0xBF).view(dtype)
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype)


def size(*tensors: Tensor) -> int:
    """Bytes of these tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def tolerance_of(dtype: torch.dtype) -> float:
    """A tolerance for sums of some hundred products in this dtype."""
    return {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
