"""The interface of quantization schemes.

A scheme belongs to one stored weight, not to a model: neighbouring weights of a checkpoint may have different ones. The
loader, `plan`, weight updates and `make-checkpoint` ask the same object. Names, shapes and bytes need neither Triton
nor a GPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.quantize.ref import Activations

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


class Draw(NamedTuple):
    """How a random checkpoint fills a stored tensor: normal numbers, or, without a spread, uniform bits."""

    centre: float = 0.0
    spread: float | None = None


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

    def is_stored(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> bool:
        """Whether a checkpoint has the weight in this scheme, by its names."""
        return self.stored(weight)[0].name in found

    def resolve(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> Scheme:
        """The scheme with what configurations leave open and headers say. Raises CheckpointError if the tensors found
        for this weight, by name, do not fit each other in shape or dtype.
        """
        self.check(weight, found)
        return self

    @abstractmethod
    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        """Raises CheckpointError as `resolve`."""

    def beside(self, weight: TensorSpec) -> tuple[str, ...]:
        """Names of tensors that a checkpoint may have with this weight, and that nothing reads."""
        return ()

    def draws(self, weight: TensorSpec, spread: float) -> tuple[Draw, ...]:
        """How to draw each stored tensor of a random weight with this standard deviation. Scales are unlike one
        another, so that a wrong one shows.
        """
        step = spread / self.code_spread
        codes, *scales = self.stored(weight)
        return Draw(0.0, self.code_spread if scales else spread), *[Draw(step, step / 10) for _ in scales]

    @abstractmethod
    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        """Tensor slices that `decode` needs for a slice of the weight. Raises CheckpointError for a slice that cuts
        what is packed together.
        """

    @abstractmethod
    def decode(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Tensor:
        """The numbers of the slice, from the tensors that `reads` names. Pure. Raises CheckpointError if scales do not
        fit.
        """


class Quantized(Scheme):
    """A scheme whose weights memory can hold as codes, since a GPU's kernels multiply by them."""

    operation: str  # the option that chooses the backend of its products, e.g. "fp8_gemm"
    block: tuple[int, int]  # rows and columns that share a scale
    quantizes_activations: bool  # whether its products multiply quantized activations
    reads_codes: (
        bool  # whether these are the codes of `kernels.quantize.triton.quantize`, which other kernels write too
    )
    activations: Activations | None = (
        None  # how inputs are rounded on any device; a GPU's FP8 blocks round by themselves
    )
    is_fp4: bool = False  # codes that tensor cores of a B200 or an MI355X multiply
    has_expert_kernels: bool  # whether grouped experts multiply by it, too
    note: str = ""  # what a user should know of how it is computed

    @property
    def memory(self) -> Hashable:
        """How memory holds it: weights whose values are equal can lie in one parameter."""
        return self.name, self.block

    @abstractmethod
    def holds(self, take: Take, shape: tuple[int, ...], is_reordered: bool) -> bool:
        """Whether memory can hold this slice of a weight of this shape as codes. is_reordered: loading permutes its
        rows.
        """

    @abstractmethod
    def parameters(self, shape: tuple[int, ...]) -> ParameterShapes:
        """Shapes of the parameters for a weight of this shape; leading dims stack weights."""

    @abstractmethod
    def pack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> dict[str, Tensor]:
        """What the parameters hold of the slice, by suffix, from the tensors that `reads` names. Pure."""

    @abstractmethod
    def places(self, into: Index) -> dict[str, Index]:
        """The slice of each parameter, by suffix, for a slice of the weight."""

    @abstractmethod
    def product(self, kernels: KernelConfig) -> LinearProduct:
        """The GPU kernel that multiplies by held weights. Imports Triton."""

    def computes_norm(self, kernels: KernelConfig) -> bool:
        """Whether this kernel computes a norm of one row itself."""
        return False


class Unquantized(Scheme):
    """Plain numbers. Memory holds them in the model's dtype."""

    name = "unquantized"

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        dtype = found[weight.name].dtype
        if dtype.is_floating_point != weight.dtype.is_floating_point:
            raise CheckpointError(f"{weight.name} is {dtype}, and the model keeps it as {weight.dtype}")

    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        return (Read(weight.name, take),)

    def decode(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Tensor:
        return tensors[0]


UNQUANTIZED = Unquantized()


class CutError(CheckpointError):
    """A slice of a weight begins or ends inside what is stored together."""


def outward(part: slice, unit: int) -> slice:
    """The groups of `unit` rows or columns that a slice touches; unit 0 is one group of all."""
    if not unit or part.start is None and part.stop is None:
        return slice(None)
    return slice((part.start or 0) // unit, None if part.stop is None else -(-part.stop // unit))


def both(take: Take) -> tuple[slice, slice]:
    """The rows and columns of a slice of a matrix."""
    rows, columns = (*take, slice(None), slice(None))[:2]
    return rows, columns


def check_cut(weight: TensorSpec, take: Take, units: tuple[int, int], scheme: str) -> None:
    """Raises CutError for a slice that begins or ends inside `units` rows or columns, naming the legal ranks."""
    for part, unit, size, what in zip(both(take), units, weight.shape, ("rows", "columns"), strict=True):
        start, stop, _ = part.indices(size)
        if start % unit or stop % unit and stop != size:
            legal = [n for n in range(1, size // unit + 1) if size % (n * unit) == 0]
            raise CutError(
                f"{weight.name} is {scheme}, and a rank's slice {start}:{stop} cuts {unit} {what} that are stored"
                f" together: let {', '.join(map(str, legal)) or 'no other'} ranks share its {size} {what}"
            )
