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
from thalweg.quant.scheme import Index, LinearProduct, ParameterShapes, Quantized, Read, StoredSlice, Take, TensorSpec

SUFFIX = "_scale_inv"
KERNEL_BLOCK = (128, 128)  # what the kernels multiply by; other blocks are dequantized
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


class Fp8Block(Quantized):
    """block: rows and columns that share a multiplier."""

    name = "fp8_block"
    operation = "fp8_gemm"
    quantizes_activations = True
    has_expert_kernels = True
    code_spread = 64.0  # the largest code is 448

    def __init__(self, block: tuple[int, int]) -> None:
        self.block = block

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
        return codes, TensorSpec(weight.name + SUFFIX, self._blocks(weight.shape), torch.float32)

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        if (dtype := found[weight.name].dtype) != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{weight.name} is {dtype}; quantized weights of this checkpoint are {torch.float8_e4m3fn}"
            )
        if len(weight.shape) != 2:
            raise CheckpointError(f"{weight.name} is FP8, and only a matrix can be: {weight.shape}")
        codes, wanted = self.stored(weight)
        scale = found.get(wanted.name)
        if scale is None:
            raise CheckpointError(f"{weight.name} is FP8 but {wanted.name} is missing")
        if scale.shape != self._blocks(found[codes.name].shape) or scale.dtype not in SCALE_DTYPES:
            raise CheckpointError(
                f"{scale.name}: {scale.dtype} {scale.shape} does not cover {weight.name} in blocks of {self.block},"
                f" which needs float32 {wanted.shape}"
            )

    def reads(self, weight: str, take: Take) -> tuple[Read, ...]:
        return Read(weight, take), Read(weight + SUFFIX)

    def decode(self, weight: str, tensors: Sequence[Tensor], take: Take) -> Tensor:
        codes_NK, scale = tensors
        first = [part.start or 0 for part in take] + [0] * (2 - len(take))
        ends = [start + size for start, size in zip(first, codes_NK.shape, strict=True)]
        if scale.dim() != 2 or any(
            size * step < end for size, step, end in zip(scale.shape, self.block, ends, strict=True)
        ):
            raise CheckpointError(
                f"{weight}{SUFFIX}: scales {tuple(scale.shape)} do not cover {weight} up to {tuple(ends)} in blocks of"
                f" {self.block}"
            )
        near = [start // step for start, step in zip(first, self.block, strict=True)]
        inner = [start % step for start, step in zip(first, self.block, strict=True)]
        padded = codes_NK.float()
        if any(inner):
            padded = torch.nn.functional.pad(padded, (inner[1], 0, inner[0], 0))
        scales = scale[near[0] : -(-ends[0] // self.block[0]), near[1] : -(-ends[1] // self.block[1])]
        return dequantize(padded, scales, self.block, torch.float32)[inner[0] :, inner[1] :]

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

    def pieces(self, weight: str, take: Take, into: Index) -> tuple[StoredSlice, ...]:
        blocks = tuple(self._in_blocks(weight, part, size) for part, size in zip(take, self.block, strict=False))
        lead = [part for part in into if isinstance(part, int)]
        slices = [part for part in into if isinstance(part, slice)]
        cut = [self._in_blocks(weight, part, size) for part, size in zip(slices, self.block, strict=False)]
        scale_into: Index = (*lead, *cut)
        return StoredSlice(Read(weight, take), "", into), StoredSlice(
            Read(weight + SUFFIX, blocks), "_scale", scale_into
        )

    def product(self, kernels: KernelConfig) -> LinearProduct:
        from thalweg.kernels.gemm.epilogue import Epilogue
        from thalweg.kernels.gemm.fp8 import product  # needs Triton

        multiply = product(kernels.fp8_gemm, kernels.deterministic)

        def linear(
            x: Any, weights: Sequence[Tensor], residual_MN: Tensor | None = None, out_MN: Tensor | None = None
        ) -> Tensor:
            return multiply(x, weights[0], weights[1], Epilogue(None, residual_MN, out_MN))

        return linear

    def _blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // step) for size, step in zip(shape, self.block, strict=True))

    def _in_blocks(self, weight: str, part: slice, size: int) -> slice:
        """The same rows or columns, counted in blocks."""
        if part.start is None and part.stop is None:
            return part
        if (part.start or 0) % size:
            raise CheckpointError(f"{weight}: a slice begins at {part.start}, inside a block of {size}")
        return slice((part.start or 0) // size, -(-part.stop // size))
