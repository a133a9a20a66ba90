"""Random tiny configurations of every architecture, their transformers models, and checkpoints in the published
layout.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.cpu import reference_model
from thalweg.attention.selection import Selection, select_top_k
from thalweg.layers.moe import Router
from thalweg.models.catalog import read_facts
from thalweg.models.interface import Model
from thalweg.weights.loader import load
from thalweg.weights.random import load_random
from thalweg.weights.stream import Safetensors

CONTEXT = 512


def deepseek(draw: random.Random, *, v2: bool = False, v32: bool = False) -> dict[str, Any]:
    """What the DeepSeek families have in common, at sizes that share no common value by accident."""
    heads, groups = draw.choice([2, 4]), draw.choice([2, 4])
    config: dict[str, Any] = {
        "vocab_size": draw.randrange(80, 120),
        "hidden_size": 16 * draw.choice([3, 4, 5]) * (heads // 2),
        "intermediate_size": draw.randrange(40, 90),
        "moe_intermediate_size": draw.randrange(20, 40),
        "num_hidden_layers": draw.choice([2, 3]),
        "first_k_dense_replace": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": groups * 4,
        "n_shared_experts": draw.choice([1, 2]),
        "num_experts_per_tok": draw.choice([2, 3, 4]),
        "n_group": groups,
        "topk_group": draw.randrange(1, groups),
        "q_lora_rank": draw.randrange(40, 60, 2),
        "kv_lora_rank": draw.choice([24, 32, 40]),
        "qk_nope_head_dim": draw.choice([20, 24, 28]),
        "qk_rope_head_dim": draw.choice([8, 16]),
        "v_head_dim": draw.choice([12, 18, 22]),
        "routed_scaling_factor": draw.uniform(1.0, 3.0),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": yarn(draw),
    }
    if v32:
        config |= {
            "index_topk": draw.randrange(5, 24),
            "index_head_dim": draw.choice([24, 32]),
            "index_n_heads": draw.choice([12, 16]),
        }
    if not v2:
        config |= {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        }
    return config


def yarn(draw: random.Random) -> dict[str, Any]:
    scale = draw.choice([1.0, 0.707])
    return {
        "type": "yarn",
        "factor": draw.choice([4.0, 40.0]),
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": scale,
        "mscale_all_dim": scale,
        "original_max_position_embeddings": draw.choice([64, 128]),
    }


def dense(draw: random.Random) -> dict[str, Any]:
    groups = draw.choice([1, 2, 3])
    kv_heads, head_dim = draw.choice([1, 2]), draw.choice([8, 16])
    return {
        "vocab_size": draw.randrange(80, 120),
        "hidden_size": kv_heads * groups * head_dim,
        "intermediate_size": draw.randrange(40, 90),
        "num_hidden_layers": draw.choice([2, 3]),
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "hidden_act": "silu",
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_theta": 10000.0,
    }


def draw_config(family: str, seed: int) -> dict[str, Any]:
    """A config.json as published (the spelling of before transformers 5) for one of FAMILIES."""
    draw = random.Random(f"{family} {seed}")
    return FAMILIES[family](draw)


def _v2(draw: random.Random) -> dict[str, Any]:
    return deepseek(draw, v2=True) | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "scoring_func": "softmax",
        "topk_method": "group_limited_greedy", "norm_topk_prob": False,
    }  # fmt: skip


def _v2_lite(draw: random.Random) -> dict[str, Any]:
    return _v2(draw) | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}


def _v3(draw: random.Random) -> dict[str, Any]:
    return deepseek(draw) | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


def _kimi(draw: random.Random) -> dict[str, Any]:
    config = _v3(draw) | {"n_group": 1, "topk_group": 1, "rope_theta": 50000.0, "num_nextn_predict_layers": 0}
    return config | {"rope_scaling": config["rope_scaling"] | {"beta_fast": 1, "beta_slow": 1, "factor": 32.0}}


def _v32(draw: random.Random) -> dict[str, Any]:
    return deepseek(draw, v32=True) | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}


def _glm(draw: random.Random) -> dict[str, Any]:
    config = deepseek(draw, v32=True) | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
        "num_hidden_layers": 4, "indexer_rope_interleave": True, "rope_scaling": None,
    }  # fmt: skip
    return config | draw.choice([{}, {"index_topk_freq": 2, "index_skip_topk_offset": 2}])


def _llama(draw: random.Random) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    return dense(draw) | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": scaling}


def _mistral(draw: random.Random) -> dict[str, Any]:
    config = dense(draw)
    own = {"head_dim": config["head_dim"] * 2, "sliding_window": None}
    return config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **own}


def _qwen2(draw: random.Random) -> dict[str, Any]:
    return dense(draw) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


def _qwen3(draw: random.Random) -> dict[str, Any]:
    config = dense(draw)
    return config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": config["head_dim"] * 2}


def _qwen3_moe(draw: random.Random) -> dict[str, Any]:
    config = _qwen3(draw)
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": draw.choice([8, 12]),
        "num_experts_per_tok": draw.choice([2, 3]), "moe_intermediate_size": draw.randrange(20, 40), "num_hidden_layers": 4,
        "norm_topk_prob": draw.random() < 0.7, "decoder_sparse_step": draw.choice([1, 2]), "mlp_only_layers": draw.choice([[], [0]]),
    }  # fmt: skip


FAMILIES = {
    "v2": _v2, "v2-lite": _v2_lite, "v3": _v3, "kimi-k2": _kimi, "v32": _v32, "glm-5": _glm, "llama": _llama,
    "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3-moe": _qwen3_moe,
}  # fmt: skip


def reference(config: dict[str, Any], seed: int) -> nn.Module:
    """transformers' model of a config: fp32, eager, random weights of fan_in^-1/2, norms unlike 1 and biases unlike
    0.
    """
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    hf = kind.config_class(**config)
    hf._attn_implementation = "eager"
    hf._experts_implementation = "eager"  # grouped_mm wants sizes in multiples of 16 bytes
    model = kind(hf).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1:
                noise = noise * 0.2 + (0.0 if "bias" in name else 1.0)
            elif "embed_tokens" not in name:
                noise = noise * tensor.shape[-1] ** -0.5
            if tensor.is_floating_point():
                tensor.copy_(noise)
    return model


def save(model: nn.Module, config: dict[str, Any], folder: Path, extra: dict[str, torch.Tensor] | None = None) -> None:
    """A checkpoint as published: per-expert names, config.json in the old spelling. extra: tensors of a NextN layer."""
    model.save_pretrained(folder, max_shard_size="200KB")
    for path in folder.glob("*.safetensors*"):
        assert path.exists()
    names = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert not any("experts.gate_up_proj" in name for name in names), "transformers no longer saves experts one by one"
    if extra:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        save_file(extra, folder / "nextn.safetensors")
        content["weight_map"] |= dict.fromkeys(extra, "nextn.safetensors")
        index.write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps(config))


class Watched:
    """The model's own choices, of context and of experts, and whether one was close: ties are arbitrary, so two right
    programs may break them differently."""

    NEAR_CONTEXT, NEAR_EXPERT = 3e-5, 3e-6

    def __init__(self) -> None:
        self.near = False

    def __call__(self, scores_NS: Tensor, topk: int) -> Tensor:
        self.see(scores_NS, topk, self.NEAR_CONTEXT)
        return select_top_k(scores_NS, topk)

    def see(self, scores: Tensor, topk: int, near: float) -> None:
        if scores.shape[-1] > topk:
            values = scores.topk(topk + 1, -1).values
            self.near |= bool((values[..., -2] - values[..., -1] < near)[values[..., -1] > -torch.inf].any())

    def watch(self, router: Router) -> None:
        """Has every call of this router seen."""
        forward, rule = router.forward, router.rule

        def seen(x_TH: Tensor) -> tuple[Tensor, Tensor]:
            logits = x_TH @ router.weight.T
            scores = logits.softmax(-1) if router.bias is None else logits.sigmoid() + router.bias
            groups = scores.unflatten(-1, (rule.groups, -1))
            best_groups = groups.amax(-1) if router.bias is None else groups.topk(2, -1).values.sum(-1)
            if rule.method != "greedy":
                self.see(best_groups, rule.topk_groups, self.NEAR_EXPERT)
                outside = best_groups < best_groups.topk(rule.topk_groups, -1).values[..., -1:]
                scores = groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
            self.see(scores, rule.topk, self.NEAR_EXPERT)
            return forward(x_TH)

        router.forward = seen  # type: ignore[method-assign]


def fill(module: Any, seed: int = 0) -> None:
    """Random weights, as `--load-format dummy` makes them."""
    load_random(module, module.table(), module.facts.quantization_config, seed, module.facts.tied)


def ours(folder: Path, dtype: torch.dtype = torch.float32, selection: Selection = select_top_k) -> Model:
    """The checkpoint through our own reader, catalog and loader."""
    facts = read_facts(folder)
    model = reference_model.build(facts, dtype, selection=selection)
    with Safetensors(folder) as stream:
        load(model, model.table(), stream, facts.quantization_config)
    if isinstance(selection, Watched):
        for module in model.modules():
            if isinstance(module, Router):
                selection.watch(module)
    return model
