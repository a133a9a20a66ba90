"""Models divided over ranks give what one rank gives: real linears, schemes, loader slices and residual streams, over axes whose ranks are threads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.batches import Bench
from tests.cpu.ranks import layouts, on_ranks
from thalweg.bench.make_checkpoint import main as make_checkpoint
from thalweg.layers.reference import ReferenceLayers
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.models.decoder import Decoder
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors

MODELS = Path(__file__).parents[1] / "cpu" / "data"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 256, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "q_lora_rank": 128,
    "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "v3": V3,
    "v3-fp8": V3 | {"quantization_config": FP8},
    "v3.2": V3 | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 32, "index_topk": 24,
        "index_topk_freq": 2, "index_skip_topk_offset": 2, "num_hidden_layers": 4,
    },
    "v2-lite": V3 | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_attention_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
    },
    "qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 1001, "hidden_size": 512, "intermediate_size": 640,
        "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "rope_theta": 1e6,
    },
    "one-key-head": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 997, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_theta": 1e4,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
        "moe_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 16,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "rope_theta": 1e6,
    },
}  # fmt: skip
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "tp2-dense1": {"tp": 2, "ep": 2, "dense": 1},
    "dp2-ep2": {"dp": 2, "ep": 2},
    "tp2-dp2-ep4": {"tp": 2, "dp": 2, "ep": 4},
    "tp2-dp2-ep2": {"tp": 2, "dp": 2, "ep": 2},
}
IDS = [(37 * i) % 900 + 3 for i in range(90)]
CLOSE = 2e-3  # of the largest logit: sums are grouped otherwise


@pytest.fixture(scope="module", params=list(SHAPES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(SHAPES[request.param]))
    assert make_checkpoint([str(folder / "shape"), str(folder / "out"), "--seed", "3"]) == 0
    yield folder / "out"


def loaded(folder: Path, layout: Layout = SINGLE_RANK, dtype: torch.dtype = torch.float32) -> Decoder:
    facts = read_facts(folder)
    model = catalog.assemble(facts, ReferenceLayers(dtype, torch.device("cpu"), layout=layout))
    with Safetensors(folder) as stream:
        load(model, model.table(), stream, facts.quantization_config)
    return model


def run(model: Decoder, ids: list[int], padding: int = 0) -> Tensor:
    """Logits of a prompt in two chunks and of four single tokens."""
    bench = Bench(model, 1)
    parts = [ids[:50], ids[50:-4], *([token] for token in ids[-4:])]
    return torch.cat([bench.step([(0, part)], padding)[0] for part in parts])


def same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max() / want.abs().max()) < CLOSE


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "dp2" not in name])
def test_tensor_parallel_ranks_give_one_ranks_logits(checkpoint: Path, name: str) -> None:
    want = run(loaded(checkpoint), IDS)
    ranks = layouts(**LAYOUTS[name])
    got = on_ranks(len(ranks), lambda rank: run(loaded(checkpoint, ranks[rank]), IDS))
    same(got[0], want)
    assert torch.equal(got[0], got[1])  # reductions are bit-equal on all ranks


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "dp2" in name])
def test_data_parallel_ranks_share_experts(checkpoint: Path, name: str) -> None:
    """Each data-parallel rank has a sequence of its own; steps have equally many tokens on all ranks."""
    if (
        "Moe" not in (checkpoint / "config.json").read_text()
        and "n_routed_experts" not in (checkpoint / "config.json").read_text()
    ):
        return  # a model without experts has nothing to share
    whole, ranks = loaded(checkpoint), layouts(**LAYOUTS[name])
    tp = LAYOUTS[name].get("tp", 1)
    texts = [IDS, IDS[::-1]]
    got = on_ranks(len(ranks), lambda rank: run(loaded(checkpoint, ranks[rank]), texts[rank // tp]))
    for rank, logits in enumerate(got):
        same(logits, run(whole, texts[rank // tp]))
