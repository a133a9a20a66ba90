"""Configurations of published models, and layouts and rates that the tests of `thalweg plan` count with."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from thalweg.config.model import ModelFacts
from thalweg.launch.planning import roofline
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.launch.planning.roofline import Ceilings, StepPhase, StepShape
from thalweg.launch.planning.weights import KVBytes, PlannedModel, RankModel
from thalweg.models.catalog import read_config_facts

H200 = Ceilings(4.8e12, 989e12, 1979e12)
H100 = Ceilings(3.35e12, 989e12, 1979e12)
TP8, DP8 = ParallelLayout(tp=8), ParallelLayout(tp=8, dp=8, ep=8)

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
INDEXER = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
LITE = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "quantization_config": None,
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}


def facts(config: dict[str, Any], **more: Any) -> ModelFacts:
    return read_config_facts(config | more, "test")


V3, V32, LITE_FACTS, QWEN72 = facts(DEEPSEEK), facts(DEEPSEEK | INDEXER), facts(LITE), facts(QWEN)
FP8_KEY = 132.0  # bytes of an index key of 128 FP8 codes and a float32 multiplier
RECORD = 656.0  # a latent as kernels of sparse attention store it: 512 codes, 4 float32 multipliers, 64 rotary numbers in bf16
FP8_INDEX, FP8_BOTH = KVBytes(1152.0, FP8_KEY), KVBytes(RECORD, FP8_KEY)


@cache
def planned(of: str) -> PlannedModel:
    """By name: V3, V32, LITE or QWEN72."""
    return PlannedModel({"V3": V3, "V32": V32, "LITE": LITE_FACTS, "QWEN72": QWEN72}[of])


def rank(of: str, layout: ParallelLayout = ONE, kv: KVBytes | None = None) -> RankModel:
    """kv: in place of what its layers keep."""
    model = planned(of).on(layout)
    return model if kv is None else replace(model, kv=kv)


def phases(of: str, shape: StepShape, layout: ParallelLayout = ONE, kv: KVBytes | None = None) -> list[StepPhase]:
    return roofline.phases(rank(of, layout, kv), shape)
