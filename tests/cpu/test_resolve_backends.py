"""Backends of experts and FP8 products on synthetic machines: reasons, and refusals that name an alternative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thalweg.config import backends
from thalweg.config.machine import Machine
from thalweg.config.tree import options_of
from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.core.kernels import DECISION_NAMES
from thalweg.core.report import USER
from thalweg.launch.decisions import Decisions
from thalweg.launch.kernels import resolve_gemms, resolve_kernels
from thalweg.models.catalog import read_config_facts
from thalweg.quant.catalog import METHODS
from thalweg.quant.fp8_block import Fp8Block

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
}
EXPERTS = DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
FP8 = EXPERTS | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
H100 = ("NVIDIA H100 80GB HBM3",)


def run(
    config: dict[str, Any], libraries: tuple[str, ...] = ("triton", "deep_gemm"), capability: str = "9.0", **wishes: Any
) -> tuple[dict[str, str], dict[str, str]]:
    """Backends, and reasons by the name of the decision."""
    machine = Machine("Test CPU", 8, 1 << 36, 1 << 36, H100, 1 << 36, capability, frozenset(libraries))
    attention, device = wishes.pop("attention", "triton"), wishes.pop("device", "cuda")
    made = resolve_gemms(options_of(model="m", **wishes), read_config_facts(config, "test"), machine, device, attention)
    return {role: one.name for role, one in made.items()}, {
        DECISION_NAMES[role]: "" if one.source == USER else one.reason for role, one in made.items()
    }


def test_by_size_where_deep_gemm_is() -> None:
    assert run(FP8)[0] == {"moe": "triton+deep_gemm", "fp8_gemm": "triton+deep_gemm"}
    assert run(EXPERTS)[0] == {"moe": "triton+deep_gemm"}
    assert run(DENSE)[0] == {}


def test_our_own_where_it_is_not() -> None:
    made, why = run(FP8, ("triton",))
    assert made == {"moe": "triton", "fp8_gemm": "triton"}
    assert "not installed" in why["moe_runner_backend"] and "not installed" in why["fp8_gemm_backend"]


def test_our_own_on_other_gpus_and_in_deterministic_mode() -> None:
    made, why = run(FP8, capability="8.9")
    assert made["moe"] == "triton" and "ada" in why["moe_runner_backend"]
    made, why = run(FP8, deterministic_inference=True)
    assert made == {"moe": "triton", "fp8_gemm": "triton"} and "batch-invariant" in why["fp8_gemm_backend"]


def test_with_reference_attention_all_is_by_the_reference() -> None:
    assert run(FP8, attention="reference")[0] == {"moe": "reference", "fp8_gemm": "reference"}
    assert run(FP8, attention="reference", device="cpu", capability="")[0] == {
        "moe": "reference",
        "fp8_gemm": "reference",
    }


class Int8(Fp8Block):
    """A scheme of another operation."""

    name = operation = "int8_gemm"
    has_expert_kernels = False


@pytest.mark.parametrize(("attention", "experts"), [("triton", "triton+deep_gemm"), ("reference", "reference")])
def test_a_scheme_without_kernels_of_experts_needs_no_backend_of_its_own(
    attention: str, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "int8", lambda config, where: Int8((128, 128)))
    config = EXPERTS | {"quantization_config": {"quant_method": "int8"}}
    assert run(config, attention=attention)[0] == {"moe": experts}
    monkeypatch.setattr(Int8, "has_expert_kernels", True)
    if attention == "reference":  # it decodes weights of every scheme
        assert run(config, attention=attention)[0] == {"moe": experts}
    else:
        with pytest.raises(UnsupportedConfig, match="weights int8_gemm"):
            run(config)


@pytest.mark.parametrize("role", ["DECODE", "PREFILL"])
def test_a_backend_of_one_role_is_not_joined_with_the_reference(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference has layers of its own: a kernel beside it would never run."""
    rows = getattr(backends, role)
    on_cpu = replace(rows["triton"].supports, device=("cpu",), chip=("",), kv=("float32",), dtype=("float32",))
    own = replace(rows["triton"], supports=on_cpu)
    monkeypatch.setitem(rows, "plain", own)
    machine = Machine("Test CPU", 8, 1 << 36, 1 << 36, (), 0, "", frozenset(("triton",)))
    facts, decisions = read_config_facts(DENSE, "test"), Decisions()
    with pytest.raises(
        UnsupportedConfig, match="attention_backend plain: no kernel that fits computes .* beside it. Use reference."
    ):
        resolve_kernels(options_of(model="m", attention_backend="plain"), facts, machine, "cpu", decisions)


@pytest.mark.parametrize("method", [["fp8"], {"fp8": 1}, 8, None])
def test_a_method_that_is_no_name_is_refused(method: object) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config.quant_method .* is not supported"):
        read_config_facts(DENSE | {"quantization_config": {"quant_method": method}}, "config.json")


@pytest.mark.parametrize("backend", ["triton", "deep_gemm", "cublas"])
def test_a_requested_backend_is_kept(backend: str) -> None:
    made, why = run(FP8, fp8_gemm_backend=backend)
    assert made["fp8_gemm"] == backend and why["fp8_gemm_backend"] == ""


@pytest.mark.parametrize(
    ("config", "wishes", "words"),
    [
        (
            FP8,
            {"moe_runner_backend": "deep_gemm", "libraries": ("triton",)},
            ["moe_runner_backend", "installed", "Use triton."],
        ),
        (
            FP8,
            {"moe_runner_backend": "cutlass"},
            ["moe_runner_backend", "unknown backend 'cutlass'", "triton+deep_gemm"],
        ),
        (
            FP8,
            {"fp8_gemm_backend": "cublas", "deterministic_inference": True},
            ["fp8_gemm_backend", "batch-invariant", "Use triton."],
        ),
        (DENSE, {"fp8_gemm_backend": "deep_gemm"}, ["fp8_gemm_backend", "plain"]),
        (
            EXPERTS | {"moe_intermediate_size": 96},
            {"moe_runner_backend": "deep_gemm"},
            ["moe_runner_backend deep_gemm", "tiles of 64", "Use triton."],
        ),
        (
            EXPERTS | {"hidden_size": 192},
            {"moe_runner_backend": "triton+deep_gemm"},
            ["moe_runner_backend triton+deep_gemm", "tiles of 128", "Use triton."],
        ),
        (
            EXPERTS,
            {"moe_runner_backend": "deep_gemm", "tp_size": 2},
            ["moe_runner_backend deep_gemm", "on each rank", "Use triton."],
        ),
        (FP8, {"moe_runner_backend": "triton", "attention": "reference"}, ["moe_runner_backend", "Use reference."]),
    ],
)
def test_refusals_name_the_setting_and_the_nearest(
    config: dict[str, Any], wishes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        run(config, **wishes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unaligned_experts_are_ours_where_nothing_is_asked_and_whole_ones_deep_gemms() -> None:
    assert run(EXPERTS)[0]["moe"] == "triton+deep_gemm"
    made, reasons = run(EXPERTS | {"moe_intermediate_size": 96})
    assert made["moe"] == "triton" and "tiles of 64" in reasons["moe_runner_backend"]
    assert run(EXPERTS, tp_size=2, ep_size=2)[0]["moe"] == "triton+deep_gemm", "each rank has whole experts"


@pytest.mark.parametrize("rank, mode, refuses", [(16, True, True), (64, True, False), (16, False, False)])
def test_deterministic_latents_of_no_whole_tiles_are_refused(rank: int, mode: bool, refuses: bool) -> None:
    facts = read_config_facts(EXPERTS | {"kv_lora_rank": rank}, "test")
    machine = Machine("Test CPU", 8, 1 << 36, 1 << 36, H100, 1 << 36, "9.0", frozenset(("triton",)))
    options = options_of(model="m", attention_backend="triton", deterministic_inference=mode)
    if refuses:
        with pytest.raises(UnsupportedConfig, match="triton: .*kv_lora_rank in whole tiles of 64. Use reference"):
            resolve_kernels(options, facts, machine, "cuda", Decisions())
    else:
        assert resolve_kernels(options, facts, machine, "cuda", Decisions()).decode == "triton"
