"""GPTQ, checkpoint formats "gptq" (v1, whose zero points are stored less one) and "gptq_v2": 4-bit codes, eight inputs
in a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.kernels.weight_only.ref import Codes, dequantize, pack_nibbles
from thalweg.quant.matching import Format, Matcher, by_substring, is_expert, names, one_of
from thalweg.quant.packing import unpack_words
from thalweg.quant.scheme import UNQUANTIZED, Draw, Read, Scheme, Take, TensorSpec, both, check_cut, outward
from thalweg.quant.weight_only import CodesInMemory, WeightOnly, check_stored, module_of

WORD = 8


@dataclass(frozen=True)
class Gptq(WeightOnly):
    """group: inputs that share a scale; 0 is all. is_v1: zero points are stored less one. desc_act: groups are
    scattered over the inputs, so `g_idx` says each one's.
    """

    group: int
    is_v1: bool
    desc_act: bool

    name = "gptq"

    @staticmethod
    def of_config(config: Mapping[str, Any], where: str) -> Format:
        """Raises CheckpointError naming the field."""
        at = f"{where}: quantization_config"
        default = _scheme(config, at)
        rules: list[tuple[Matcher, Scheme]] = []
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise CheckpointError(f"{at}: dynamic must be an object, got {dynamic!r}")
        for pattern, fields in dynamic.items():
            is_plain, expression = pattern.startswith("-:"), pattern.removeprefix("-:").removeprefix("+:")
            try:
                matches = re.compile(expression).match
            except re.error as error:
                raise CheckpointError(f"{at}: dynamic {pattern!r} is no regular expression: {error}") from None
            scheme = UNQUANTIZED if is_plain else _scheme({**config, **(fields or {})}, f"{at}.dynamic {pattern!r}")
            rules.append((lambda module, matches=matches: bool(matches(module)), scheme))  # type: ignore[misc]
        plain = names(config.get("modules_to_not_convert"), f"{at}.modules_to_not_convert")
        return Format(((by_substring(plain), UNQUANTIZED), *rules), default)

    @property
    def codes(self) -> CodesInMemory:
        return CodesInMemory("uint4", self.group, torch.float16, has_zero=True)

    def holds(self, take: Take, shape: tuple[int, ...], is_reordered: bool) -> bool:
        return bool(self.group) and not self.desc_act and super().holds(take, shape, is_reordered)

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        (outputs, inputs), module = weight.shape, module_of(weight)
        groups = -(-inputs // (self.group or inputs))
        index = (TensorSpec(f"{module}.g_idx", (inputs,), torch.int32),) if self.desc_act else ()
        return (
            TensorSpec(f"{module}.qweight", (inputs // WORD, outputs), torch.int32),
            TensorSpec(f"{module}.qzeros", (groups, outputs // WORD), torch.int32),
            TensorSpec(f"{module}.scales", (groups, outputs), torch.float16),
            *index,
        )

    def draws(self, weight: TensorSpec, spread: float) -> tuple[Draw, ...]:
        step = spread / self.code_spread
        return Draw(), Draw(), Draw(step, step / 10), *([Draw(0.0, 0.0)] if self.desc_act else [])

    def beside(self, weight: TensorSpec) -> tuple[str, ...]:
        return () if self.desc_act else (f"{module_of(weight)}.g_idx",)

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        check_stored(self, weight, found)

    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        if self.desc_act and is_expert(module_of(weight)):
            raise CheckpointError(
                f"{weight.name}: gptq with desc_act true is not supported for experts, whose kernels read groups in"
                " order: take a checkpoint with desc_act false"
            )
        check_cut(weight, take, (WORD, WORD if self.desc_act else self._columns(weight)), self.name)
        rows, columns = both(take)
        groups = slice(None) if self.desc_act else outward(columns, self.group)
        code, zero, scale, *index = (spec.name for spec in self.stored(weight))
        return (
            Read(code, (outward(columns, WORD), rows)),
            Read(zero, (groups, outward(rows, WORD))),
            Read(scale, (groups, rows)),
            *[Read(name, (columns,)) for name in index],
        )

    def _columns(self, weight: TensorSpec) -> int:
        """Inputs that stay together: whole groups in whole words. A slice may cut the only group of a weight."""
        return lcm(self.group or 1, WORD)

    def unpack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Codes:
        code, zero, scale = tensors[:3]
        zeros_GN = unpack_words(zero, 1)
        if self.is_v1:  # of codes, never of words: 15 stands for 0
            zeros_GN = zeros_GN + 1 & 15
        codes_NK = pack_nibbles(unpack_words(code, 0).t())
        return Codes("uint4", codes_NK, scale.t().contiguous(), zeros_GN.t().contiguous())

    def decode(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Tensor:
        packed = self.unpack(weight, tensors, take)
        if not self.desc_act:
            return dequantize(packed)
        assert packed.scale is not None and packed.zero is not None
        group_K = tensors[3].long()
        if len(group_K) and not 0 <= int(group_K.min()) <= int(group_K.max()) < packed.scale.shape[1]:
            raise CheckpointError(
                f"{module_of(weight)}.g_idx names a group beyond the {packed.scale.shape[1]} there are"
            )
        by_column = packed._replace(scale=packed.scale[:, group_K], zero=packed.zero[:, group_K])
        return dequantize(by_column)


def _scheme(config: Mapping[str, Any], at: str) -> Gptq:
    one_of(config, "bits", at, (4,))
    written = one_of(config, "checkpoint_format", at, ("gptq", "gptq_v2", "", None), "gptq")
    group = config.get("group_size")
    if type(group) is not int or group < 1 and group != -1:
        raise CheckpointError(f"{at}: group_size must be -1 or a positive integer, got {group!r}")
    return Gptq(max(group, 0), written != "gptq_v2", bool(config.get("desc_act")))
