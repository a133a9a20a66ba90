"""Backends of sparse attention by name: each pair for decode rows and prompts runs or is refused with what to type."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch

from tests.cpu.test_resolve import (
    EVERYTHING,
    H100,
    LATENT,
    NO_GRAPHS,
    attention_of,
    facts,
    graphs,
    machine,
    refusal,
    run,
)
from thalweg.config.engine import EngineConfig
from thalweg.config.machine import Machine
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.report import START_UP, USER, Decision
from thalweg.engine.calibration_checks import replace_failing, self_checks
from thalweg.launch.kernels import unsupported_layout

SPARSE = LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
FP8_CHECKPOINT = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
SPARSE_NAMES = {
    "auto": None,
    "triton": "triton_sparse",
    "torch": "torch",
    "flashmla_sparse": "flashmla_sparse",
    "flashmla_kv": "flashmla_kv",
}


@pytest.mark.parametrize("cache", ["", "fp8_e4m3"])
@pytest.mark.parametrize("prefill", [*SPARSE_NAMES, "flashmla_auto"])
@pytest.mark.parametrize("decode", [*SPARSE_NAMES, "flashmla_auto"])
def test_every_pair_of_sparse_backends_runs_or_is_refused(decode: str, prefill: str, cache: str) -> None:
    is_fp8 = cache != ""
    reader = ("flashmla_sparse", "flashmla_kv")[is_fp8]
    flags = {"dsa_decode_backend": decode, "dsa_prefill_backend": prefill, "kv_cache_dtype": cache or None}
    meant = [SPARSE_NAMES[reader if name == "flashmla_auto" else name] for name in (decode, prefill)]
    torch_both = "torch" if "torch" in meant else None
    meant = [meant[0] or torch_both or "triton_sparse", meant[1] or torch_both or reader]
    sparse = facts(**SPARSE)
    if "torch" in meant and meant[0] != meant[1]:
        told = refusal(sparse, EVERYTHING, **flags)
        assert "torch must compute both" in told and "--dsa-prefill-backend" in told
    elif other := {"flashmla_sparse", "flashmla_kv"} & {*meant} - {reader}:
        told = refusal(sparse, EVERYTHING, **flags)
        assert f"backend: {other.pop()} reads" in told and f"use {reader}" in told
    else:
        found = run(sparse, EVERYTHING, **flags)[0].config.kernels
        assert [found.decode, found.prefill] == meant
        is_kernel = "torch" not in meant
        assert found.kv == ("fp8_ds_mla" if is_fp8 and is_kernel else cache)
        assert found.topk == ("triton" if is_kernel else "torch")
        assert found.fp8_index == (found.kv == "fp8_ds_mla")


@pytest.mark.parametrize(
    ("on", "changed", "wishes", "told"),
    [
        (H100, {}, {}, "the library is not installed. Use triton."),
        (EVERYTHING, {"num_attention_heads": 136}, {}, "at most 128 attention heads on each device"),
        (EVERYTHING, {"index_topk": 2000}, {}, "index_topk in whole tiles of 128"),
        (EVERYTHING, {"kv_lora_rank": 256}, {}, "latents of 512 + 64 dims"),
        (EVERYTHING, {}, {"deterministic_inference": True}, "no batch-invariant kernel. Use triton."),
        (EVERYTHING, {}, {"dtype": "float32"}, "dtype float32, not bfloat16"),
        (dataclasses.replace(EVERYTHING, capability="8.0"), {}, {}, "chip ampere, not hopper"),
        (machine(), {}, {}, "needs a GPU"),
    ],
)
def test_what_flashmla_cannot_do_for_sparse_attention(
    on: Machine, changed: dict[str, Any], wishes: dict[str, Any], told: str
) -> None:
    for flag in ("dsa_decode_backend", "dsa_prefill_backend"):
        got = refusal(facts(**SPARSE | changed), on, **{flag: "flashmla_sparse"}, **wishes)
        assert got.startswith("dsa_") and "flashmla_sparse" in got and told in got


def test_sparse_backends_may_be_named_beside_attention_backend() -> None:
    sparse, named = facts(**SPARSE), {"attention_backend": "triton_sparse"}
    for flag, pair in (
        ("dsa_decode_backend", ("flashmla_sparse", "triton_sparse")),
        ("dsa_prefill_backend", ("triton_sparse", "flashmla_sparse")),
    ):
        assert attention_of(sparse, EVERYTHING, **named, **{flag: "flashmla_auto"})[:2] == pair
    assert attention_of(sparse, EVERYTHING, attention_backend="flashmla_sparse")[:2] == ("flashmla_sparse",) * 2
    assert graphs(run(sparse, EVERYTHING, attention_backend="flashmla_sparse")[0]) != NO_GRAPHS
    both = {"dsa_decode_backend": "flashmla_sparse", "dsa_prefill_backend": "flashmla_sparse"}
    assert "triton_sparse has no part beside --dsa-decode-backend" in refusal(sparse, EVERYTHING, **named, **both)
    told = refusal(sparse, EVERYTHING, attention_backend="flashmla_kv")
    assert told.startswith("attention_backend: flashmla_kv reads FP8 records; add --kv-cache-dtype fp8_ds_mla")
    assert attention_of(sparse, EVERYTHING, dsa_decode_backend="flashmla_sparse", trees=True)[0] == "flashmla_sparse"


def test_a_role_that_no_flag_names_has_the_fastest_kernel_that_fits() -> None:
    sparse, other = facts(**SPARSE), facts(**SPARSE | {"index_head_dim": 64})
    wish = {"dsa_decode_backend": "triton"}
    assert attention_of(sparse, EVERYTHING, **wish)[:2] == ("triton_sparse", "flashmla_sparse")
    assert attention_of(other, EVERYTHING, **wish)[:2] == ("triton_sparse", "triton_sparse"), "not torch beside it"
    assert attention_of(sparse, EVERYTHING, dsa_prefill_backend="torch")[:2] == ("torch", "torch")


def test_heads_of_a_device_decide_whether_flashmla_computes_sparse_attention() -> None:
    """Data-parallel attention leaves all heads on a device, tensor parallelism divides them; few heads keep Triton."""
    eight = dataclasses.replace(EVERYTHING, gpus=EVERYTHING.gpus * 8)
    sparse, wish = facts(**SPARSE), {"dsa_decode_backend": "flashmla_sparse"}
    attention_dp = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}
    for divided, prefill in (
        ({"tp_size": 2}, "flashmla_sparse"),
        ({"tp_size": 4}, "triton_sparse"),
        (attention_dp, "flashmla_sparse"),
    ):
        assert attention_of(sparse, eight, **divided)[:2] == ("triton_sparse", prefill)
        assert attention_of(sparse, eight, **divided, **wish)[:2] == ("flashmla_sparse", prefill), "named, it pads"


def test_latents_in_host_memory_are_for_kernels_that_read_them() -> None:
    sparse, hot = facts(**SPARSE), {"enable_hisparse": True}
    assert attention_of(sparse, EVERYTHING)[:2] == ("triton_sparse", "flashmla_sparse")
    assert attention_of(sparse, H100)[:2] == ("triton_sparse", "triton_sparse"), "without the library"
    assert attention_of(sparse, EVERYTHING, **hot)[:2] == ("triton_sparse", "triton_sparse")
    for backend in ("torch", "flashmla_sparse"):
        told = refusal(sparse, EVERYTHING, attention_backend=backend, **hot)
        assert f"{backend}: it does not read latents in host memory" in told and "Use triton_sparse" in told
    for wishes in ({"attention_backend": "reference"}, {"dtype": "float32"}):
        assert "reference attention does not read host memory on a GPU" in refusal(sparse, EVERYTHING, **hot, **wishes)


def test_divided_contexts_keep_sparse_attention_on_triton_and_divided_tokens_do_not() -> None:
    two, sparse = dataclasses.replace(EVERYTHING, gpus=EVERYTHING.gpus * 2), facts(**SPARSE)
    shared, wish = {"tp_size": 2, "dcp_size": 2}, {"dsa_decode_backend": "flashmla_sparse"}
    assert attention_of(sparse, two, **shared)[:2] == ("triton_sparse", "triton_sparse")
    told = refusal(sparse, two, **shared, **wish)
    assert "it has not run with --dcp-size above 1, or --shard-indexer. Use triton." in told
    tokens = {"tp_size": 2, "attn_cp_size": 2}
    assert attention_of(sparse, two, **tokens)[:2] == ("triton_sparse", "flashmla_sparse")
    assert attention_of(sparse, two, **tokens, **wish)[0] == "flashmla_sparse"


LIBRARY = dataclasses.replace(EVERYTHING, libraries=EVERYTHING.libraries | {"deep_gemm"})
SCORES = {"dsa_paged_mqa_logits_backend": "deepgemm", "kv_cache_dtype": "fp8_ds_mla"}


@pytest.mark.parametrize("name", [None, "auto", "deep_gemm", "deepgemm"])
def test_index_scores_are_deep_gemms(name: str | None) -> None:
    """Of FP8 index keys: of an FP8 cache, or of an FP8 checkpoint."""
    sparse = facts(**SPARSE)
    for of, flags in (
        (sparse, {"kv_cache_dtype": "fp8_ds_mla"}),
        (facts(**SPARSE | FP8_CHECKPOINT), {}),
        (sparse, {"kv_cache_dtype": "fp8_e4m3", "dsa_decode_backend": "flashmla_kv"}),
    ):
        resolved = run(of, LIBRARY, dsa_paged_mqa_logits_backend=name, **flags)[0]
        assert resolved.config.kernels.index_scores == "deep_gemm"
        assert graphs(resolved) != NO_GRAPHS
        kernels = run(of, LIBRARY, dsa_paged_mqa_logits_backend="triton", **flags)[0].config.kernels
        assert kernels.index_scores == "triton"
    assert run(sparse, LIBRARY)[0].config.kernels.index_scores == "triton", "index keys in bfloat16"
    assert run(sparse, LIBRARY, dsa_decode_backend="torch")[0].config.kernels.index_scores == "torch"


@pytest.mark.parametrize(
    ("on", "changed", "flags", "told"),
    [
        (H100, {}, {}, "the library is not installed. Use triton."),
        (LIBRARY, {"index_n_heads": 16}, {}, "32 or 64 index heads of 32, 64 or 128 dims"),
        (LIBRARY, {"index_head_dim": 256}, {}, "32 or 64 index heads of 32, 64 or 128 dims"),
        (LIBRARY, {}, {"kv_cache_dtype": "bfloat16"}, "index_keys plain, not e4m3. Use triton."),
        (
            LIBRARY,
            {},
            {"deterministic_inference": True, "dsa_decode_backend": "triton"},
            "no batch-invariant kernel",
        ),
        (LIBRARY, {}, {"dsa_decode_backend": "torch"}, "attention torch, not kernels"),
        (dataclasses.replace(LIBRARY, capability="10.0"), {}, {}, "chip blackwell, not hopper. Use triton."),
        (machine(), {}, {"kv_cache_dtype": None}, "needs a GPU. Use torch."),
    ],
)
def test_what_deep_gemm_cannot_score(on: Machine, changed: dict[str, Any], flags: dict[str, Any], told: str) -> None:
    got = refusal(facts(**SPARSE | changed), on, **SCORES | flags)
    assert got.startswith("dsa_paged_mqa_logits_backend deep_gemm: ") and told in got, got


def test_index_scores_of_other_backends_are_refused() -> None:
    sparse, flag = facts(**SPARSE), "dsa_paged_mqa_logits_backend"
    assert refusal(sparse, LIBRARY, **{flag: "cutedsl"}) == (
        f"{flag}: cutedsl is no backend of sparse attention here; there is auto, triton, deep_gemm, deepgemm, torch"
    )
    assert refusal(sparse, LIBRARY, **{flag: "torch"}).endswith("attention kernels, not torch. Use triton.")
    assert "has no sparse attention" in refusal(facts(**LATENT), LIBRARY, **{flag: "deepgemm"})


@pytest.mark.parametrize("flags", [{"dcp_size": 2}, {"shard_indexer": True}], ids=str)
def test_divided_contexts_keep_index_scores_on_triton(flags: dict[str, int]) -> None:
    two, sparse = dataclasses.replace(LIBRARY, gpus=LIBRARY.gpus * 2), facts(**SPARSE)
    told = refusal(sparse, two, tp_size=2, **SCORES, **flags)
    assert "deep_gemm: it has not run with --dcp-size above 1, or --shard-indexer. Use triton." in told
    kernels = KernelConfig(decode="triton_sparse", prefill="triton_sparse", index_scores="deep_gemm", fp8_index=True)
    named, layout = ("index_scores",), (sparse, 2)
    assert unsupported_layout(kernels, named, *layout, dcp=2).startswith("dsa_paged_mqa_logits_backend deep_gemm: ")
    assert not unsupported_layout(kernels, named, *layout, cp=2) and not unsupported_layout(kernels, (), *layout, dcp=2)


def test_deep_gemms_scores_are_checked_at_start() -> None:
    kernels = KernelConfig(decode="triton_sparse", prefill="triton_sparse", index_scores="deep_gemm", fp8_index=True)
    of, missing = facts(**SPARSE), "DeepGEMM's index scores does not run here"
    (check,) = self_checks(kernels, of, torch.device("cpu"))
    assert (check.role, check.backend) == ("index_scores", "deep_gemm")
    config = EngineConfig(model_path="m", dsa_paged_mqa_logits_backend="deep_gemm")
    replaced = replace_failing(config, [check])
    why = replaced.report.current()["dsa_paged_mqa_logits_backend"]
    assert (replaced.kernels.index_scores, why.source) == ("triton", START_UP) and missing in why.reason
    named = config.started([Decision("dsa_paged_mqa_logits_backend", "deep_gemm", USER, "")])
    with pytest.raises(UnsupportedConfig, match=missing):
        replace_failing(named, [check])


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_sparse_library_that_fails_is_replaced_by_sparse_kernels(role: str) -> None:
    kernels = KernelConfig(**{"decode": "triton_sparse", "prefill": "triton_sparse"} | {role: "flashmla_sparse"})
    config = EngineConfig(
        model_path="m", decode_attention_backend=kernels.decode, prefill_attention_backend=kernels.prefill
    )
    replaced = replace_failing(config, self_checks(kernels, facts(**SPARSE), torch.device("cpu")))
    assert (replaced.kernels.decode, replaced.kernels.prefill) == ("triton_sparse", "triton_sparse")


def test_the_library_is_checked_at_start_and_for_each_layout() -> None:
    of = facts(**SPARSE)
    for backend, kv in (("flashmla_sparse", ""), ("flashmla_kv", "fp8_ds_mla")):
        kernels = KernelConfig(decode=backend, prefill="triton_sparse", kv=kv)
        found = self_checks(kernels, of, torch.device("cpu"))
        assert [(role, name) for role, name, _ in found] == [("decode", backend)]
        with pytest.raises(RuntimeError, match="FlashMLA's sparse attention does not run here"):
            found[0].run()
        assert not any(unsupported_layout(kernels, ("decode",), of, ranks) for ranks in (1, 2, 4, 8))
        other = facts(**SPARSE | {"index_topk": 2000})
        assert "whole tiles of 128" in unsupported_layout(kernels, ("decode",), other, 1)
        assert "--dcp-size above 1" in unsupported_layout(kernels, ("decode",), of, 1, dcp=2)
        assert not unsupported_layout(kernels, ("decode",), of, 1, cp=2)
        assert not unsupported_layout(kernels, ("prefill",), of, 8, dcp=2), "another is chosen there"
    own = KernelConfig(decode="triton_sparse", prefill="triton_sparse")
    assert not unsupported_layout(own, ("decode", "prefill"), of, 8, 2, 2)
    hot = msgspec.structs.replace(own, hot=4096)
    assert all(unsupported_layout(hot, (), of, 1, *both).startswith("enable_hisparse: ") for both in ((2, 1), (1, 2)))
    assert not unsupported_layout(hot, (), of, 1)
