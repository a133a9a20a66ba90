"""The interface of quantization schemes.

A scheme belongs to one stored weight, not to a model: neighbouring weights of a checkpoint may have different ones. The
loader, `plan`, weight updates and `make-checkpoint` ask the same object. Names, shapes and bytes need neither Triton
nor a GPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig

Take = tuple[slice, ...]  # a slice of a tensor by its leading dims; () is all of it
Index = tuple[int | slice, ...]
ParameterShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # by suffix of the parameter's name: shape and dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Read(NamedTuple):
    """A slice of a checkpoint's tensor."""

    name: str
    take: Take = ()


class StoredSlice(NamedTuple):
    """A slice of a checkpoint's tensor that memory holds as it is stored."""

    read: Read
    suffix: str  # behind the name of the parameter that it goes into
    into: Index  # the slice of that parameter


class LinearProduct(Protocol):
    """y [M, N] = x Wᵀ on a GPU, bf16."""

    def __call__(
        self, x: Any, weights: Sequence[Tensor], residual_MN: Tensor | None = None, out_MN: Tensor | None = None
    ) -> Tensor:
        """x: [M, K] or a norm of it. weights: the parameters of `Quantized.parameters`, in order. residual_MN: the
        result is added to it, in place. out_MN: the result is stored there. Returns the tensor that holds the result.
        """


class Scheme(ABC):
    """Storage of a weight in a checkpoint."""

    name: str
    code_spread: float = 1.0  # standard deviation of the stored numbers of a random weight

    @abstractmethod
    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """The stored tensors of a weight, itself first. `weight` has the dtype of an unquantized checkpoint."""

    @abstractmethod
    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        """Raises CheckpointError if the tensors found for this weight, by name, do not fit each other in shape or
        dtype.
        """

    @abstractmethod
    def reads(self, weight: str, take: Take) -> tuple[Read, ...]:
        """Tensor slices that `decode` needs for a slice of the weight."""

    @abstractmethod
    def decode(self, weight: str, tensors: Sequence[Tensor], take: Take) -> Tensor:
        """The numbers of the slice, from the tensors that `reads` names. Pure. Raises CheckpointError if scales do not
        fit.
        """


class Quantized(Scheme):
    """A scheme whose weights memory can hold as they are stored, since a GPU's kernels multiply by them."""

    operation: str  # the option that chooses the backend of its products, e.g. "fp8_gemm"
    block: tuple[int, int]  # rows and columns that share a scale
    quantizes_activations: bool  # whether its products multiply quantized activations
    has_expert_kernels: bool  # whether grouped experts multiply by it, too

    @abstractmethod
    def holds(self, take: Take, shape: tuple[int, ...], is_reordered: bool) -> bool:
        """Whether memory can hold this slice of a weight of this shape as it is stored. is_reordered: loading permutes
        its rows.
        """

    @abstractmethod
    def parameters(self, shape: tuple[int, ...]) -> ParameterShapes:
        """Shapes of the parameters for a weight of this shape; leading dims stack weights."""

    @abstractmethod
    def pieces(self, weight: str, take: Take, into: Index) -> tuple[StoredSlice, ...]:
        """Mapping of a slice of the stored weight to these parameters. Raises CheckpointError if it cuts a block."""

    @abstractmethod
    def product(self, kernels: KernelConfig) -> LinearProduct:
        """The GPU kernel that multiplies by held weights. Imports Triton."""


class Unquantized(Scheme):
    """Plain numbers. Memory holds them in the model's dtype."""

    name = "unquantized"

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        dtype = found[weight.name].dtype
        if dtype.is_floating_point != weight.dtype.is_floating_point:
            raise CheckpointError(f"{weight.name} is {dtype}, and the model keeps it as {weight.dtype}")

    def reads(self, weight: str, take: Take) -> tuple[Read, ...]:
        return (Read(weight, take),)

    def decode(self, weight: str, tensors: Sequence[Tensor], take: Take) -> Tensor:
        return tensors[0]


UNQUANTIZED = Unquantized()
