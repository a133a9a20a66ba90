"""Writes a checkpoint in formats that `thalweg quantize` does not write, as their producers spell them.

    python -m benchmarks.checkpoints models/tiny OUT --format awq

Every weight is rounded to nearest. Nothing is calibrated, so a producer's own checkpoint is at least as accurate.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from thalweg.bench.make_checkpoint import COPIED
from thalweg.layers.reference import ReferenceLayers
from thalweg.models import catalog
from thalweg.quant.awq import NIBBLE, Awq
from thalweg.quant.catalog import Declared, Stored
from thalweg.quant.compressed_tensors import PackedInts
from thalweg.quant.gptq import Gptq
from thalweg.quant.packing import pack_words
from thalweg.quant.pairs import FusedMxfp4, NibblePairs, mxfp4
from thalweg.quant.scaled import ScaledCodes
from thalweg.quant.scheme import UNQUANTIZED, Read, Scheme, TensorSpec
from thalweg.quantize.jobs import SHAPE
from thalweg.quantize.round import E4M3_MAX, INT8_MAX, TINY, nearest
from thalweg.quantize.round import encode as round_to_nearest
from thalweg.weights.stream import SINGLE, Safetensors

Config = dict[str, Any]
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
ORDER = 5  # columns between neighbours in the order of activations; no number of columns is a multiple of it


def _gptq(**fields: Any) -> Config:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True} | fields


def _modelopt(algorithm: str) -> Config:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


def _quark(**weight: Any) -> Config:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"]}


def _compressed(written: str, **weights: Any) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    top = {"quant_method": "compressed-tensors", "format": written, "quantization_status": "compressed"}
    return top | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


CONFIGS: dict[str, Config] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": _gptq(),
    "gptq-asym": _gptq(sym=False, checkpoint_format="gptq_v2"),
    "gptq-desc-act": _gptq(sym=False, desc_act=True, dynamic={r"-:.*\.experts\..*": {}}),
    "int4-asym": _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    ),
    "modelopt-fp8": _modelopt("FP8"),
    "modelopt-nvfp4": _modelopt("NVFP4"),
    "modelopt-mxfp8": _modelopt("MXFP8"),
    "quark-mxfp4": _quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"),
    "quark-fp8": _quark(dtype="fp8_e4m3", qscheme="per_tensor"),
    "gpt-oss-mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "int8-block": {"quant_method": "blockwise_int8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "fp8-tensor": _compressed("float-quantized", strategy="tensor", **FP8),
    "fp8-channel": _compressed("float-quantized", strategy="channel", **FP8),
}

# formats that differ in their layout alone: their numbers are equal, which tests/cpu/test_formats.py holds
SPELLINGS = (("awq", "gptq-asym", "int4-asym"), ("fp8-tensor", "modelopt-fp8", "quark-fp8"))


def affine(numbers_NK: Tensor, group: int, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 to 15 [N, K], scales [N, K / group] in float16, and zero points."""
    blocks = numbers_NK.unflatten(1, (-1, group))
    if is_symmetric:
        scale = (blocks.abs().amax(2) / 7.5).clamp_min(2**-14).half()
        zero = torch.full_like(scale, 8)
    else:
        low, high = blocks.amin(2).clamp(max=0), blocks.amax(2).clamp(min=0)
        scale = ((high - low) / 15).clamp_min(2**-14).half()
        zero = (-low / scale).round().clamp(0, 15)
    codes = (blocks / scale[..., None].float()).round() + zero[..., None]
    return codes.clamp(0, 15).to(torch.int32).flatten(1), scale, zero.to(torch.int32)


def _awq(scheme: Awq, numbers_NK: Tensor, config: Config) -> tuple[Tensor, ...]:
    codes, scale, zero = affine(numbers_NK, scheme.group, False)
    return pack_words(codes.t(), 1, NIBBLE), pack_words(zero.t(), 1, NIBBLE), scale.t()


def _gptq_words(scheme: Gptq, numbers_NK: Tensor, config: Config) -> tuple[Tensor, ...]:
    columns = numbers_NK.shape[1]
    order_K = torch.arange(columns) * ORDER % columns if scheme.desc_act else torch.arange(columns)
    codes, scale, zero = affine(numbers_NK[:, order_K], scheme.group, config["sym"])
    in_place = torch.empty_like(codes)
    in_place[:, order_K] = codes
    index_K = torch.empty_like(order_K)
    index_K[order_K] = torch.arange(columns) // scheme.group
    zeros_GN = (zero.t() - int(scheme.is_v1)) & 15
    index = (index_K.to(torch.int32),) if scheme.desc_act else ()
    return pack_words(in_place.t(), 0), pack_words(zeros_GN, 1), scale.t(), *index


def _scaled(scheme: ScaledCodes, numbers_NK: Tensor, config: Config) -> tuple[Tensor, ...]:
    shape = numbers_NK.shape
    rows, columns = (step or size for step, size in zip(scheme.steps, shape, strict=True))
    padded = F.pad(numbers_NK, (0, -shape[1] % columns, 0, -shape[0] % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = (tiles.abs().amax((1, 3)) / (INT8_MAX if scheme.kind == "int8" else E4M3_MAX)).clamp_min(TINY)
    stored = scale
    if scheme.scale == torch.uint8:
        exponent = scale.log2().ceil()
        stored, scale = (exponent + 127).to(torch.uint8), exponent.exp2()
    codes = nearest(scheme, tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return codes[: shape[0], : shape[1]], stored


def _pairs(scheme: NibblePairs, numbers_NK: Tensor, config: Config) -> tuple[Tensor, ...]:
    if not scheme.zero:
        weight = TensorSpec("x.weight", tuple(numbers_NK.shape), torch.bfloat16)
        codes, scale, *total = round_to_nearest(scheme, weight, numbers_NK, float(numbers_NK.abs().max()))
        return codes, scale, *(one if scheme.is_divided else one.reciprocal() for one in total)
    codes, scale, zero = affine(numbers_NK, scheme.group, False)
    return pack_words(codes, 1), scale.float(), pack_words(zero, 0)


def _fused(scheme: FusedMxfp4, numbers_NK: Tensor, config: Config) -> tuple[Tensor, ...]:
    codes, scale = _pairs(mxfp4("mxfp4", "weight"), numbers_NK, config)
    return codes.unflatten(1, (-1, 16))[None], scale[None]


WRITERS: dict[type[Scheme], Callable[[Any, Tensor, Config], tuple[Tensor, ...]]] = {
    Awq: _awq,
    Gptq: _gptq_words,
    ScaledCodes: _scaled,
    FusedMxfp4: _fused,
}


def _put(made: dict[str, Tensor], specs: Mapping[str, TensorSpec], read: Read, part: Tensor) -> None:
    """Stores a tensor, or what one expert has of it."""
    spec = specs[read.name]
    whole = made.setdefault(read.name, torch.empty(spec.shape, dtype=spec.dtype))
    whole[read.take] = part.to(spec.dtype).reshape(whole[read.take].shape)


def write(folder: Path, out: Path, config: Config) -> None:
    """Writes the checkpoint of `folder` to `out`, as a quantization_config says. Raises CheckpointError."""
    facts = catalog.read_facts(folder)
    dtype = catalog.published_dtype(facts)
    model = catalog.assemble(facts, ReferenceLayers(dtype, torch.device("meta"), published=dtype))
    tables = [model.table()] + ([catalog.build_nextn(model).table()] if facts.nextn else [])
    weights = {spec.name: spec for table in tables for spec in table.sources()}
    made, done, declared = dict[str, Tensor](), set[str](), Declared(config)
    with Safetensors(folder) as stream:
        stored = Stored(stream.specs, facts.quantization_config)
        for weight in weights.values():
            source, target = stored.of(weight), declared.of(weight)
            reads = source.reads(weight, ())
            tensors = [stream.copy(read) for read in reads]
            done |= {read.name for read in reads}
            numbers = source.decode(weight, tensors, ())
            if target is UNQUANTIZED:
                made[weight.name] = numbers if source is UNQUANTIZED else numbers.to(weight.dtype)
                continue
            if isinstance(target, FusedMxfp4):
                assert facts.moe is not None
                target = replace(target, experts=facts.moe.experts)
            parts = WRITERS.get(type(target), _pairs)(target, numbers.float(), config)
            specs = {spec.name: spec for spec in target.stored(weight)}
            for read, part in zip(target.reads(weight, ()), parts, strict=True):
                _put(made, specs, read, part)
            if isinstance(target, PackedInts):
                made[target.named(weight, SHAPE)] = torch.tensor(weight.shape)
        made |= {name: stream.copy(Read(name)) for name in stream.specs if name not in done}
    out.mkdir(parents=True)
    for pattern in COPIED:
        for file in folder.glob(pattern):
            shutil.copyfile(file, out / file.name)
    own = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (out / "config.json").write_text(json.dumps(own, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, out / SINGLE, {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("out", type=Path, help="folder that is written")
    parser.add_argument("--format", choices=CONFIGS, required=True)
    options = parser.parse_args()
    write(options.model, options.out, CONFIGS[options.format])


if __name__ == "__main__":
    main()
