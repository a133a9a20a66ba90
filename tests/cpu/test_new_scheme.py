"""A quantization scheme is one class and one row of the catalog, whatever names, shapes and dtypes it stores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu import zoo
from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig
from thalweg.layers.reference import ReferenceLayers
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.quant.catalog import METHODS, NEVER_QUANTIZED
from thalweg.quant.scheme import Read, Scheme, Take, TensorSpec
from thalweg.weights.loader import load

CPU = torch.device("cpu")


class PackedPairs(Scheme):
    """Two unsigned 4-bit numbers a byte, the left column in the low half, 8 less than stored, and a scale a row."""

    name = "packed_pairs"

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        rows, columns = weight.shape
        packed = TensorSpec(f"{weight.name}_packed", (rows, columns // 2), torch.uint8)
        return packed, TensorSpec(f"{weight.name}_scale", (rows, 1), torch.float32)

    def check(self, weight: TensorSpec, found: Mapping[str, TensorSpec]) -> None:
        for spec in self.stored(weight):
            if found.get(spec.name) != spec:
                raise CheckpointError(f"{weight.name}: {spec.name} is missing or of another shape")

    def reads(self, weight: TensorSpec, take: Take) -> tuple[Read, ...]:
        return Read(f"{weight.name}_packed", take[:1]), Read(f"{weight.name}_scale", take[:1])

    def decode(self, weight: TensorSpec, tensors: Sequence[Tensor], take: Take) -> Tensor:
        packed, scale = tensors
        numbers = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float() - 8
        return (numbers * scale)[(slice(None), *take[1:])]


class Stream:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.specs = {name: TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Any:
        return (self.tensors[read.name][read.take] if read.take else self.tensors[read.name] for read in reads)


def packed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The stored tensors of a checkpoint whose matrices are packed, and the numbers that they are."""
    stored, numbers = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or NEVER_QUANTIZED.search(name):
            stored[name] = numbers[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 7
        codes = (tensor / scale).round().clamp(-8, 7).int()
        halves = (codes + 8).to(torch.uint8)
        stored[f"{name}_packed"] = halves[:, 0::2] | halves[:, 1::2] << 4
        stored[f"{name}_scale"] = scale
        numbers[name] = codes * scale
    return stored, numbers


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_packed_weights_load_by_their_own_names(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(METHODS, "packed_pairs", lambda config, where: PackedPairs())
    (tmp_path / "config.json").write_text(
        json.dumps(zoo.draw_config(family, 4) | {"intermediate_size": 64, "moe_intermediate_size": 32})
    )
    facts = read_facts(tmp_path)
    layers = ReferenceLayers(torch.float32, CPU, kernels=KernelConfig(decode="reference"), published=torch.float32)
    generator = torch.Generator().manual_seed(1)
    models = [catalog.assemble(facts, layers) for _ in range(2)]
    table = models[0].table()
    plain = {name: torch.randn(rules[0].source.shape, generator=generator) for name, rules in table.by_source().items()}
    stored, numbers = packed(plain)
    assert any(name.endswith("_packed") for name in stored)
    config = {"quant_method": "packed_pairs"}
    load(models[0], table, Stream(stored), config)
    load(models[1], table, Stream(numbers))
    for (name, quantized), (_, expected) in zip(
        models[0].named_parameters(), models[1].named_parameters(), strict=True
    ):
        assert torch.equal(quantized, expected), name
    del stored[next(name for name in stored if name.endswith("_scale"))]
    with pytest.raises(CheckpointError, match=r"_scale is missing or of another shape"):
        load(models[0], table, Stream(stored), config)
