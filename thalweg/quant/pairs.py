"""4-bit codes along the inputs with a scale for each group: integers and floats of compressed-tensors, NVFP4, MXFP4,
W4AFP8. They differ in names and types only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.kernels.quantize.ref import Activations
from thalweg.kernels.weight_only.ref import Codes, dequantize
from thalweg.quant.matching import Format, by_part, is_expert, names
from thalweg.quant.packing import unpack_words
from thalweg.quant.scaled import as_numbers, exponent_draw
from thalweg.quant.scheme import UNQUANTIZED, Draw, Read, Take, TensorSpec, both, check_cut, outward
from thalweg.quant.weight_only import CodesInMemory, WeightOnly, check_groups, found_or_raise, module_of

WORD = 8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
BYTES = (torch.uint8, torch.int8)


@dataclass(frozen=True)
class NibblePairs(WeightOnly):
    """The codes' names follow the module's. Low nibbles are even inputs."""

    name: str
    kind: str  # "int4", "uint4" (with zero points) or "e2m1"
    group: int  # inputs that share a scale; 0 is all
    code: str = "weight_packed"
    code_types: tuple[torch.dtype, ...] = BYTES  # or int32
    scale: str = "weight_scale"
    scale_types: tuple[torch.dtype, ...] = FLOATS  # those that checkpoints may have; once resolved the one there is
    zero: str = ""  # int32 words along the outputs
    total: str = ""  # the scale of the tensor
    is_divided: bool = False  # by the scale of the tensor
    is_signed: bool = False  # codes are two's complement
    index: str = ""  # each input's group, where these are scattered
    others: tuple[str, ...] = ("weight_shape", "input_scale", "input_global_scale")  # not read
    note: str = ""
    inputs: Activations | None = None  # of int4 with groups of 128 or of all

    @property
    def codes(self) -> CodesInMemory:
        if not self.group and not self.zero:
            return CodesInMemory(self.kind, 0, None, has_row=True, activations=self.inputs)
        scale = torch.float8_e8m0fnu if self.scale_types[0] == torch.uint8 else self.scale_types[0]
        return CodesInMemory(self.kind, self.group, scale, bool(self.zero), bool(self.total), self.inputs)

    def named(self, weight: TensorSpec, name: str) -> str:
        """The published name of a tensor of this weight."""
        return f"{module_of(weight)}.{name}"

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        (outputs, inputs), words = weight.shape, WORD if self.code_types[0] == torch.int32 else 2
        groups = -(-inputs // (self.group or inputs))
        made = [
            TensorSpec(self.named(weight, self.code), (outputs, inputs // words), self.code_types[0]),
            TensorSpec(self.named(weight, self.scale), (outputs, groups), self.scale_types[0]),
        ]
        if self.zero:
            made.append(TensorSpec(self.named(weight, self.zero), (outputs // WORD, groups), torch.int32))
        if self.total:
            made.append(TensorSpec(self.named(weight, self.total), (1,), torch.float32))
        if self.index:
            made.append(TensorSpec(self.named(weight, self.index), (inputs,), torch.int32))
        return tuple(made)

    def draws(self, weight: TensorSpec, spread: float) -> tuple[Draw, ...]:
        step = spread / self.code_spread
        scale = exponent_draw(step) if self.scale_types[0] in EXPONENTS else Draw(step, step / 10)
        if not self.total:
            return Draw(), scale, *([Draw()] if self.zero else []), *([Draw(0.0, 0.0)] if self.index else [])
        return Draw(), Draw(64.0, 6.4), Draw(64.0 / step if self.is_divided else step / 64.0, 0.0)

    def beside(self, weight: TensorSpec) -> tuple[str, ...]:
        return tuple(self.named(weight, name) for name in self.others)

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        self.resolve(weight, found)

    def resolve(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> NibblePairs:
        if len(weight.shape) != 2:
            raise CheckpointError(f"{weight.name} is {self.name}, and only a matrix can be: {weight.shape}")
        check_groups(weight, self.group, self.name)
        stored = self.stored(weight)
        held = [found_or_raise(weight, spec.name, self.name, found) for spec in stored]
        allowed = [self.code_types, self.scale_types, *[(spec.dtype,) for spec in stored[2:]]]
        for spec, there, types in zip(stored, held, allowed, strict=True):
            is_scalar = spec.shape == (1,) and prod(there.shape) == 1
            if there.dtype not in types or there.shape != spec.shape and not is_scalar:
                raise CheckpointError(
                    f"{spec.name}: {there.dtype} {there.shape} does not fit {weight.name} {weight.shape} in"
                    f" {self.name}, which needs {' or '.join(map(str, types))} {spec.shape}"
                )
        return replace(self, code_types=(held[0].dtype,), scale_types=(held[1].dtype,))

    def holds(self, take: Take, shape: tuple[int, ...], is_reordered: bool) -> bool:
        return not self.index and bool(self.group or not self.zero) and super().holds(take, shape, is_reordered)

    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        word = WORD if self.code_types[0] == torch.int32 else 2
        columns = word if self.index else lcm(self.group or 1, word)
        check_cut(weight, take, (WORD if self.zero else 1, columns), self.name)
        rows, inputs = both(take)
        groups = slice(None) if self.index else outward(inputs, self.group)
        code, scale, *more = (spec.name for spec in self.stored(weight))
        taken: list[Take] = [(outward(rows, WORD), groups)] if self.zero else []
        taken += ([()] if self.total else []) + ([(inputs,)] if self.index else [])
        further = [Read(name, part) for name, part in zip(more, taken, strict=True)]
        return Read(code, (rows, outward(inputs, word))), Read(scale, (rows, groups)), *further

    def unpack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Codes:
        code, scale, *more = tensors
        codes = code.contiguous().view(torch.uint8)  # the bytes of a word lie in this order
        if self.is_signed:
            codes = codes ^ 0x88
        if not self.group and not self.zero:
            return Codes(self.kind, codes, row=scale.float().reshape(-1))
        zero = unpack_words(more.pop(0), 0).contiguous() if self.zero else None
        row = None
        if self.total:
            total = more.pop(0).float().reshape(-1)
            row = (total.reciprocal() if self.is_divided else total).expand(len(codes)).contiguous()
        return Codes(self.kind, codes, as_numbers(scale.contiguous()), zero, row)

    def decode(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Tensor:
        packed = self.unpack(weight, tensors, take)
        if not self.index:
            return dequantize(packed)
        assert packed.scale is not None
        group_K = tensors[-1].long()
        if len(group_K) and not 0 <= int(group_K.min()) <= int(group_K.max()) < packed.scale.shape[1]:
            raise CheckpointError(f"{self.named(weight, self.index)} names a group that {weight.name} has not")
        zero = None if packed.zero is None else packed.zero[:, group_K]
        return dequantize(packed._replace(scale=packed.scale[:, group_K], zero=zero))


WEIGHT_ONLY = "its weights are FP4, and products are weight-only, with 16-bit activations"


def nvfp4(name: str, code: str = "weight_packed", total: str = "weight_global_scale") -> NibblePairs:
    """NVFP4: groups of 16 with e4m3 scales, and a scale of the tensor, by which compressed-tensors divides."""
    return NibblePairs(
        name, "e2m1", 16, code=code, scale_types=(torch.float8_e4m3fn,), total=total,
        is_divided=total == "weight_global_scale", note=WEIGHT_ONLY,
    )  # fmt: skip


def mxfp4(name: str, code: str = "weight_packed", scale: str = "weight_scale") -> NibblePairs:
    """MXFP4: groups of 32 with e8m0 scales."""
    return NibblePairs(name, "e2m1", 32, code=code, scale=scale, scale_types=EXPONENTS, note=WEIGHT_ONLY)


@dataclass(frozen=True)
class FusedMxfp4(WeightOnly):
    """The layout of gpt-oss: all experts in one tensor, gate and up rows interleaved, blocks of 16 bytes."""

    experts: int = 0  # in a tensor, once headers are known

    name = "mxfp4"
    note = WEIGHT_ONLY

    @property
    def codes(self) -> CodesInMemory:
        return CodesInMemory("e2m1", 32, torch.float8_e8m0fnu)

    def _place(self, weight: TensorSpec) -> tuple[str, int, slice]:
        """The tensor's name without suffix, the expert, and its rows."""
        block, number, half = module_of(weight).rsplit(".", 2)
        if not number.isdigit() or half not in ("gate_proj", "up_proj", "down_proj"):
            raise CheckpointError(f"{weight.name} is no expert, and mxfp4 in gpt-oss' layout is of experts only")
        if half == "down_proj":
            return f"{block}.down_proj", int(number), slice(None)
        return f"{block}.gate_up_proj", int(number), slice(0 if half == "gate_proj" else 1, None, 2)

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        if not self.experts:
            raise CheckpointError(
                f"{weight.name}: mxfp4 in gpt-oss' layout needs the checkpoint: random weights cannot be made"
            )
        (rows, inputs), (name, _, halves) = weight.shape, self._place(weight)
        shape = (self.experts, rows * (halves.step or 1), inputs // 32)
        codes = TensorSpec(f"{name}_blocks", (*shape, 16), torch.uint8)
        return codes, TensorSpec(f"{name}_scales", shape, torch.uint8)

    def is_stored(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> bool:
        return f"{self._place(weight)[0]}_blocks" in found

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        self.resolve(weight, found)

    def resolve(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> FusedMxfp4:
        check_groups(weight, 32, self.name)
        name, number, _ = self._place(weight)
        codes = found_or_raise(weight, f"{name}_blocks", self.name, found)
        resolved = FusedMxfp4(codes.shape[0])
        for spec in resolved.stored(weight):
            there = found_or_raise(weight, spec.name, self.name, found)
            if there != spec or number >= resolved.experts:
                raise CheckpointError(
                    f"{spec.name}: {there.dtype} {there.shape} does not fit {weight.name}: {spec.shape}"
                )
        return resolved

    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        check_cut(weight, take, (1, 32), self.name)
        name, expert, halves = self._place(weight)
        rows, columns = both(take)
        step, first = halves.step or 1, halves.start or 0
        start, stop, _ = rows.indices(weight.shape[0])
        part: Take = (slice(expert, expert + 1), slice(first + start * step, stop * step, step), outward(columns, 32))
        return Read(f"{name}_blocks", part), Read(f"{name}_scales", part)

    def unpack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Codes:
        codes, scale = (tensor[0].contiguous() for tensor in tensors)
        return Codes("e2m1", codes.flatten(1), as_numbers(scale))


def fused_mxfp4(config: Mapping[str, Any], where: str) -> Format:
    """quant_method "mxfp4": experts in gpt-oss' layout, everything else plain. Raises CheckpointError."""
    plain = names(config.get("modules_to_not_convert"), f"{where}: quantization_config.modules_to_not_convert")
    return Format(((by_part(plain), UNQUANTIZED), (is_expert, FusedMxfp4())), UNQUANTIZED)
