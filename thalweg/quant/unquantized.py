"""Weights that are stored as plain numbers. Memory holds them in the model's dtype."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelChoice
from thalweg.quant.scheme import LinearProduct, Piece, Read, Take, TensorSpec


class Unquantized:
    """bf16, fp16 or fp32 weights."""

    name = "unquantized"
    operation = ""
    block = (1, 1)

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def reads(self, weight: str, take: Take) -> tuple[Read, ...]:
        return (Read(weight, take),)

    def decode(self, weight: str, tensors: Sequence[Tensor], take: Take) -> Tensor:
        return tensors[0]

    def check(self, specs: Mapping[str, TensorSpec], weight: str) -> None:
        return

    def holds(self, take: Take, shape: tuple[int, int], is_reordered: bool) -> bool:
        return False  # a parameter of the model's dtype is filled through `decode`

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        raise AssertionError("unquantized weights are held in the model's dtype, which is not the scheme's to say")

    def pieces(self, weight: str, take: Take, into: tuple[int | slice, ...]) -> tuple[Piece, ...]:
        raise CheckpointError(f"{weight} is not quantized, and memory holds quantized numbers")

    def product(self, kernels: KernelChoice) -> LinearProduct:
        from thalweg.kernels.gemm.plain import product  # needs Triton

        return product(kernels.deterministic)


UNQUANTIZED = Unquantized()


def is_plain(dtype: torch.dtype) -> bool:
    """Whether a stored tensor of this dtype is a plain number for each weight."""
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def known_fields(config: Mapping[str, Any]) -> None:
    """An unquantized checkpoint has no quantization_config."""
    assert not config
