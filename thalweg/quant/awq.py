"""AWQ, version "gemm" (AutoAWQ): 4-bit codes with zero points, eight columns of the output in an interleaved word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError
from thalweg.kernels.weight_only.ref import Codes, pack_nibbles
from thalweg.quant.matching import Format, by_substring, names, one_of
from thalweg.quant.packing import unpack_words
from thalweg.quant.scheme import UNQUANTIZED, Draw, Read, Take, TensorSpec, both, check_cut, outward
from thalweg.quant.weight_only import CodesInMemory, WeightOnly, check_groups, check_stored, module_of

NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # of each column of a word, which nibble it is
WORD = 8


@dataclass(frozen=True)
class Awq(WeightOnly):
    """group: inputs that share a scale and a zero point."""

    group: int

    name = "awq"

    @staticmethod
    def of_config(config: Mapping[str, Any], where: str) -> Format:
        """Raises CheckpointError naming the field."""
        at = f"{where}: quantization_config"
        one_of({"bits": config.get("bits", config.get("w_bit"))}, "bits", at, (4,))
        # gemv packs inputs, gemv_fast and llm-awq interleave rows
        one_of({"version": str(config.get("version", "gemm")).lower()}, "version", at, ("gemm",))
        one_of(config, "zero_point", at, (True,), True)
        group = config.get("group_size", config.get("q_group_size"))
        if type(group) is not int or group < WORD or group % WORD:
            raise CheckpointError(f"{at}: group_size must be a multiple of {WORD}, got {group!r}")
        plain = names(config.get("modules_to_not_convert"), f"{at}.modules_to_not_convert")
        return Format(((by_substring(plain), UNQUANTIZED),), Awq(group))

    @property
    def codes(self) -> CodesInMemory:
        return CodesInMemory("uint4", self.group, torch.float16, has_zero=True)

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        (outputs, inputs), module = weight.shape, module_of(weight)
        groups = inputs // self.group
        return (
            TensorSpec(f"{module}.qweight", (inputs, outputs // WORD), torch.int32),
            TensorSpec(f"{module}.qzeros", (groups, outputs // WORD), torch.int32),
            TensorSpec(f"{module}.scales", (groups, outputs), torch.float16),
        )

    def draws(self, weight: TensorSpec, spread: float) -> tuple[Draw, ...]:
        step = spread / self.code_spread
        return Draw(), Draw(), Draw(step, step / 10)

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        check_groups(weight, self.group, self.name)
        check_stored(self, weight, found)

    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        check_cut(weight, take, (WORD, self.group), self.name)
        rows, columns = both(take)
        words, groups = outward(rows, WORD), outward(columns, self.group)
        code, zero, scale = (spec.name for spec in self.stored(weight))
        return Read(code, (columns, words)), Read(zero, (groups, words)), Read(scale, (groups, rows))

    def unpack(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Codes:
        code, zero, scale = tensors
        codes_KN, zeros_GN = (unpack_words(words, 1, NIBBLE) for words in (code, zero))
        return Codes("uint4", pack_nibbles(codes_KN.t()), scale.t().contiguous(), zeros_GN.t().contiguous())
