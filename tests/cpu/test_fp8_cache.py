"""Dense models with an FP8 KV cache, by the reference: close to the unquantized cache, and independent of chunking."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.cpu import zoo
from tests.cpu.batches import Bench
from tests.cpu.in_memory import InMemory
from tests.cpu.zoo import draw_config
from tests.seed import SEED
from thalweg.config.model import facts_of
from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.interface import Model
from thalweg.weights.loader import read_cache_scales


def drawn(family: str, kv: str) -> Model:
    """The same weights whatever the cache."""
    parts = ReferenceLayers(torch.float32, torch.device("cpu"), kernels=KernelConfig(kv=kv))
    model = catalog.assemble(facts_of(draw_config(family, SEED), family), parts)
    assert isinstance(model, torch.nn.Module)
    zoo.fill(model, SEED)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_keys_and_values_in_fp8(family: str) -> None:
    plain, coded = Bench(drawn(family, ""), 1), Bench(drawn(family, "fp8_e4m3"), 2)
    assert {spec.page_bytes * 4 for spec in coded.planes.specs} == {spec.page_bytes for spec in plain.planes.specs}
    ids = [random.Random(SEED).randrange(coded.model.facts.vocab) for _ in range(150)]
    exact, whole = plain.step([(0, ids)])[0], coded.step([(0, ids)])[0]
    error = float((whole - exact).norm() / exact.norm())
    assert 0 < error < 0.1, f"TEST_SEED={SEED}: {error}"  # 2.6 % of each key and value, and what layers make of it
    cuts = [0, 64, 65, 100, 149, 150]
    parts = [coded.step([(1, ids[a:b])])[0] for a, b in itertools.pairwise(cuts)]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-2 * float(whole.abs().max())), f"TEST_SEED={SEED}"


@pytest.mark.parametrize(
    "published", ["self_attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.{}_proj.output_scale"]
)
def test_scales_of_a_checkpoint_are_used_and_needed_by_no_other_cache(published: str) -> None:
    model = drawn("llama", "fp8_e4m3")
    names = {kind: f"model.layers.1.{published.replace('{}', kind)}" for kind in "kv"}
    stream = InMemory({names["k"]: torch.tensor(0.5), names["v"]: torch.tensor([0.25])})
    assert all(model.table().is_skipped(name) for name in names.values())
    for kv, expected in (("fp8_e4m3", [1.0, 1.0, 0.5, 0.25]), ("", [None] * 4)):
        planes = Planes(drawn("llama", kv).planes(), 2)
        read_cache_scales(model.table(), stream, planes)
        found = [planes.scale(name, layer) for layer in (0, 1) for name in ("key", "value")]
        assert [None if scale is None else float(scale) for scale in found] == expected
    for value in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match="one finite number"):
            read_cache_scales(model.table(), InMemory({names["k"]: torch.tensor(value)}), Planes(model.planes(), 2))


def test_one_scale_can_be_of_keys_and_values_and_none_is_below_0() -> None:
    model = drawn("llama", "fp8_e4m3")
    planes = Planes(model.planes(), 2)
    published = {"0.self_attn.kv_scale": 0.5, "1.self_attn.k_scale": -1.0, "1.self_attn.v_scale": 0.0}
    stream = InMemory({f"model.layers.{name}": torch.tensor(value) for name, value in published.items()})
    assert all(map(model.table().is_skipped, stream.specs))
    read_cache_scales(model.table(), stream, planes)
    found = [planes.scale(name, layer) for layer in (0, 1) for name in ("key", "value")]
    assert [scale and float(scale) for scale in found] == [0.5, 0.5, 1.0, 1.0]
