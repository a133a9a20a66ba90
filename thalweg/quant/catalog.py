"""Which scheme a checkpoint's weights have. To add one: a file, and a row in `METHODS`.

A stored weight says itself what it is: by its dtype and by the tensors beside it. `quantization_config` says it for
weights that are not there, as those that `make-checkpoint` and `--load-format dummy` invent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from thalweg.core.errors import CheckpointError
from thalweg.quant import awq, compressed_tensors, gptq, modelopt, quark, scaled, w4afp8
from thalweg.quant.matching import Format
from thalweg.quant.pairs import fused_mxfp4
from thalweg.quant.scheme import UNQUANTIZED, Quantized, Scheme, TensorSpec
from thalweg.quant.w4afp8 import W4aFp8

Reader = Callable[[Mapping[str, Any], str], Scheme | Format]  # of a quantization_config, which is named so in errors
METHODS: dict[str, Reader] = {
    "fp8": scaled.fp8_format,
    "compressed-tensors": compressed_tensors.of_config,
    "awq": awq.Awq.of_config,
    "gptq": gptq.Gptq.of_config,
    "w4afp8": w4afp8.of_config,
    "modelopt": modelopt.of_config,
    "modelopt_fp4": modelopt.of_config,
    "modelopt_mixed": modelopt.of_config,
    "quark": quark.of_config,
    "mxfp4": fused_mxfp4,
    "blockwise_int8": scaled.int8_format,
    "w8a8_int8": scaled.int8_format,
}
OTHER_NAMES = {  # by quant_method: of vLLM and SGLang
    "awq": ("awq_marlin", "moe_wna16"),
    "gptq": ("gptq_marlin", "moe_wna16"),
    "mxfp4": ("gpt_oss_mxfp4",),
}
PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# weights that DeepSeek publishes in bf16 whatever the rest is
NEVER_QUANTIZED = re.compile(r"embed_tokens|lm_head|shared_head|norm|mlp\.gate\.|weights_proj|eh_proj")


# names of tensors that only quantized weights have, by which another format is recognized
CODE_SUFFIXES = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "weight.absmax", "scale")
RECOGNIZED = "recognized_by"  # field of a quantization_config that no file states: the weight that tells


def format_of(config: Mapping[str, Any], where: str = "config.json") -> Format:
    """The scheme of each module by a quantization_config; empty is none. Raises CheckpointError for an unknown method,
    naming it.
    """
    if not config:
        return Format((), UNQUANTIZED)
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{where}: quantization_config.quant_method {method!r} is not supported; there is {', '.join(METHODS)}."
            " Take the unquantized checkpoint, or one in a format named here"
        )
    read = METHODS[method](config, where)
    return read if isinstance(read, Format) else Format((), read)


def is_code_name(name: str) -> bool:
    """Whether only quantized weights have a tensor of this name."""
    return any(name.endswith("." + suffix) for suffix in CODE_SUFFIXES)


def is_of_quantized(tensor: TensorSpec) -> bool:
    """Whether only quantized weights have such a tensor."""
    return is_code_name(tensor.name) or tensor.dtype not in PLAIN_DTYPES and tensor.name.endswith("weight")


def config_of_tensors(found: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """The quantization_config of a checkpoint that has none: w8a8_int8 where all quantized weights are INT8 with a
    scale for each row, {} where none is quantized. RECOGNIZED names the first quantized weight.

    Raises CheckpointError naming the first weight of any other format.
    """
    quantized = [spec for spec in found.values() if is_of_quantized(spec) and not _is_beside_plain(spec, found)]
    for spec in quantized:
        if not _is_of_int8_rows(spec.name.removesuffix("_scale"), found):
            raise CheckpointError(_unstated(found.get(f"{spec.name.rpartition('.')[0]}.weight", spec)))
    return {"quant_method": "w8a8_int8", RECOGNIZED: quantized[0].name.removesuffix("_scale")} if quantized else {}


def _is_beside_plain(tensor: TensorSpec, found: Mapping[str, TensorSpec]) -> bool:
    """Whether a tensor is beside an unquantized weight; the loader refuses it there."""
    weight = found.get(f"{tensor.name.rpartition('.')[0]}.weight")
    return weight is not None and weight.dtype in PLAIN_DTYPES


def _is_of_int8_rows(name: str, found: Mapping[str, TensorSpec]) -> bool:
    """Whether a weight is INT8 with a scale for each row, and nothing beside it changes what codes mean."""
    codes, scale = found.get(name), found.get(f"{name}_scale")
    if codes is None or scale is None or codes.dtype != torch.int8 or len(codes.shape) != 2:
        return False
    module, rows = name.removesuffix("weight"), codes.shape[0]
    has_offsets = any(module + suffix in found for suffix in ("weight_zero_point", "input_scale", "input_zero_point"))
    return scale.dtype in PLAIN_DTYPES and scale.shape in ((rows,), (rows, 1)) and not has_offsets


def _unstated(tensor: TensorSpec) -> str:
    return (
        f"{tensor.name} is {tensor.dtype} {tensor.shape}, and config.json has no quantization_config that says how it"
        " is scaled: add its producer's to config.json, or take a checkpoint that has one"
    )


class Schemes(Protocol):
    """Tells the scheme of each weight of one checkpoint."""

    def of(self, weight: TensorSpec) -> Scheme:
        """weight: its name and shape, in the dtype of an unquantized checkpoint. Raises CheckpointError."""


class Declared:
    """By quantization_config alone."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.format = format_of(config)

    def of(self, weight: TensorSpec) -> Scheme:
        module = weight.name.rpartition(".")[0]
        if len(weight.shape) != 2 or NEVER_QUANTIZED.search(weight.name):  # a bias has no codes
            return UNQUANTIZED
        return self.format.scheme(module)


class Stored:
    """By the headers of a checkpoint: a weight with a plain dtype is not quantized, whatever config.json says."""

    def __init__(self, found: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> None:
        self.found, self.format = found, format_of(config)

    def of(self, weight: TensorSpec) -> Scheme:
        held, module = self.found.get(weight.name), weight.name.removesuffix(".weight")
        scheme = self.format.scheme(module)
        is_plain = held is not None and held.dtype in PLAIN_DTYPES
        if is_plain or not weight.dtype.is_floating_point or (held is None and len(weight.shape) != 2):
            if held is not None:
                UNQUANTIZED.check(weight, self.found)
            return UNQUANTIZED
        if held is not None and scheme is not UNQUANTIZED and len(weight.shape) != 2:
            raise CheckpointError(f"{weight.name} is {held.dtype}, and only a matrix can be quantized: {weight.shape}")
        if scheme is not UNQUANTIZED and scheme.is_stored(weight, self.found):
            try:
                return scheme.resolve(weight, self.found)
            except CheckpointError as error:
                message = f"{error}. The file is damaged, or config.json is of another checkpoint: download both again"
                raise CheckpointError(message) from None
        if held is not None and scheme is UNQUANTIZED:
            raise CheckpointError(_unstated(held))
        own = {spec.name for spec in scheme.stored(weight)}
        other = [name for suffix in CODE_SUFFIXES if (name := f"{module}.{suffix}") in self.found and name not in own]
        if other:
            raise CheckpointError(
                f"{other[0]}: config.json says that {weight.name} is {scheme.name}, which has no such tensor: the"
                " configuration is of another checkpoint; download both again"
            )
        return UNQUANTIZED  # missing, says the loader


def quantization_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Values of --quantization that are true of a quantization_config, the one that is used here first."""
    method = str(config.get("quant_method", "none"))
    if not method.startswith("modelopt"):
        return method, *OTHER_NAMES.get(method, ())
    algorithm = str(modelopt.fields_of(config).get("quant_algo"))
    mixed = ("modelopt_mixed", "w4afp8")[: 1 + any(isinstance(one, W4aFp8) for one in format_of(config).schemes())]
    kinds = {"NVFP4": ("modelopt_fp4",), "MXFP8": ("modelopt_mxfp8",), "MXFP4": (), "FP8": ("modelopt_fp8",)}
    kinds[modelopt.MIXED] = mixed
    return "modelopt", *next((names for kind, names in kinds.items() if kind in algorithm), ())


def quantized(config: Mapping[str, Any]) -> tuple[Quantized, ...]:
    """The schemes that a quantization_config gives to some modules."""
    return tuple(scheme for scheme in format_of(config).schemes() if isinstance(scheme, Quantized))


def scheme_of_experts(config: Mapping[str, Any], layers: int) -> Quantized | None:
    """The scheme of most routed experts: those of a layer in the middle."""
    scheme = format_of(config).scheme(f"model.layers.{layers // 2}.mlp.experts.0.up_proj")
    return scheme if isinstance(scheme, Quantized) else None
