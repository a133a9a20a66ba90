"""Reads what `thalweg quantize` writes with compressed-tensors: how the library reads the configuration, which scheme
it gives to each module, and its numbers. read_back.json has the result: where scales are bf16, both are compared in
bf16.

    python tests/cpu/data/formats/read_back.py FOLDER

FOLDER has compressed-tensors 0.20.0 with loguru and psutil, unpacked.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.quant.catalog import Stored
from thalweg.quant.scheme import UNQUANTIZED, Read, TensorSpec
from thalweg.quantize.cli import main as quantize
from thalweg.weights.stream import Safetensors

ROOT = Path(__file__).parents[4]
WRITTEN = ("int4", "nvfp4", "mxfp4", "int8")


def read_back(folder: Path) -> dict[str, Any]:
    """How many modules the library unpacks, and the largest difference from our numbers, as a share of the largest.

    Raises AssertionError where the library takes another module for quantized than we do.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match

    own = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    config, module = QuantizationConfig.model_validate(own), nn.Linear(1, 1)
    counts, off = dict[str, int](), 0.0
    with Safetensors(folder) as stream:
        stored = Stored(stream.specs, own)
        names = {name.rpartition(".")[0] for name in stream.specs if name.endswith((".weight", ".weight_packed"))}
        for name in sorted(names):
            parts = {spec.removeprefix(f"{name}."): spec for spec in stream.specs if spec.startswith(f"{name}.")}
            tensors = {part: stream.copy(Read(spec)) for part, spec in parts.items()}
            packed = next(tensors[part] for part in ("weight_packed", "weight") if part in tensors)
            scale = "weight_scale" in tensors
            found = [group for group in config.config_groups.values() if is_match(name, module, group.targets)]
            is_ignored = is_match(name, module, config.ignore or [])
            if not scale:
                assert is_ignored or packed.dim() != 2 or not found or "embed" in name, name
                continue
            assert found and not is_ignored, name
            exact = [group for group in found if "Linear" not in group.targets]
            scheme = (exact or found)[0]
            kind = str(scheme.format or config.format)
            compressor = BaseCompressor.get_value_from_registry(kind)
            numbers = compressor.decompress(tensors, scheme)["weight"]
            weight = TensorSpec(f"{name}.weight", tuple(numbers.shape), torch.bfloat16)
            ours = stored.of(weight)
            assert ours is not UNQUANTIZED
            decoded = ours.decode(weight, [stream.copy(read) for read in ours.reads(weight, ())], ()).to(numbers.dtype)
            off = max(off, float((decoded - numbers).abs().max() / numbers.abs().max()))
            counts[kind] = counts.get(kind, 0) + 1
    return {"modules": counts, "largest difference": off}


def main(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    import compressed_tensors

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in WRITTEN:
            out = Path(scratch) / name
            assert quantize([str(ROOT / "models/tiny"), str(out), "--format", name]) == 0
            results[name] = read_back(out)
            print(name, results[name])
    made = {"library": f"compressed-tensors {compressed_tensors.__version__}", "formats": results}
    Path(__file__).with_suffix(".json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
