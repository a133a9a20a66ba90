"""The bundled checkpoint: our results equal transformers' on the dequantized weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.cpu import zoo
from tests.cpu.batches import Bench
from tests.cpu.test_models_parity import TOLERANCE, error
from tests.seed import SEED
from thalweg.attention.selection import select_top_k
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.quant.catalog import quantized
from thalweg.quant.fp8_block import Fp8Block
from thalweg.quant.scheme import TensorSpec
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors

FOLDER = Path(__file__).parents[2] / "models" / "tiny"
LENGTH = 400


class Nearest:
    """The model's own choice; per query token, how close it was."""

    def __init__(self) -> None:
        self.gaps: list[Tensor] = []

    def __call__(self, scores_NS: Tensor, topk: int) -> Tensor:
        values = scores_NS.topk(topk + 1, -1).values
        gap = values[:, -2] - values[:, -1]
        self.gaps.append(gap.masked_fill(values[:, -1] == -torch.inf, torch.inf))
        return select_top_k(scores_NS, topk)

    def first_tie(self) -> int:
        """The first token whose choice of context is a near-tie: from there on two right programs may differ."""
        near = torch.stack(self.gaps).amin(0) < 1e-4
        return int(near.nonzero()[0]) if near.any() else len(near)


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    from transformers import DeepseekV32ForCausalLM

    config: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    scheme = Fp8Block.of_config(config.pop("quantization_config"), "config.json")
    published = load_file(FOLDER / "model.safetensors")
    behind = f"model.layers.{config['num_hidden_layers']}."
    plain = {
        name: scheme.decode(TensorSpec(name, tuple(tensor.shape), torch.bfloat16), [tensor, published[f"{name}_scale_inv"]], ())
        if tensor.dtype == torch.float8_e4m3fn else tensor.float()
        for name, tensor in published.items()
        if not name.endswith("_scale_inv") and not name.startswith(behind)
    }  # fmt: skip
    hf = DeepseekV32ForCausalLM.config_class(**config)
    hf._attn_implementation = hf._experts_implementation = "eager"
    model: nn.Module = DeepseekV32ForCausalLM.from_pretrained(None, config=hf, state_dict=plain).float().eval()
    return model


def test_the_bundled_model_has_every_part() -> None:
    facts = read_facts(FOLDER)
    assert facts.indexer is not None and all(facts.indexer.full) and facts.indexer.topk >= 64
    assert facts.moe is not None and facts.moe.experts >= 16 and facts.moe.topk == 4 and facts.moe.shared == 1
    assert facts.moe.method == "noaux_tc" and facts.moe.topk_groups < facts.moe.groups
    assert facts.nextn == 1 and facts.rope.kind == "yarn" and quantized(facts.quantization_config)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16 << 20


def test_transformers_agrees_on_the_dequantised_weights(theirs: nn.Module) -> None:
    """Up to the first near-tie among index scores, on enough tokens far past index_topk; whole, and one by one from the
    cache.
    """
    draw, compared = random.Random(SEED), 0
    for _ in range(60):
        nearest = Nearest()
        model = zoo.ours(FOLDER, selection=nearest)
        ids = [draw.randrange(3, model.facts.vocab) for _ in range(LENGTH)]
        whole = Bench(model, 1, pages=8).step([(0, ids)])[0]
        with torch.no_grad():
            want = theirs(torch.tensor([ids])).logits[0]
        sure = nearest.first_tie()
        assert error(whole[:sure], want[:sure]) < TOLERANCE, f"TEST_SEED={SEED}"
        bench = Bench(zoo.ours(FOLDER), 1, pages=8)
        steps = torch.cat([bench.step([(0, [token])])[0] for token in ids[: min(sure, 200)]])
        assert error(steps, want[: len(steps)]) < TOLERANCE, f"TEST_SEED={SEED}"
        compared += max(sure - model.facts.indexer.topk, 0) if model.facts.indexer else 0
        if compared > 150:
            return
    raise AssertionError(f"only {compared} tokens past index_topk before near-ties, TEST_SEED={SEED}")


def test_nextn_layer_loads_and_predicts() -> None:
    facts = read_facts(FOLDER)
    main = zoo.ours(FOLDER)
    nextn = catalog.build_nextn(main)
    with Safetensors(FOLDER) as stream:
        load(nextn, nextn.table(), stream, facts.quantization_config)
    bench = Bench(main, 1, pages=4, extra=nextn.planes())
    ids = [5 + i % 40 for i in range(120)]
    with torch.inference_mode():
        batch = bench.batch([(0, ids[:-1])])
        hidden = main.forward(batch, bench.planes)
        drafted = nextn.logits(nextn.forward(torch.tensor(ids[1:]), hidden, batch, bench.planes))
    assert drafted.shape == (len(ids) - 1, facts.vocab) and drafted.isfinite().all()


def test_recorded_steps_are_the_same() -> None:
    model = zoo.ours(FOLDER)
    plain, recorded = Bench(model, 1, pages=4), Bench(model, 1, pages=4, trace=True)
    for i in range(64 + 16):
        assert torch.equal(plain.step([(0, [7 + i])])[0], recorded.step([(0, [7 + i])])[0])
