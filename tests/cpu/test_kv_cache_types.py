"""KV cache types on the bundled model: the model's dtype, FP8, latents, expanded keys and values."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from tests.configs import config
from tests.cpu import zoo
from tests.cpu.batches import Bench
from tests.cpu.in_memory import InMemory
from thalweg.config.engine import EngineConfig
from thalweg.config.model import facts_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.report import AUTO, USER, Decision, Report
from thalweg.core.sampling import SamplingParams
from thalweg.engine.calibration_checks import SelfCheck, replace_failing, self_checks
from thalweg.kernels.attend.ref import hadamard
from thalweg.layers.linear import PackedShard
from thalweg.layers.mla import Indexer
from thalweg.layers.module import Module
from thalweg.layers.reference import ReferenceLayers
from thalweg.llm import LLM
from thalweg.memory.planes import FP8, FP8_MAX, Planes, decode, encode, index_plane, record_plane
from thalweg.memory.records import quantize
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.models.interface import Model
from thalweg.runner.accepted_path import kv_mover
from thalweg.weights.loader import read_cache_scales

FOLDER = Path(__file__).parents[2] / "models" / "tiny"

FP8_KEYS: dict[str, object] = {"kv": "fp8_ds_mla", "fp8_index": True}


def model(dtype: torch.dtype = torch.float32, **choice: object) -> Model:
    """The bundled model with its plain twin's weights."""
    plain, parts = zoo.ours(FOLDER, dtype), ReferenceLayers(dtype, torch.device("cpu"), kernels=KernelConfig(**choice))  # type: ignore[arg-type]
    made = catalog.assemble(read_facts(FOLDER), parts)
    assert isinstance(made, torch.nn.Module) and isinstance(plain, torch.nn.Module)
    made.load_state_dict(plain.state_dict())
    return made


def logits(of: Model, ids: list[int], whole: int) -> Tensor:
    """Of a prompt, then of single tokens."""
    bench = Bench(of, 1, pages=8)
    return torch.cat([*bench.step([(0, ids[:whole])]), *(bench.step([(0, [one])])[0] for one in ids[whole:])])


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


IDS = random.Random(4).choices(range(3, 500), k=150)


@pytest.fixture(scope="module")
def exact() -> Tensor:
    return logits(model(), IDS, 120)


def test_keys_and_values_give_what_latents_give(exact: Tensor) -> None:
    """With and without a choice of context: index_topk is 64."""
    kept = model(latent=False)
    assert {spec.name for spec in kept.planes()} == {"key", "value", "index"}
    assert error(logits(kept, IDS, 120), exact) < 1e-4
    assert error(logits(kept, IDS, 40)[-110:], exact[-110:]) < 1e-4


class OwnProducts(Module):
    """A packed linear with a product for each part, as where their schemes differ."""

    def __init__(self, layers: ReferenceLayers, parts: Sequence[PackedShard], inputs: int) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(ReferenceLayers.packed(layers, [part], inputs) for part in parts)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.linears)


@dataclass(frozen=True, slots=True)
class SplitLayers(ReferenceLayers):
    """The reference's, but for packed linears of several parts."""

    def packed(self, parts: Sequence[PackedShard], inputs: int, has_bias: bool = False) -> Any:
        return (
            ReferenceLayers.packed(self, parts, inputs, has_bias)
            if has_bias or len(parts) == 1 or "gate" in parts[0].name
            else OwnProducts(self, parts, inputs)
        )


@pytest.mark.parametrize("full", [(True, True, True, True), (True, False, False, True)])
def test_parts_of_different_schemes_give_what_packed_ones_give(full: tuple[bool, ...]) -> None:
    """Prompts whole, in chunks and token by token; layers with an indexer, and layers that use the selection of an
    earlier one.
    """
    of = read_facts(FOLDER)
    assert of.indexer is not None
    of = structs.replace(of, indexer=structs.replace(of.indexer, full=full))
    models = [catalog.assemble(of, kind(torch.float32, torch.device("cpu"))) for kind in (ReferenceLayers, SplitLayers)]
    for model in models:
        zoo.fill(model)
    whole = logits(models[0], IDS, 120)
    for prompt in (120, 40, 1):
        assert error(logits(models[1], IDS, prompt)[-30:], whole[-30:]) < 1e-5


@pytest.mark.parametrize("latent", [True, False])
def test_a_cache_in_fp8_is_near(latent: bool, exact: Tensor) -> None:
    kept = model(latent=latent, kv="fp8_e4m3")
    codecs = {spec.name: spec.codec for spec in kept.planes()}
    assert codecs.pop("index") == "float32" and set(codecs.values()) == {"fp8_e4m3"}
    assert 1e-4 < error(logits(kept, IDS, 120), exact) < 0.12


def test_records_and_index_keys_in_fp8_are_near(exact: Tensor) -> None:
    """A prompt, and tokens one by one; the drafter's planes too. Some choices at near ties are others."""
    kept = model(**FP8_KEYS)
    assert {(spec.name, spec.codec) for spec in kept.planes()} == {("latent", "fp8_ds_mla"), ("index", "fp8_index")}
    of = kept.facts
    assert of.mla is not None and of.indexer is not None and of.indexer.hadamard
    sizes = {spec.name: spec.page_bytes / 64 for spec in kept.planes()}
    assert sizes == {"latent": 128 + 4 + 2 * of.mla.rope, "index": of.indexer.dim + 4}
    assert 1e-4 < error(logits(kept, IDS, 120), exact) < 0.12
    only_keys = model(fp8_index=True)
    assert 1e-5 < error(logits(only_keys, IDS, 120), exact) < 0.12


def test_rounded_keys_are_near_by_their_rotation(exact: Tensor) -> None:
    """Keys and queries are turned both: turned alone they would choose another context."""
    kept = model(fp8_index=True)
    assert isinstance(kept, torch.nn.Module)
    indexers = [module for module in kept.modules() if isinstance(module, Indexer)]
    for indexer in indexers:
        assert indexer.turns
        indexer.turns = False
    assert 1e-5 < error(logits(kept, IDS, 120), exact) < 0.12
    x = torch.randn(3, 64)
    matrix = torch.ones(1, 1)
    while len(matrix) < 64:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    torch.testing.assert_close(hadamard(x), x @ matrix / 8)


def test_a_record_is_flashmlas() -> None:
    """DeepSeek-V3.2: 512 codes, four float32 scales, 64 numbers of the rotated key in bfloat16."""
    planes, rows, x = Planes((record_plane(0, 512, 64),), 3), torch.tensor([70, 130]), 3 * torch.randn(2, 576)
    x[1, 128:256] = 0
    planes.write("latent", 0, rows, x)
    stored = planes.tokens("latent", 0)[rows]
    assert stored.shape == (2, 656) and not planes.tokens("latent", 0)[71:130].any()
    scales = stored[:, 512:528].view(torch.float32)
    for token, tile in itertools.product(range(2), range(4)):
        own, largest = slice(128 * tile, 128 * tile + 128), float(x[token, 128 * tile : 128 * tile + 128].abs().max())
        scale = 2.0 ** math.ceil(math.log2(max(largest, 1e-4) / 448))
        assert scales[token, tile] == scale
        assert torch.equal(stored[token, own].view(FP8), (x[token, own] / scale).to(FP8))
    assert torch.equal(stored[:, 528:].view(torch.bfloat16), x[:, 512:].bfloat16())
    back = planes.read("latent", 0, stored, torch.float32)
    assert 0.01 < error(back[:, :512], x[:, :512]) < 0.03 and error(back[:, 512:], x[:, 512:]) < 4e-3
    assert torch.equal(planes.read("latent", 0, stored, torch.bfloat16).float(), back.bfloat16().float())


def test_a_page_of_index_keys_is_deepgemms() -> None:
    """64 keys of 128 codes, then their 64 float32 scales."""
    planes, rows, x = Planes((index_plane(0, 128),), 3), torch.arange(64, 128), torch.randn(64, 128)
    planes.write("index", 0, rows, x)
    page = planes.bytes["index", 0][1]
    codes, scales = page[: 64 * 128].view(FP8).view(64, 128).float(), page[64 * 128 :].view(torch.float32)
    assert torch.equal(scales, torch.exp2(torch.ceil(torch.log2(x.abs().amax(1) / 448))))
    assert torch.equal(codes, (x / scales[:, None]).to(FP8).float())
    gathered = planes.paged("index", 0)[torch.tensor([1, 0])].view(1, 128, 132)
    read = planes.read("index", 0, gathered, torch.float32)
    assert torch.equal(read[0, :64], codes * scales[:, None]) and not read[0, 64:].any()
    kv_mover(planes, planes.specs)(torch.tensor([[70, 71]]), torch.tensor([[130, 70]]))
    moved = planes.read("index", 0, planes.paged("index", 0).view(1, -1, 132), torch.float32)[0]
    assert torch.equal(moved[[130, 70, 71]], read[0, [6, 7, 7]]), "codes and scales"


def test_what_is_stored_is_finite_and_a_power_of_two_stays() -> None:
    x = torch.zeros(5, 128)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 448 * 8, math.nextafter(448 * 8, 1e9) + 1e-3, torch.nan, torch.inf
    codes, scales = quantize(x, 128)
    assert scales[:3, 0].tolist() == [8.0, 16.0, 2.0**-22] and scales[4] == 2.0**-22
    assert torch.isfinite(codes.float() * scales).all() and torch.isfinite((codes.float() * scales).bfloat16()).all()


def test_a_cache_of_another_type_than_the_model(exact: Tensor) -> None:
    # where index scores are near, a cache in bf16 makes the indexer choose another token
    assert 1e-5 < error(logits(model(kv="bfloat16"), IDS, 120), exact) < 0.1
    assert error(logits(model(torch.bfloat16, kv="float32"), IDS, 120), exact) < 0.1


@pytest.mark.parametrize("choice", [{"kv": "bfloat16"}, {"latent": False}, {"latent": False, "kv": "bfloat16"}])
def test_recorded_steps_are_the_same(choice: dict[str, object]) -> None:
    kept = model(**choice)
    plain, recorded = Bench(kept, 1, pages=4), Bench(kept, 1, pages=4, trace=True)
    for i in range(64 + 16):
        assert torch.equal(plain.step([(0, [7 + i])])[0], recorded.step([(0, [7 + i])])[0])


@pytest.mark.parametrize("choice", [{"kv": "fp8_e4m3"}, FP8_KEYS, {"fp8_index": True}], ids=repr)
def test_a_cache_in_fp8_is_not_recorded(choice: dict[str, object]) -> None:
    kept = model(**choice)
    assert Bench(kept, 1, pages=4, trace=True).model is kept


def test_sums_are_right_with_an_fp8_cache() -> None:
    """100.0 % of the bundled model's sums are right with its own type; so are all of these."""
    draw = random.Random(5)
    sums = [(draw.randrange(10, 1000), draw.randrange(10, 1000)) for _ in range(12)]
    asked = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in sums]
    llm = LLM(str(FOLDER), kv_cache_dtype="fp8", context_length=512)
    answers = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=200), thinking=True)
    texts = [one.outputs[0].text for one in answers]
    assert all(str(a + b) in text for (a, b), text in zip(sums, texts, strict=True)), texts


def test_fp8_saturates_and_keeps_its_scale() -> None:
    x, scale = torch.tensor([0.0, 1.0, -3.3, 1e4, -1e9, 2e-3]), torch.tensor([2.0])
    back = decode(encode(x, FP8, scale), torch.float32, scale)
    assert torch.equal(back[[0, 1, 3, 4]], torch.tensor([0.0, 1.0, 2 * FP8_MAX, -2 * FP8_MAX]))
    assert abs(float(back[2]) + 3.3) < 0.1 and abs(float(back[5]) - 2e-3) <= 2e-3
    own = torch.ones(3)
    assert encode(own, torch.float32, None) is own and decode(own, torch.float32, None) is own


def test_a_published_scale_is_the_latents(exact: Tensor) -> None:
    kept = model(kv="fp8_e4m3")
    bench, table = Bench(kept, 1, pages=8), kept.table()
    assert table.is_skipped("model.layers.1.self_attn.attn.v_scale")
    measured = {f"model.layers.1.self_attn.attn.{kind}_scale": torch.tensor(0.25) for kind in "kv"}
    read_cache_scales(table, InMemory(measured), bench.planes)
    scales = [bench.planes.scale("latent", layer) for layer in range(kept.facts.layers)]
    assert [None if scale is None else scale.item() for scale in scales[:2]] == [1.0, 0.25]
    assert 1e-4 < error(bench.step([(0, IDS)])[0], exact) < 0.12


def broken() -> None:
    raise RuntimeError("its binary is for another torch")


def settings(*asked: str) -> EngineConfig:
    kernels = KernelConfig(decode="flashmla", prefill="fa3")
    names = {"decode": ("decode_attention_backend", "flashmla"), "prefill": ("prefill_attention_backend", "fa3")}
    decisions = (Decision(*names[role], USER if role in asked else AUTO, "x") for role in names)
    return config(model_path="m", device="cuda", kernels=kernels, report=Report(tuple(decisions)))


def test_a_library_that_fails_its_check_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    self_checks = [SelfCheck("decode", "flashmla", broken), SelfCheck("prefill", "fa3", lambda: None)]
    with caplog.at_level(logging.WARNING, "thalweg.engine"):
        made = replace_failing(settings("prefill"), self_checks)
    assert (made.kernels.decode, made.kernels.prefill) == ("triton", "fa3")
    told = made.report.current()["decode_attention_backend"]
    assert (told.value, told.source) == ("triton", "start-up")
    assert "another torch" in told.reason and "another torch" in caplog.text


def test_a_library_that_was_asked_for_ends_the_start() -> None:
    with pytest.raises(UnsupportedConfig, match="decode_attention_backend: its binary is for another torch"):
        replace_failing(settings("decode"), [SelfCheck("decode", "flashmla", broken)])


def test_every_library_of_a_latent_model_is_checked() -> None:
    facts = facts_of(json.loads((FOLDER / "config.json").read_text()) | {"quantization_config": None}, "test")
    found = self_checks(KernelConfig(decode="flashmla", prefill="fa3"), facts, torch.device("cpu"))
    assert [(role, backend) for role, backend, _ in found] == [("decode", "flashmla"), ("prefill", "fa3")]
    assert not self_checks(KernelConfig(decode="triton", prefill="triton"), facts, torch.device("cpu"))


def test_the_check_of_experts_is_of_the_weights_that_experts_have() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    plain_experts = fp8 | {"ignored_layers": [f"model.layers.{i}.mlp.experts" for i in range(99)]}
    for quantization, has_codes in ((fp8, True), (plain_experts, False), (None, False)):
        facts = facts_of(config | {"quantization_config": quantization}, "test")
        kernels = KernelConfig(decode="triton", prefill="triton", moe="deep_gemm")
        (run,) = [check.run for check in self_checks(kernels, facts, torch.device("cpu")) if check.role == "moe"]
        assert run.args[-1].is_fp8 == has_codes, quantization  # type: ignore[attr-defined]
