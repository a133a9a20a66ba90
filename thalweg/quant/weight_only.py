"""What schemes have in common whose products multiply activations by codes of 4 or 8 bits: how memory holds them
(`kernels.weight_only.ref.Codes`), how they are dequantized and multiplied. Activations have 16 bits, or are rounded to
8 where the checkpoint says so and kernels do it.

A format adds how its tensors are named, cut and unpacked.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.quantize.ref import Activations
from thalweg.kernels.weight_only.ref import FOUR_BITS, Codes, KernelCodes, arranged, dequantize
from thalweg.quant.scheme import Index, LinearProduct, ParameterShapes, Quantized, Take, TensorSpec

CODE_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
SPREADS = {"int4": 4.61, "uint4": 6.52, "e2m1": 2.93, "int8": 73.9, "e4m3": 64.0}  # of uniform bits, of normal e4m3
KERNEL_GROUPS = (0, 16, 32, 64, 128)


class CodesInMemory(NamedTuple):
    """How memory holds a weight."""

    kind: str
    group: int  # columns that share a scale; 0: the row's is all
    scale: torch.dtype | None
    has_zero: bool = False
    has_row: bool = False
    activations: Activations | None = None


@dataclass(frozen=True)
class WeightOnly(Quantized):
    """A scheme whose weights memory holds as `KernelCodes`."""

    operation = "weight_only"
    reads_codes = False
    has_expert_kernels = True

    @property
    @abstractmethod
    def codes(self) -> CodesInMemory: ...

    @abstractmethod
    def unpack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Codes:
        """The slice, from the tensors that `reads` names. Pure."""

    @property
    def memory(self) -> Hashable:
        return self.codes

    @property
    def activations(self) -> Activations | None:  # type: ignore[override]
        return self.codes.activations

    @property
    def quantizes_activations(self) -> bool:  # type: ignore[override]
        return self.activations is not None

    @property
    def is_fp4(self) -> bool:  # type: ignore[override]
        return self.codes.kind == "e2m1"

    @property
    def code_spread(self) -> float:  # type: ignore[override]
        return SPREADS[self.codes.kind]

    @property
    def block(self) -> tuple[int, int]:  # type: ignore[override]
        return 1, self.codes.group

    def decode(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Tensor:
        return dequantize(self.unpack(weight, tensors, take))

    def holds(self, take: Take, shape: tuple[int, ...], is_reordered: bool) -> bool:
        group, kind = self.codes.group, self.codes.kind
        is_group = group in KERNEL_GROUPS and (group != 16 or kind == "e2m1")
        columns = shape[1] if len(take) < 2 else len(range(*take[1].indices(shape[1])))
        step = 128 if kind == "int4" and self.activations is not None else 64
        return not is_reordered and is_group and columns % max(group, step) == 0

    def parameters(self, shape: tuple[int, ...]) -> ParameterShapes:
        kind, group, scale, has_zero, has_row, _ = self.codes
        *rows, columns = shape
        made: ParameterShapes = {"": ((*rows, columns // 2), torch.uint8)}
        if kind not in FOUR_BITS:
            made = {"": (shape, CODE_DTYPES[kind])}
        if scale is not None:
            made["_scale"] = (*rows[:-1], columns // group, rows[-1]), scale
        if has_zero:
            made["_zero"] = (*rows[:-1], columns // group, rows[-1]), torch.uint8
        if has_row:
            made["_row"] = tuple(rows), torch.float32
        return made

    def pack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> dict[str, Tensor]:
        codes = self.unpack(weight, tensors, take)._replace(activations=self.activations)
        parts, suffixes = arranged(codes)[1:5], ("", "_scale", "_zero", "_row")
        return {suffix: part for suffix, part in zip(suffixes, parts, strict=True) if part is not None}

    def places(self, into: Index) -> dict[str, Index]:
        stack = [part for part in into if isinstance(part, int)]  # what follows are rows, never columns
        by_group = (*stack, slice(None), *into[len(stack) :])
        return {"": into, "_scale": by_group, "_zero": by_group, "_row": into}

    def product(self, kernels: KernelConfig) -> LinearProduct:
        from thalweg.kernels.gemm.epilogue import Epilogue
        from thalweg.kernels.weight_only.triton import linear  # needs Triton

        kind, rule, suffixes = self.codes.kind, self.activations, list(self.parameters((1, 1024)))

        def product(
            x: Any, weights: Sequence[Tensor], residual_MN: Tensor | None = None, out_MN: Tensor | None = None
        ) -> Tensor:
            parts = dict(zip(suffixes, weights, strict=True))
            held = KernelCodes(kind, parts[""], parts.get("_scale"), parts.get("_zero"), parts.get("_row"), rule)
            y: Tensor = linear(x, held, Epilogue(None, residual_MN, out_MN), kernels.deterministic)
            return y

        return product


def module_of(weight: TensorSpec) -> str:
    """The published module of a weight."""
    return weight.name.removesuffix(".weight")


def found_or_raise(weight: TensorSpec, name: str, scheme: str, found: Mapping[str, TensorSpec]) -> TensorSpec:
    """The tensor of this name. Raises CheckpointError."""
    if name not in found:
        raise CheckpointError(f"{module_of(weight)} is {scheme}, but {name} is missing")
    return found[name]


def check_stored(scheme: Quantized, weight: TensorSpec, found: Mapping[str, TensorSpec], floats: int = 0) -> None:
    """Raises CheckpointError unless every stored tensor is there in shape and dtype. The last `floats` of them may be
    of any floating-point type.
    """
    if len(weight.shape) != 2:
        raise CheckpointError(f"{weight.name} is {scheme.name}, and only a matrix can be: {weight.shape}")
    stored = scheme.stored(weight)
    for number, spec in enumerate(stored):
        held = found_or_raise(weight, spec.name, scheme.name, found)
        is_free = number >= len(stored) - floats and held.dtype.is_floating_point and held.dtype.itemsize > 1
        if held.shape != spec.shape or held.dtype != spec.dtype and not is_free:
            raise CheckpointError(
                f"{spec.name}: {held.dtype} {held.shape} does not fit {weight.name} {weight.shape} in {scheme.name},"
                f" which needs {spec.dtype} {spec.shape}"
            )


def check_groups(weight: TensorSpec, group: int, scheme: str) -> None:
    """Raises CheckpointError unless groups of columns divide the weight."""
    if group and weight.shape[-1] % group:
        raise CheckpointError(f"{weight.name}: {weight.shape[-1]} columns are not whole {scheme} groups of {group}")
