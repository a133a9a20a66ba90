"""The published FP8 scheme: `X.weight` in e4m3 with `X.weight_scale_inv`, one float32 multiplier for each block of rows
and columns.

What a tensor is follows from its dtype, never from `scale_fmt`: V3.1 and V3.2 declare ue8m0 and store float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.quant.scheme import (
    Index,
    LinearProduct,
    ParameterShapes,
    Quantized,
    Read,
    Take,
    TensorSpec,
    both,
    outward,
)

SUFFIX = "_scale_inv"
KERNEL_BLOCK = (128, 128)  # what the kernels multiply by; other blocks are dequantized
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


class Fp8Block(Quantized):
    """block: rows and columns that share a multiplier. suffix: of its name, behind the weight's."""

    name = "fp8_block"
    operation = "fp8_gemm"
    quantizes_activations = reads_codes = True
    has_expert_kernels = True
    code_spread = 64.0  # the largest code is 448

    def __init__(self, block: tuple[int, int], suffix: str = SUFFIX) -> None:
        self.block, self.suffix = block, suffix

    @staticmethod
    def of_config(config: Mapping[str, Any], where: str) -> Fp8Block:
        """From the quantization_config of a config.json. Raises CheckpointError naming the field, which `where`
        precedes.
        """
        block = config.get("weight_block_size")
        if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
            raise CheckpointError(
                f"{where}: quantization_config.weight_block_size must be [rows, columns], got {block!r}"
            )
        return Fp8Block((block[0], block[1]))

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        codes = TensorSpec(weight.name, weight.shape, torch.float8_e4m3fn)
        return codes, TensorSpec(weight.name + self.suffix, self._blocks(weight.shape), torch.float32)

    def beside(self, weight: TensorSpec) -> tuple[str, ...]:
        return (f"{weight.name.removesuffix('.weight')}.input_scale",)

    def resolve(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> Fp8Block:
        """Multipliers have either of two names."""
        other = "_scale" if self.suffix == SUFFIX else SUFFIX
        is_other = weight.name + self.suffix not in found and weight.name + other in found
        scheme = Fp8Block(self.block, other) if is_other else self
        scheme.check(weight, found)
        return scheme

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        held = found[weight.name]
        if held.dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{weight.name} is {held.dtype}; quantized weights of this checkpoint are {torch.float8_e4m3fn}"
            )
        if len(weight.shape) != 2 or len(held.shape) != 2:
            raise CheckpointError(f"{weight.name} is FP8, and only a matrix can be: {held.shape}")
        codes, wanted = self.stored(weight)
        scale = found.get(wanted.name)
        if scale is None:
            raise CheckpointError(f"{weight.name} is FP8 but {wanted.name} is missing")
        if scale.shape != self._blocks(found[codes.name].shape) or scale.dtype not in SCALE_DTYPES:
            raise CheckpointError(
                f"{scale.name}: {scale.dtype} {scale.shape} does not cover {weight.name} in blocks of {self.block},"
                f" which needs float32 {wanted.shape}"
            )

    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        blocks = tuple(outward(part, size) for part, size in zip(both(take), self.block, strict=True))
        return Read(weight.name, take), Read(weight.name + self.suffix, blocks if take else ())

    def decode(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Tensor:
        codes_NK, scale = tensors
        first = [(part.start or 0) % step for part, step in zip(both(take), self.block, strict=True)]
        padded = codes_NK.float()
        if any(first):
            padded = torch.nn.functional.pad(padded, (first[1], 0, first[0], 0))
        if scale.dim() != 2 or any(
            size * step < end for size, step, end in zip(scale.shape, self.block, padded.shape, strict=True)
        ):
            raise CheckpointError(
                f"{weight.name}{self.suffix}: scales {tuple(scale.shape)} do not cover {weight.name} up to"
                f" {tuple(padded.shape)} in blocks of {self.block}"
            )
        return dequantize(padded, scale, self.block, torch.float32)[first[0] :, first[1] :]

    def holds(self, take: Take, shape: tuple[int, ...], is_reordered: bool) -> bool:
        whole_blocks = all(
            (part.start or 0) % size == 0 and (part.stop is None or part.stop % size == 0 or part.stop == full)
            for part, size, full in zip(take, self.block, shape, strict=False)
        )
        return self.block == KERNEL_BLOCK and whole_blocks and not is_reordered and shape[1] % self.block[1] == 0

    def parameters(self, shape: tuple[int, ...]) -> ParameterShapes:
        *lead, rows, columns = shape
        return {
            "": (shape, torch.float8_e4m3fn),
            "_scale": ((*lead, *self._blocks((rows, columns))), torch.float32),
        }

    def pack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> dict[str, Tensor]:
        for part, size in zip(both(take), self.block, strict=True):
            if (part.start or 0) % size:
                raise CheckpointError(f"{weight.name}: a slice begins at {part.start}, inside a block of {size}")
        return {"": tensors[0], "_scale": tensors[1]}

    def places(self, into: Index) -> dict[str, Index]:
        lead = [part for part in into if isinstance(part, int)]
        slices = [part for part in into if isinstance(part, slice)]
        return {"": into, "_scale": (*lead, *map(outward, slices, self.block))}

    def product(self, kernels: KernelConfig) -> LinearProduct:
        from thalweg.kernels.gemm.epilogue import Epilogue
        from thalweg.kernels.gemm.fp8 import product  # needs Triton

        multiply = product(kernels.fp8_gemm, kernels.deterministic)

        def linear(
            x: Any, weights: Sequence[Tensor], residual_MN: Tensor | None = None, out_MN: Tensor | None = None
        ) -> Tensor:
            return multiply(x, weights[0], weights[1], Epilogue(None, residual_MN, out_MN))

        return linear

    def computes_norm(self, kernels: KernelConfig) -> bool:
        return "triton" in kernels.fp8_gemm and not kernels.deterministic

    def _blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // step) for size, step in zip(shape, self.block, strict=True))
