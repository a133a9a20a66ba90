"""The formats of the compressed-tensors library (llm-compressor), and what each group of modules has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from thalweg.core.errors import CheckpointError
from thalweg.kernels.quantize.ref import Activations
from thalweg.quant.fp8_block import Fp8Block
from thalweg.quant.matching import Format, Matcher, by_pattern, names, one_of, refuse
from thalweg.quant.pairs import NibblePairs, mxfp4, nvfp4
from thalweg.quant.scaled import CHANNEL, SIXTEEN_BITS, TENSOR, ScaledCodes
from thalweg.quant.scheme import UNQUANTIZED, Scheme, TensorSpec

MIXED = "mixed-precision"
EIGHT_BITS = ("int-quantized", "float-quantized", "naive-quantized")


class PackedInts(NibblePairs):
    """pack-quantized: groups may be scattered over the inputs (actorder "group")."""

    def resolve(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> NibblePairs:
        has_index = self.named(weight, "weight_g_idx") in found
        return super(PackedInts, replace(self, index="weight_g_idx" if has_index else "")).resolve(weight, found)


def of_config(config: Mapping[str, Any], where: str) -> Format:
    """Raises CheckpointError naming the field."""
    at = f"{where}: quantization_config"
    one_of(config, "quantization_status", at, ("compressed", None))
    refuse(config, at, {"sparsity_config": "take a checkpoint without sparsity"} if _is_sparse(config) else {})
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{at}: config_groups must be an object of groups, got {groups!r}")
    ignored = names(config.get("ignore"), f"{at}.ignore")
    rules: list[tuple[Matcher, Scheme]] = [(by_pattern(ignored), UNQUANTIZED)]
    later: list[tuple[Matcher, Scheme]] = []
    for name, group in groups.items():
        scheme = _scheme(group, config.get("format"), f"{at}.config_groups.{name}")
        targets = names(group.get("targets"), f"{at}.config_groups.{name}.targets")
        exact = [target for target in targets if not target.startswith("re:")]
        rules.append((by_pattern(exact), scheme))  # names before expressions before classes
        later.append((by_pattern(t for t in targets if t not in exact), scheme))
    classes = [
        (by_pattern(names(group.get("targets"), at), ("Linear",)), rules[i][1])
        for i, group in enumerate(groups.values(), 1)
    ]
    return Format((*rules, *later, *classes), UNQUANTIZED)


def _is_sparse(config: Mapping[str, Any]) -> bool:
    sparsity = config.get("sparsity_config")
    return isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"


def _scheme(group: Mapping[str, Any], top: Any, at: str) -> Scheme:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{at}: weights must be an object, got {weights!r}")
    known = ("pack-quantized", *EIGHT_BITS, "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
    written = group.get("format") or top
    if written == "dense":
        return UNQUANTIZED
    one_of({"format": written}, "format", at, known)
    if top != MIXED and group.get("format") not in (None, top):
        raise CheckpointError(
            f"{at}: format {written!r} contradicts {top!r} above config_groups: {MIXED} mixes formats"
        )
    expected = {
        "nvfp4-pack-quantized": ("float", 4, 16),
        "mxfp4-pack-quantized": ("float", 4, 32),
        "mxfp8-quantized": ("float", 8, 32),
    }
    if written in expected:
        of_type, bits, columns = expected[written]
        _require(weights, at, written, type=of_type, num_bits=bits, group_size=columns)
        fp4 = {"nvfp4-pack-quantized": nvfp4, "mxfp4-pack-quantized": mxfp4}.get(written)
        return fp4(written) if fp4 else ScaledCodes(written, "e4m3", (1, 32), scale=torch.uint8, note=_note(group))
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if written == "pack-quantized":
        _require(weights, at, written, type="int", num_bits=4)
        one_of(weights, "strategy", f"{at}.weights", ("group", "channel"))
        if strategy == "group" and (type(size) is not int or size < 1):
            raise CheckpointError(f"{at}.weights: group_size must be a positive integer, got {size!r}")
        is_plain, columns = weights.get("symmetric", True), int(size or 0) if strategy == "group" else 0
        inputs, note = _activations(group, "float", 0) if is_plain and columns in (0, 128) else (None, _note(group))
        return PackedInts(
            written, "int4" if is_plain else "uint4", columns, code_types=(torch.int32,),
            zero="" if is_plain else "weight_zero_point", inputs=inputs, note=note,
            index="weight_g_idx" if weights.get("actorder") in ("group", "dynamic") else "",
        )  # fmt: skip
    kind = {"int": "int8", "float": "e4m3"}.get(weights.get("type", "int"), "")
    if weights.get("num_bits") != 8 or not kind or written.split("-")[0] not in ("naive", weights.get("type", "int")):
        raise CheckpointError(
            f"{at}.weights: {weights.get('num_bits')!r} bits of {weights.get('type')!r} are not {written}"
        )
    if not weights.get("symmetric", True):
        raise CheckpointError(f"{at}.weights: symmetric false is not supported for 8 bits: take a symmetric checkpoint")
    one_of(weights, "strategy", f"{at}.weights", ("tensor", "channel", "block", "group"))
    if strategy == "block":
        block = Fp8Block.of_config(
            {"weight_block_size": weights.get("block_structure")}, f"{at}.weights.block_structure"
        ).block
        if kind == "e4m3":
            return Fp8Block(block, "_scale")
    else:
        block = (1, int(size or 0)) if strategy == "group" else TENSOR if strategy == "tensor" else CHANNEL
    inputs, note = None, _note(group)
    if block[1] in ((0, 128) if kind == "int8" else (0,)):
        inputs, note = _activations(group, "int" if kind == "int8" else "float", block[1])
    return ScaledCodes(written, kind, block, inputs=inputs, note=note)


def _activations(group: Mapping[str, Any], of_type: str, columns: int) -> tuple[Activations | None, str]:
    """How a group of modules rounds activations, or None with a note where no kernel does it so. columns: of the
    weight's blocks, 0 for whole rows.
    """
    wish = group.get("input_activations")
    if not isinstance(wish, dict):
        return None, ""
    fits = wish.get("num_bits") == 8 and wish.get("type", "int") == of_type and wish.get("dynamic") is True
    fits = fits and wish.get("symmetric", True) is True
    kind = "e4m3" if of_type == "float" else "int8"
    if fits and wish.get("strategy") == "token":
        return Activations(kind), ""
    if fits and columns and wish.get("strategy") == "group" and wish.get("group_size") == columns:
        return Activations(kind, columns), ""
    return None, _note(group)


def _note(group: Mapping[str, Any]) -> str:
    wish = group.get("input_activations")
    if not isinstance(wish, dict):
        return ""
    shown = ", ".join(f"{name} {wish.get(name)}" for name in ("type", "num_bits", "strategy", "dynamic"))
    return f"{SIXTEEN_BITS}, and not its input_activations ({shown})"


def _require(weights: Mapping[str, Any], at: str, written: str, **fields: Any) -> None:
    defaults = {"type": "int"}
    for field, value in fields.items():
        if (got := weights.get(field, defaults.get(field))) != value:
            raise CheckpointError(f"{at}.weights: {field} {got!r} is not supported in {written}: {value!r} is")
