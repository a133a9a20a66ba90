"""The formats of NVIDIA's ModelOpt, by `hf_quant_config.json` or by a quantization_config in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from thalweg.core.errors import CheckpointError
from thalweg.quant.fp8_block import KERNEL_BLOCK, Fp8Block
from thalweg.quant.matching import Format, Matcher, by_glob, is_expert, names, one_of
from thalweg.quant.pairs import mxfp4, nvfp4
from thalweg.quant.scaled import CHANNEL, SIXTEEN_BITS, TENSOR, ScaledCodes, fp8_rows
from thalweg.quant.scheme import UNQUANTIZED, Scheme
from thalweg.quant.w4afp8 import EXPERT

MIXED = "MIXED_PRECISION"


def _fp4(algorithm: str) -> Scheme:
    return nvfp4(algorithm, "weight", "weight_scale_2")


ALGORITHMS: dict[str, Callable[[str], Scheme]] = {
    "FP8": lambda name: fp8_rows(name, TENSOR, False),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda name: fp8_rows(name, CHANNEL, True),
    "FP8_BLOCK_SCALES": lambda name: Fp8Block(KERNEL_BLOCK),
    "FP8_PB_WO": lambda name: Fp8Block(KERNEL_BLOCK, "_scale"),
    "NVFP4": _fp4,
    "NVFP4_AWQ": _fp4,
    "W4A16_NVFP4": _fp4,
    "W4A8_NVFP4_FP8": _fp4,
    "MXFP8": lambda name: ScaledCodes(name, "e4m3", (1, 32), scale=torch.uint8, note=SIXTEEN_BITS),
    "W4A8_MXFP4_FP8": lambda name: mxfp4(name, "weight"),
    "W4A8_AWQ": lambda name: EXPERT,  # of experts, in TensorRT-LLM's checkpoints
}


def fields_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What says the format: the content of `hf_quant_config.json` is nested."""
    inner = config.get("quantization")
    return inner if isinstance(inner, dict) else config


def of_config(config: Mapping[str, Any], where: str) -> Format:
    """Raises CheckpointError naming the field."""
    fields = fields_of(config)
    at = f"{where}: quantization_config" if fields is config else f"{where}: quantization"
    algorithm = one_of(fields, "quant_algo", at, (*ALGORITHMS, MIXED))
    ignored = names(fields.get("exclude_modules", fields.get("ignore")), f"{at}.exclude_modules")
    rules: list[tuple[Matcher, Scheme]] = [(by_glob(ignored), UNQUANTIZED)]
    if algorithm != MIXED:
        _check_kind(algorithm, None, at)
        return Format(tuple(rules), ALGORITHMS[algorithm](algorithm))
    layers = fields.get("quantized_layers")
    if not isinstance(layers, dict):  # TensorRT-LLM's W4AFP8 checkpoints have the layers in quant_cfg.json
        if layers is None and fields.get("group_size", 128) == 128:
            return Format((*rules, (is_expert, EXPERT)), Fp8Block(KERNEL_BLOCK))
        raise CheckpointError(f"{at}: quantized_layers must be an object of layers, got {layers!r}")
    for name, layer in layers.items():
        here = f"{at}.quantized_layers.{name}"
        kind = one_of(layer if isinstance(layer, dict) else {}, "quant_algo", here, ALGORITHMS)
        _check_kind(kind, name, here)
        rules.append((by_glob([name]), ALGORITHMS[kind](kind)))
    return Format(tuple(rules), UNQUANTIZED)


def _check_kind(algorithm: str, name: str | None, at: str) -> None:
    if algorithm == "W4A8_AWQ" and (name is None or not is_expert(name)):
        raise CheckpointError(f"{at}: quant_algo W4A8_AWQ is supported of experts beside FP8 only: use AWQ or NVFP4")
