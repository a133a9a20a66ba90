"""W4AFP8: experts in INT4 with groups of 128, everything else in DeepSeek's FP8 blocks. Weights and scales are named
gate, up and down or w1, w3 and w2, each by itself.

Activations of the experts are rounded to e4m3 with a scale for each token. With `activation_scheme` "static" all tokens
have one, the largest `input_scale` of a layer's experts: one of gate and up, one of down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from thalweg.core.errors import CheckpointError
from thalweg.kernels.quantize.ref import Activations
from thalweg.quant.fp8_block import KERNEL_BLOCK, Fp8Block
from thalweg.quant.matching import Format, by_part, is_expert, names, one_of
from thalweg.quant.pairs import FLOATS, NibblePairs
from thalweg.quant.scheme import UNQUANTIZED, Scheme, TensorSpec

GROUP = 128
INPUT_SCALE = "input_scale"
OTHER = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class W4aFp8(NibblePairs):
    """An expert's matrix."""

    is_renamed: tuple[bool, bool, bool] = (False, False, True)  # the codes, the scales, the scales of inputs

    def named(self, weight: TensorSpec, name: str) -> str:
        is_renamed = self.is_renamed[2 if name == INPUT_SCALE else name != self.code]
        expert, _, half = weight.name.removesuffix(".weight").rpartition(".")
        return f"{expert}.{OTHER.get(half, half) if is_renamed else half}.{name}"

    def is_stored(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> bool:
        return any(replace(self, is_renamed=(each,) * 3).named(weight, self.code) in found for each in (False, True))

    def beside(self, weight: TensorSpec) -> tuple[str, ...]:
        return tuple(replace(self, is_renamed=(each,) * 3).named(weight, INPUT_SCALE) for each in (False, True))

    def resolve(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> Scheme:  # type: ignore[override]
        held = found.get(weight.name)
        if held is not None and held.dtype == torch.float8_e4m3fn:  # a NextN layer may be FP8
            return Fp8Block(KERNEL_BLOCK).resolve(weight, found)
        other = replace(self, is_renamed=(True, True, True))
        code, scale = (other.named(weight, name) in found for name in (self.code, self.scale))
        inputs = replace(self, is_renamed=(False, False, False)).named(weight, INPUT_SCALE) not in found
        return super(W4aFp8, replace(self, is_renamed=(code, scale, inputs))).resolve(weight, found)


EXPERT = W4aFp8(
    "w4afp8", "int4", GROUP, code="weight", code_types=(torch.int8, torch.uint8), scale="weight_scale_inv",
    scale_types=FLOATS, is_signed=True, others=(INPUT_SCALE,), inputs=Activations("e4m3"),
    note="activations of its experts have a scale for each token: input_scale is not read",
)  # fmt: skip
STATIC = replace(EXPERT, inputs=Activations("e4m3", is_static=True), note="")


def of_config(config: Mapping[str, Any], where: str) -> Format:
    """Raises CheckpointError naming the field."""
    at = f"{where}: quantization_config"
    for field, known in (("group_size", GROUP), ("weight_block_size", list(KERNEL_BLOCK))):
        if config.get(field, known) != known:
            raise CheckpointError(f"{at}.{field} {config[field]!r} is not supported: w4afp8 has {known}")
    is_static = one_of(config, "activation_scheme", at, ("dynamic", "static"), "dynamic") == "static"
    plain = names(config.get("ignored_layers"), f"{at}.ignored_layers")
    rules = (by_part(plain), UNQUANTIZED), (is_expert, STATIC if is_static else EXPERT)
    return Format(rules, Fp8Block(KERNEL_BLOCK))
