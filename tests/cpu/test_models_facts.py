"""config.json → ModelFacts: published configurations are read correctly, and invalid ones are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import zoo
from thalweg.config.model import facts_of
from thalweg.core.errors import CheckpointError
from thalweg.layers.rotary import amplitude, frequencies, softmax_scale
from thalweg.models import catalog
from thalweg.models.catalog import read_config_facts, read_facts

YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "vocab_size": 129280, "bos_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
V2_LITE = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None,
    "scoring_func": "softmax",
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "eos_token_id": [100001, 5],
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "quantization_config": None,
    "num_nextn_predict_layers": None,
}  # fmt: skip
K2 = V3 | {
    "rope_theta": 50000,
    "rope_scaling": YARN | {"factor": 32, "beta_fast": 1, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1},
}  # fmt: skip


def test_v3() -> None:
    facts = facts_of(V3, "config.json")
    assert (
        facts.quantization_config["weight_block_size"] == [128, 128]
        and facts.eos == (1,)
        and facts.bos == 0
        and facts.nextn == 1
    )
    assert facts.moe is not None and [facts.moe.in_layer(layer) for layer in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert facts.mla is not None and facts.indexer is None and facts.rope.dim == 64 and facts.context == 163840


def test_v2_lite() -> None:
    facts = facts_of(V2_LITE, "config.json")
    assert (
        facts.mla is not None and facts.mla.q_lora == 0 and facts.quantization_config == {} and facts.eos == (100001, 5)
    )
    assert facts.moe is not None and facts.moe.method == "greedy" and not facts.moe.renormalize


@pytest.mark.parametrize(("config", "scale"), [(V3, 0.1352338), (V2_LITE, 0.1147214), (K2, 0.1308608)])
def test_softmax_scale_of_published_models(config: dict[str, Any], scale: float) -> None:
    """Numbers checked against transformers' own."""
    rope = facts_of(config, "config.json").rope
    assert softmax_scale(192, rope) == pytest.approx(scale, abs=1e-7)
    assert amplitude(rope) == pytest.approx(1.0)


def test_yarn_frequencies_of_published_models() -> None:
    """Numbers checked against transformers' own."""
    v3, k2 = frequencies(facts_of(V3, "").rope), frequencies(facts_of(K2, "").rope)
    want = [1, 0.0749894, 0.0562341, 0.0390069, 0.0055, 1.77828e-4, 3.33380e-5, 3.33380e-6]
    assert v3[[0, 9, 10, 11, 16, 22, 23, 31]].tolist() == pytest.approx(want, rel=1e-4)
    assert k2[[18, 19, 20]].tolist() == pytest.approx([2.27420e-3, 1.62176e-3, 3.61405e-5], rel=1e-4)


def test_both_spellings_of_the_rotary_fields() -> None:
    new = {name: value for name, value in V3.items() if name not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**V3["rope_scaling"], "rope_theta": 10000.0, "rope_type": "yarn"}
    assert facts_of(new, "").rope == facts_of(V3, "").rope


def test_indexer_schedule() -> None:
    """Facts §5.1: f=4, o=2 is FFSSSFSSSF; a pattern overrides it."""
    config = zoo.draw_config("glm-5", 1) | {"num_hidden_layers": 10, "index_topk_freq": 4, "index_skip_topk_offset": 2}
    indexer = facts_of(config, "").indexer
    assert (
        indexer is not None and "".join("FS"[not full] for full in indexer.full) == "FFSSSFSSSF" and indexer.interleaved
    )
    indexer = facts_of(config | {"index_topk_pattern": "FSFSFSFSFS"}, "").indexer
    assert indexer is not None and indexer.full == (True, False) * 5
    with pytest.raises(CheckpointError, match="the first one F"):
        facts_of(config | {"index_topk_pattern": "SFFFFFFFFF"}, "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", []), ("architectures", "DeepseekV3ForCausalLM"), ("hidden_size", -1), ("hidden_size", "7168"),
        ("vocab_size", 0), ("num_hidden_layers", None), ("num_hidden_layers", 2.5), ("num_attention_heads", True),
        ("rms_norm_eps", 0), ("rms_norm_eps", float("nan")), ("max_position_embeddings", 0), ("kv_lora_rank", 0),
        ("qk_rope_head_dim", 63), ("q_lora_rank", 77), ("n_group", 7), ("topk_group", 9), ("num_experts_per_tok", 300),
        ("topk_method", "hash"), ("routed_scaling_factor", -1.0), ("eos_token_id", "x"), ("tie_word_embeddings", "no"),
        ("hidden_act", "gelu"), ("rope_scaling", "yarn"), ("rope_scaling", {"type": "su", "factor": 2}),
        ("rope_scaling", {"type": "yarn", "factor": 0}), ("quantization_config", {"quant_method": "awq"}),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": 128}), ("index_topk", 64),
    ],
)  # fmt: skip
def test_nonsense_is_named(field: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config_facts(V3 | {field: value}, "config.json")
    shown = {"index_topk": "index_n_heads"}.get(field, field)  # an indexer that lacks its heads
    assert shown in str(caught.value) or "rope_type" in str(caught.value) or "factor" in str(caught.value)
    assert str(caught.value).startswith("config.json")


def test_dense_nonsense() -> None:
    config = zoo.draw_config("llama", 1)
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        facts_of(config | {"num_attention_heads": 6, "num_key_value_heads": 4}, "config.json")
    window = {"use_sliding_window": True, "sliding_window": 16}
    with pytest.raises(CheckpointError, match="sliding_window is not supported"):
        facts_of(config | window, "config.json")
    layers = config["num_hidden_layers"]
    for unused in (
        {"sliding_window": None}, {"sliding_window": 1 << 20}, {"max_window_layers": layers},
        {"layer_types": ["full_attention"] * layers}, {"use_sliding_window": False},
    ):  # fmt: skip
        facts_of(config | window | unused, "config.json")
    with pytest.raises(CheckpointError, match="layer_types"):
        facts_of(config | {"layer_types": ["linear_attention"] * layers}, "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_interleave", False), ("attention_bias", True), ("final_logit_softcapping", 30.0), ("logit_scale", 2),
        ("residual_multiplier", 0.5), ("rope_scaling", {"type": "yarn", "factor": 2, "mrope_section": [8, 4, 4]}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("compression_config", {"quant_method": "sparse"}),
    ],
)  # fmt: skip
def test_a_field_that_changes_the_mathematics_and_is_not_read_is_refused(field: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config_facts(V3 | {field: value}, "config.json")
    shown = list(value)[-1] if isinstance(value, dict) and field.startswith("rope") else field
    assert shown in str(caught.value)


def test_a_family_may_have_fields_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose mathematics has one more number is a file and a row of the catalog."""
    with pytest.raises(CheckpointError, match="residual_multiplier"):
        read_config_facts(V3 | {"residual_multiplier": 0.22}, "config.json")
    family = replace(catalog.DEEPSEEK, own_fields=("residual_multiplier",), defaults={"residual_multiplier": 1.0})
    monkeypatch.setitem(catalog.FAMILIES, "DeepseekV3ForCausalLM", family)
    for given, value in (({"residual_multiplier": 0.22}, 0.22), ({}, 1.0)):
        assert read_config_facts(V3 | given, "config.json").family_fields == {"residual_multiplier": value}


def test_fields_without_effect_pass() -> None:
    extra = {
        "transformers_version": "5.0", "_name_or_path": "x", "attention_dropout": 0.1, "unsloth_fixed": True,
        "auto_map": {"AutoModel": "x"}, "pad_token_id": 2, "new_switch": False,
        "model_max_length": 4096, "partial_rotary_factor": 1.0, "aux_loss_alpha": 0.001,
    }  # fmt: skip
    assert read_config_facts(V3 | extra, "config.json") == read_config_facts(V3, "config.json")


def test_an_unknown_architecture_is_named_before_its_fields() -> None:
    for name in ("KimiK25ForConditionalGeneration", "Llama4ForConditionalGeneration", "LlavaForConditionalGeneration"):
        with pytest.raises(CheckpointError, match=name):
            read_config_facts({"architectures": [name], "text_config": {"hidden_size": 64}}, "config.json")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_unreadable_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_facts(tmp_path)


def test_the_bundled_model_reads() -> None:
    folder = Path(__file__).parents[2] / "models" / "tiny"
    facts = read_facts(folder)
    assert (
        facts.architecture == "DeepseekV32ForCausalLM"
        and json.loads((folder / "config.json").read_text())["vocab_size"] == facts.vocab
    )
