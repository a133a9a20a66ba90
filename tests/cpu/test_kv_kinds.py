"""What a model keeps of a token: its own type, FP8, latents or keys and values. On the bundled model."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.configs import config
from tests.cpu import zoo
from tests.cpu.batches import Bench
from thalweg.config.engine import EngineConfig
from thalweg.config.model import ModelFacts, facts_of, read_facts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.report import AUTO, USER, Decision, Report
from thalweg.core.sampling import SamplingParams
from thalweg.engine.selfcheck import Probe, probes, settled
from thalweg.layers.parts import ReferenceParts
from thalweg.layers.sparse_mla import SparseMla
from thalweg.llm import LLM
from thalweg.memory.planes import FP8, FP8_MAX, decoded, encoded
from thalweg.models import catalog
from thalweg.models.base import Model
from thalweg.models.traced import AFTER, traced
from thalweg.weights.cache_scales import read_scales
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors, fill_dummy

FOLDER = Path(__file__).parents[2] / "models" / "tiny"


def model(dtype: torch.dtype = torch.float32, **choice: object) -> Model:
    """The bundled model with its plain twin's weights."""
    plain, parts = zoo.ours(FOLDER, dtype), ReferenceParts(dtype, torch.device("cpu"), choice=KernelConfig(**choice))  # type: ignore[arg-type]
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


@dataclass(frozen=True, slots=True)
class SparseParts(ReferenceParts):
    """The reference's, put together as on a GPU."""

    own_index: bool = True

    def mla(self, facts: ModelFacts, layer: int, indexed: bool) -> SparseMla:  # type: ignore[override]
        return SparseMla(facts, layer, indexed, self.linear, self.norm, self.dtype, self.device)


def test_sparse_attention_beside_kernels_is_the_references(exact: Tensor) -> None:
    """Whole, in chunks, token by token; layers that have an indexer, and such that go by another's choice."""
    of = read_facts(FOLDER)
    made = catalog.assemble(of, SparseParts(torch.float32, torch.device("cpu")))
    assert isinstance(made, torch.nn.Module)
    with Safetensors(FOLDER) as stream:
        load(made, made.table(), stream, of.fp8_block)
    for whole in (120, 40, 1):
        assert error(logits(made, IDS, whole)[-30:], exact[-30:]) < 1e-5


def test_layers_without_an_indexer_go_by_the_one_before() -> None:
    of = facts_of(json.loads((FOLDER / "config.json").read_text()), "shared")
    assert of.indexer is not None
    of = replace(of, indexer=replace(of.indexer, full=(True, False, False, True)))
    models = [catalog.assemble(of, kind(torch.float32, torch.device("cpu"))) for kind in (ReferenceParts, SparseParts)]
    fill_dummy(models[0])
    given = dict(models[0].named_parameters())
    with torch.no_grad():
        for name, parameter in models[1].named_parameters():
            where, _, kind = name.rpartition(".attention.")
            rank = of.mla.q_lora + of.mla.kv_lora + of.mla.rope
            queries = of.heads * (of.mla.nope + of.mla.rope)
            cut = {
                "index_key.weight": ("down", slice(rank, None)),
                "index_query.weight": ("up", slice(queries, None)),
                "down.weight": ("down", slice(0, rank)),
                "up.weight": ("up", slice(0, queries)),
            }.get(kind)
            parameter.copy_(given[name] if cut is None else given[f"{where}.attention.{cut[0]}.weight"][cut[1]])
    plain, sparse = (logits(one, IDS, 120) for one in models)
    assert error(sparse, plain) < 1e-5


@pytest.mark.parametrize("latent", [True, False])
def test_a_cache_in_fp8_is_near(latent: bool, exact: Tensor) -> None:
    kept = model(latent=latent, kv="fp8_e4m3")
    codecs = {spec.name: spec.codec for spec in kept.planes()}
    assert codecs.pop("index") == "float32" and set(codecs.values()) == {"fp8_e4m3"}
    assert 1e-4 < error(logits(kept, IDS, 120), exact) < 0.12


def test_a_cache_of_another_type_than_the_model(exact: Tensor) -> None:
    assert 1e-5 < error(logits(model(kv="bfloat16"), IDS, 120), exact) < 0.02
    assert error(logits(model(torch.bfloat16, kv="float32"), IDS, 120), exact) < 0.1


@pytest.mark.parametrize("choice", [{"kv": "bfloat16"}, {"latent": False}, {"latent": False, "kv": "bfloat16"}])
def test_recorded_steps_are_the_same(choice: dict[str, object]) -> None:
    kept = model(**choice)
    plain, recorded = Bench(kept, 1, pages=4), Bench(traced(kept), 1, pages=4)
    for i in range(64 + 2 * AFTER):
        assert torch.equal(plain.step([(0, [7 + i])])[0], recorded.step([(0, [7 + i])])[0])


def test_a_cache_in_fp8_is_not_recorded() -> None:
    kept = model(kv="fp8_e4m3")
    assert traced(kept) is kept


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
    back = decoded(encoded(x, FP8, scale), torch.float32, scale)
    assert torch.equal(back[[0, 1, 3, 4]], torch.tensor([0.0, 1.0, 2 * FP8_MAX, -2 * FP8_MAX]))
    assert abs(float(back[2]) + 3.3) < 0.1 and abs(float(back[5]) - 2e-3) <= 2e-3
    own = torch.ones(3)
    assert encoded(own, torch.float32, None) is own and decoded(own, torch.float32, None) is own


class OneScale:
    """A checkpoint that measured the latents of one layer."""

    def names(self) -> list[str]:
        return ["model.layers.1.self_attn.attn.k_scale", "model.layers.1.self_attn.attn.v_scale"]

    def read(self, name: str) -> Tensor:
        return torch.tensor(0.25)


def test_a_published_scale_is_the_latents(exact: Tensor) -> None:
    kept = model(kv="fp8_e4m3")
    bench, table = Bench(kept, 1, pages=8), kept.table()
    assert table.skipped("model.layers.1.self_attn.attn.v_scale")
    read_scales(table, OneScale(), bench.planes)  # type: ignore[arg-type]
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
    probes = [Probe("decode", "flashmla", broken), Probe("prefill", "fa3", lambda: None)]
    with caplog.at_level(logging.WARNING, "thalweg.engine"):
        made = settled(settings("prefill"), probes)
    assert (made.kernels.decode, made.kernels.prefill) == ("triton", "fa3")
    told = made.report.current()["decode_attention_backend"]
    assert (told.value, told.source) == ("triton", "start-up")
    assert "another torch" in told.reason and "another torch" in caplog.text


def test_a_library_that_was_asked_for_ends_the_start() -> None:
    with pytest.raises(UnsupportedConfig, match="decode_attention_backend: its binary is for another torch"):
        settled(settings("decode"), [Probe("decode", "flashmla", broken)])


def test_every_library_of_a_latent_model_is_checked() -> None:
    facts = facts_of(json.loads((FOLDER / "config.json").read_text()) | {"quantization_config": None}, "test")
    found = probes(KernelConfig(decode="flashmla", prefill="fa3"), facts, torch.device("cpu"))
    assert [(role, backend) for role, backend, _ in found] == [("decode", "flashmla"), ("prefill", "fa3")]
    assert not probes(KernelConfig(decode="triton", prefill="triton"), facts, torch.device("cpu"))
