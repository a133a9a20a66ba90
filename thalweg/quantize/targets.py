"""The formats that `thalweg quantize` writes: the quantization_config of each, which says what every weight becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.core.errors import UnsupportedConfig

Config = dict[str, Any]
EXPERTS = r"re:.*\.mlp\.experts\.\d+\..*"
BLOCK = [128, 128]


@dataclass(frozen=True)
class Choice:
    """What the command line chose."""

    modules: str  # "experts" or "linear"
    group_size: int  # of int4
    plain: tuple[str, ...]  # modules that are not quantized, by their full names
    keeps_fp8: bool  # weights beside the experts are FP8 in blocks, and stay so


def _arguments(**given: Any) -> Config:
    return {"symmetric": True, "dynamic": False, "actorder": None, "observer": "minmax", **given}


def _group(written: str, targets: Sequence[str], weights: Config, activations: Config | None = None) -> Config:
    return {
        "format": written,
        "targets": list(targets),
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


FP8_BLOCKS = _arguments(num_bits=8, type="float", strategy="block", block_structure=BLOCK)
FP8_INPUTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "dynamic": True,
}
INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


def _compressed(written: str, weights: Config, choice: Choice, activations: Config | None = None) -> Config:
    targets = [EXPERTS] if choice.modules == "experts" else ["Linear"]
    groups = {"group_0": _group(written, targets, weights, activations)}
    top = written
    if choice.modules == "experts" and choice.keeps_fp8:
        groups["group_1"], top = _group("float-quantized", ["Linear"], FP8_BLOCKS, FP8_INPUTS), "mixed-precision"
    return {
        "quant_method": "compressed-tensors",
        "format": top,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(choice.plain),
        "kv_cache_scheme": None,
    }


def _int4(choice: Choice) -> Config:
    weights = _arguments(num_bits=4, type="int", strategy="group", group_size=choice.group_size)
    return _compressed("pack-quantized", weights, choice)


def _nvfp4(choice: Choice) -> Config:
    weights = _arguments(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    return _compressed("nvfp4-pack-quantized", weights, choice)


def _mxfp4(choice: Choice) -> Config:
    weights = _arguments(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8")
    return _compressed("mxfp4-pack-quantized", weights, choice)


def _int8(choice: Choice) -> Config:
    return _compressed("int-quantized", _arguments(num_bits=8, type="int", strategy="channel"), choice, INT8_INPUTS)


def _fp8(choice: Choice) -> Config:
    config: Config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
    return config | {"modules_to_not_convert": list(choice.plain)}


def _w4afp8(choice: Choice) -> Config:
    config: Config = {"quant_method": "w4afp8", "group_size": 128, "weight_block_size": BLOCK}
    return config | {"ignored_layers": list(choice.plain)}


@dataclass(frozen=True)
class TargetFormat:
    summary: str
    config: Callable[[Choice], Config]
    modules: str = ""  # what it is always of; "": experts where there are some, else all


TARGETS: Mapping[str, TargetFormat] = {
    "int4": TargetFormat("4-bit integers, W4A16 of compressed-tensors", _int4),
    "w4afp8": TargetFormat("4-bit experts, FP8 blocks elsewhere", _w4afp8, "experts"),
    "nvfp4": TargetFormat("4-bit floats with e4m3 scales for 16, of compressed-tensors", _nvfp4),
    "mxfp4": TargetFormat("4-bit floats with power-of-two scales for 32, of compressed-tensors", _mxfp4),
    "int8": TargetFormat("8-bit integers with a scale for each row, W8A8 of compressed-tensors", _int8, "linear"),
    "fp8": TargetFormat("e4m3 in blocks of 128 x 128, as DeepSeek publishes", _fp8, "linear"),
}


def config_of(
    name: str, modules: str | None, group_size: int | None, plain: Sequence[str], has_experts: bool, keeps_fp8: bool
) -> Config:
    """The quantization_config that a model gets. plain, keeps_fp8: as in `Choice`. Raises UnsupportedConfig."""
    target = TARGETS[name]
    if group_size is not None and name != "int4":
        raise UnsupportedConfig(f"--group-size goes with --format int4; {name} has groups of its own")
    if target.modules and modules not in (None, target.modules):
        raise UnsupportedConfig(f"--modules {modules}: {name} is of {target.modules}")
    chosen = target.modules or modules or ("experts" if has_experts else "linear")
    if chosen == "experts" and not has_experts:
        raise UnsupportedConfig(f"--format {name}: this model has no routed experts")
    return target.config(Choice(chosen, group_size or 128, tuple(plain), keeps_fp8))
