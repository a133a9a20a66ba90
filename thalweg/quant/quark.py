"""The formats of AMD's Quark: MXFP4, and FP8 with a multiplier for each tensor or row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.core.errors import CheckpointError
from thalweg.quant.matching import Format, Matcher, by_glob, by_pattern, names
from thalweg.quant.pairs import mxfp4
from thalweg.quant.scaled import CHANNEL, TENSOR, ScaledCodes, fp8_rows
from thalweg.quant.scheme import UNQUANTIZED, Scheme


def of_config(config: Mapping[str, Any], where: str) -> Format:
    """Raises CheckpointError naming the field."""
    at = f"{where}: quantization_config"
    excluded = names(config.get("exclude"), f"{at}.exclude")
    patterns = [name for name in excluded if name.startswith("re:")]
    rules: list[tuple[Matcher, Scheme]] = [
        (by_pattern(patterns), UNQUANTIZED),
        (by_glob(name for name in excluded if name not in patterns), UNQUANTIZED),
    ]
    for name, layer in (config.get("layer_quant_config") or {}).items():
        rules.append((by_glob([name]), _scheme(layer, f"{at}.layer_quant_config.{name}")))
    linear = (config.get("layer_type_quant_config") or {}).get("Linear")
    return Format(tuple(rules), _scheme(linear or config.get("global_quant_config"), f"{at}.global_quant_config"))


def _scheme(layer: Any, at: str) -> Scheme:
    if not isinstance(layer, dict):
        raise CheckpointError(f"{at} must be an object, got {layer!r}")
    weight = layer.get("weight")
    if weight is None:
        return UNQUANTIZED
    if not isinstance(weight, dict):
        raise CheckpointError(f"{at}.weight must be an object, got {weight!r}: one scale a group is supported")
    kind = str(weight.get("dtype")), str(weight.get("qscheme")), weight.get("group_size"), weight.get("scale_format")
    if kind == ("fp4", "per_group", 32, "e8m0"):
        return mxfp4("quark mxfp4", "weight")
    steps = {"per_tensor": TENSOR, "per_channel": CHANNEL}.get(kind[1])
    if kind[0] in ("fp8_e4m3", "fp8") and steps is not None:
        inputs = layer.get("input_tensors") or {}
        if not inputs:
            return ScaledCodes("quark fp8", "e4m3", steps)
        return fp8_rows("quark fp8", steps, bool(inputs.get("is_dynamic")) and inputs.get("qscheme") == "per_channel")
    raise CheckpointError(
        f"{at}.weight: {kind[0]} {kind[1]}, group_size {kind[2]!r}, scale_format {kind[3]!r} is not supported; there is"
        " fp4 per_group 32 e8m0 (MXFP4), fp8_e4m3 per_tensor and fp8_e4m3 per_channel"
    )
