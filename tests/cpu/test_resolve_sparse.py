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
from thalweg.config.machine import Machine
from thalweg.core.kernels import KernelConfig
from thalweg.engine.calibration_checks import self_checks
from thalweg.launch.kernels import unsupported_layout

SPARSE = LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
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
    meant = [meant[0] or meant[1] or "triton_sparse", meant[1] or meant[0] or "triton_sparse"]
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
        (EVERYTHING, {"num_attention_heads": 16}, {}, "64 or 128 attention heads on each device"),
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


def test_heads_of_a_device_decide_whether_flashmla_computes_sparse_attention() -> None:
    """Data-parallel attention leaves all heads on a device, tensor parallelism divides them."""
    eight = dataclasses.replace(EVERYTHING, gpus=EVERYTHING.gpus * 8)
    wish, sparse = {"dsa_decode_backend": "flashmla_sparse"}, facts(**SPARSE)
    assert attention_of(sparse, eight, tp_size=2, **wish)[0] == "flashmla_sparse"
    assert "64 or 128 attention heads on each device" in refusal(sparse, eight, tp_size=4, **wish)
    divided = {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}
    assert attention_of(sparse, eight, **divided, **wish)[0] == "flashmla_sparse"


@pytest.mark.parametrize("flags", [{"dcp_size": 2}, {"attn_cp_size": 2}], ids=str)
def test_divided_contexts_keep_sparse_attention_on_triton(flags: dict[str, int]) -> None:
    two, sparse = dataclasses.replace(EVERYTHING, gpus=EVERYTHING.gpus * 2), facts(**SPARSE)
    assert attention_of(sparse, two, tp_size=2, dsa_decode_backend="triton", **flags)[0] == "triton_sparse"
    told = refusal(sparse, two, tp_size=2, dsa_decode_backend="flashmla_sparse", **flags)
    assert "it has not run with --dcp-size or --attn-cp-size above 1. Use triton." in told


def test_the_library_is_checked_at_start_and_for_each_layout() -> None:
    of = facts(**SPARSE)
    for backend, kv in (("flashmla_sparse", ""), ("flashmla_kv", "fp8_ds_mla")):
        kernels = KernelConfig(decode=backend, prefill="triton_sparse", kv=kv)
        found = self_checks(kernels, of, torch.device("cpu"))
        assert [(role, name) for role, name, _ in found] == [("decode", backend)]
        with pytest.raises(RuntimeError, match="FlashMLA's sparse attention does not run here"):
            found[0].run()
        refused = [bool(unsupported_layout(kernels, of, ranks, False)) for ranks in (1, 2, 4, 8)]
        assert refused == [False, False, True, True]
        assert "--dcp-size or --attn-cp-size" in unsupported_layout(kernels, of, 1, True)
    own = KernelConfig(decode="triton_sparse", prefill="triton_sparse")
    assert not unsupported_layout(own, of, 8, True)
    hot = msgspec.structs.replace(own, hot=4096)
    assert unsupported_layout(hot, of, 1, True).startswith("enable_hisparse: ") and not unsupported_layout(
        hot, of, 1, False
    )
