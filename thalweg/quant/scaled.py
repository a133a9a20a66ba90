"""8-bit codes, e4m3 or INT8, with a multiplier for the tensor, for each row, or for blocks: `X.weight` with
`X.weight_scale` or `X.weight_scale_inv`. DeepSeek's FP8 blocks are `fp8_block.Fp8Block`.

Where the checkpoint declares dynamic activations, INT8 weights multiply INT8 ones with a scale for each row, or for
each row and block of columns. e4m3 weights with one multiplier, or one for each row, multiply e4m3 ones with a scale
for each row. Other products multiply 16-bit activations; static scales of activations are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.kernels.quantize.ref import Activations
from thalweg.kernels.weight_only.ref import Codes
from thalweg.quant.fp8_block import KERNEL_BLOCK, Fp8Block
from thalweg.quant.matching import Format, by_part, names, one_of
from thalweg.quant.scheme import UNQUANTIZED, Draw, Read, Take, TensorSpec, both, check_cut, outward
from thalweg.quant.weight_only import CODE_DTYPES, CodesInMemory, WeightOnly, check_groups, found_or_raise, module_of

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
TENSOR, CHANNEL = (0, 0), (1, 0)  # blocks
SIXTEEN_BITS = "its products multiply 16-bit activations"


@dataclass(frozen=True)
class ScaledCodes(WeightOnly):
    """kind: "e4m3" or "int8". steps: rows and columns that share a multiplier; 0 is all of them."""

    name: str
    kind: str
    steps: tuple[int, int]
    suffix: str = "_scale"
    scale: torch.dtype = torch.float32  # as stored; uint8 holds e8m0
    inputs: Activations | None = None
    note: str = ""

    @property
    def codes(self) -> CodesInMemory:
        if not self.steps[1]:
            return CodesInMemory(self.kind, 0, None, has_row=True, activations=self.inputs)
        return CodesInMemory(self.kind, self.steps[1], _numbers(self.scale), activations=self.inputs)

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        blocks = tuple(1 if not step else -(-size // step) for size, step in zip(weight.shape, self.steps, strict=True))
        shape = (1,) if self.steps == TENSOR else blocks
        codes = TensorSpec(weight.name, weight.shape, CODE_DTYPES[self.kind])
        return codes, TensorSpec(weight.name + self.suffix, shape, self.scale)

    def draws(self, weight: TensorSpec, spread: float) -> tuple[Draw, ...]:
        step = spread / self.code_spread
        codes = Draw(0.0, self.code_spread) if self.kind == "e4m3" else Draw()
        return codes, exponent_draw(step) if self.scale == torch.uint8 else Draw(step, step / 10)

    def beside(self, weight: TensorSpec) -> tuple[str, ...]:
        return tuple(f"{module_of(weight)}.{name}" for name in ("input_scale", "input_zero_point", "output_scale"))

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        self.resolve(weight, found)

    def resolve(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> ScaledCodes:
        """Whether a tensor or each row has a multiplier follows from the multipliers."""
        held = found_or_raise(weight, weight.name, self.name, found)
        if held.dtype != CODE_DTYPES[self.kind]:
            raise CheckpointError(f"{weight.name} is {held.dtype}; {self.name} weights are {CODE_DTYPES[self.kind]}")
        if len(weight.shape) != 2:
            raise CheckpointError(f"{weight.name} is {self.name}, and only a matrix can be: {weight.shape}")
        check_groups(weight, self.steps[1] if self.steps[0] == 1 else 0, self.name)
        scale = found_or_raise(weight, weight.name + self.suffix, self.name, found)
        steps = self.steps
        if not steps[1] and prod(scale.shape) == 1:
            steps = TENSOR
        elif not steps[1] and scale.shape in ((weight.shape[0],), (weight.shape[0], 1)):
            steps = CHANNEL
        elif scale.shape != self.stored(weight)[1].shape:
            raise CheckpointError(
                f"{scale.name}: {scale.shape} is no {self.name} multiplier of {weight.name} {weight.shape}, which needs"
                f" {self.stored(weight)[1].shape}"
            )
        if scale.dtype not in ((torch.uint8, torch.float8_e8m0fnu) if self.scale == torch.uint8 else SCALE_DTYPES):
            raise CheckpointError(f"{scale.name} is {scale.dtype}, which is no type of {self.name} multipliers")
        return replace(self, steps=steps, scale=scale.dtype)

    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        rows, columns = both(take)
        check_cut(weight, take, (1, self.steps[1] or 1), self.name)
        blocks: Take = ()
        if self.steps != TENSOR and take:
            blocks = (outward(rows, self.steps[0]),)
            blocks += (outward(columns, self.steps[1]),) if self.steps[1] else ()
        return Read(weight.name, take), Read(weight.name + self.suffix, blocks)

    def unpack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Codes:
        codes, scale = tensors
        if not self.steps[1]:
            row_N = scale.float().reshape(-1).expand(len(codes)) if self.steps == TENSOR else scale.float().reshape(-1)
            return Codes(self.kind, codes, row=row_N.contiguous())
        scale = as_numbers(scale)
        if self.steps[0] > 1:
            first = (both(take)[0].start or 0) % self.steps[0]
            scale = scale.repeat_interleave(self.steps[0], 0)[first : first + len(codes)]
        return Codes(self.kind, codes, scale)

    def holds(self, take: Take, shape: tuple[int, ...], is_reordered: bool) -> bool:
        return shape[1] % max(self.steps[1], 1) == 0 and super().holds(take, shape, is_reordered)


def as_numbers(scale: Tensor) -> Tensor:
    """e8m0 scales that are stored as bytes, as their type."""
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def _numbers(dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e8m0fnu if dtype == torch.uint8 else dtype


def exponent_draw(step: float) -> Draw:
    """Bytes of e8m0 scales about `step`."""
    return Draw(127.5 + torch.tensor(step).log2().item(), 0.5)


def fp8_format(config: Mapping[str, Any], where: str) -> Format:
    """quant_method "fp8": blocks (DeepSeek), or a multiplier for each tensor. Raises CheckpointError."""
    at = f"{where}: quantization_config"
    lists = (names(config.get(name), f"{at}.{name}") for name in ("modules_to_not_convert", "ignored_layers"))
    plain = [module for listed in lists for module in listed]
    is_dynamic = one_of(config, "activation_scheme", at, ("dynamic", "static"), "dynamic") == "dynamic"
    if config.get("weight_block_size") is not None or "activation_scheme" not in config:
        return Format(((by_part(plain), UNQUANTIZED),), Fp8Block.of_config(config, where))
    return Format(((by_part(plain), UNQUANTIZED),), fp8_rows("fp8", TENSOR, is_dynamic))


def fp8_rows(name: str, steps: tuple[int, int], is_dynamic: bool) -> ScaledCodes:
    """e4m3 with one multiplier, or one for each row. is_dynamic: activations are e4m3 with a scale for each row."""
    inputs = Activations("e4m3") if is_dynamic else None
    note = "" if is_dynamic else f"{SIXTEEN_BITS}: kernels quantize dynamically, by row, and input_scale is not read"
    return ScaledCodes(name, "e4m3", steps, inputs=inputs, note=note)


def int8_format(config: Mapping[str, Any], where: str) -> Format:
    """quant_method "blockwise_int8", or "w8a8_int8" with a multiplier for each row. Raises CheckpointError."""
    at = f"{where}: quantization_config"
    lists = (names(config.get(name), f"{at}.{name}") for name in ("ignored_layers", "ignore", "modules_to_not_convert"))
    plain = [module for listed in lists for module in listed]
    block, columns = CHANNEL, 0
    if config["quant_method"] == "blockwise_int8":
        block = Fp8Block.of_config(config, where).block
        columns = block[1]
    is_dynamic = config.get("activation_scheme", "dynamic") == "dynamic" and config.get("is_dynamic", True)
    inputs = Activations("int8", columns) if is_dynamic and columns in (0, KERNEL_BLOCK[1]) else None
    note = "" if inputs else f"{SIXTEEN_BITS}: kernels quantize dynamically, by row or in blocks of {KERNEL_BLOCK[1]}"
    suffix = "_scale_inv" if columns else "_scale"
    scheme = ScaledCodes(str(config["quant_method"]), "int8", block, suffix, inputs=inputs, note=note)
    return Format(((by_part(plain), UNQUANTIZED),), scheme)
