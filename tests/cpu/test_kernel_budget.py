"""benchmarks/gpu/kernel_budget.py on synthetic traces: steps, layers, floors, and disturbances."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu/kernel_budget.py"
DENSE = {
    "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
    "num_hidden_layers": 4,
}  # fmt: skip
EXPERTS = {
    "hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 1536, "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_hidden_layers": 5, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
DENSE_LAYER = [
    "_rms_norm",
    "nvjet_a",
    "_decode",
    "nvjet_b",
    "_rms_norm",
    "nvjet_c",
    "_silu_mul",
    "nvjet_d",
    "splitKreduce_kernel",
]
ATTENTION = ["_gemv", "_rms_norm", "_gemv", "_mla_absorb", "_decode", "_merge_up", "_gemv"]
EXPERT_LAYER = [*ATTENTION, "_logits_few", "_choose", "_up", "_down", "_combine"]
CEILINGS = {"read": 3e12, "bf16": 8e14, "fp8": 1.6e15}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_budget", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def trace(script: ModuleType, first: list[str], layer: list[str], count: int, steps: int = 12) -> list[Any]:
    """Steps of two replays of 10 µs a kernel, the last 3 of which overlap their successor's first; an output copy on
    another stream at any time, and in some steps an upload.
    """
    rng, seen, now, launch = Random(1), [], 0.0, 7
    for step in range(steps):
        for kernels in (["_prepare", *first, *layer * count, "_rms_norm"], ["head", "_draw"]):
            launch += 1
            for name in kernels:
                seen.append(script.Seen(name, now, now + 13.0, launch, 7))
                now += 10.0
        launch += 1
        copied = now + rng.uniform(-50, 90)
        seen.append(script.Seen("Memcpy DtoH", copied, copied + 2.0, launch, 9))
        if step % 4 == 1:
            launch += 1
            seen.append(script.Seen("Memcpy HtoD", now, now + 1.0, launch, 7))
        now += 5.0
    rng.shuffle(seen)
    return seen


def known(config: dict[str, Any], rows: int, experts: float) -> dict[str, Any]:
    return {
        "model": "m", "rows": rows, "step_ms": 1.0, "experts_read": experts, "config": config | {"head_dim": 128},
        "ceilings": CEILINGS,
    }  # fmt: skip


def test_a_dense_layer_has_its_kernels_times_and_floors(script: ModuleType) -> None:
    told = script.budget(trace(script, [], DENSE_LAYER, 4), known(DENSE, 256, 0.0))
    assert (told["kernels_a_layer"], told["equal_layers"], told["kernels_a_step"]) == (9, 4, 1 + 36 + 1 + 2 + 1)
    assert [one["kernel"] for one in told["layer"]] == DENSE_LAYER
    assert all(abs(one["adds"] - 10.0) < 1e-6 and abs(one["us"] - 13.0) < 1e-6 for one in told["layer"][1:])
    assert told["layer_us"] == pytest.approx(90.0)
    gate_up = told["layer"][5]
    assert gate_up["what"] == "gate and up projection"
    assert gate_up["mb"] == pytest.approx(2 * 18944 * 3584 * 2 / 1e6)
    assert gate_up["floor"] == pytest.approx(max(2 * 18944 * 3584 * 2 / 3e12, 2 * 256 * 2 * 18944 * 3584 / 8e14) * 1e6)
    assert [one["name"] for one in told["outside"]] == ["_prepare", "_rms_norm", "head", "_draw", "Memcpy DtoH"]
    assert told["outside"][-1]["adds"] == 0.0, "what is copied on another stream adds nothing"
    assert "config" not in told


def test_layers_of_another_form_are_outside(script: ModuleType) -> None:
    first = [*ATTENTION, "_rms_norm", "_gemv", "_silu_mul", "_gemv"]
    told = script.budget(trace(script, first, EXPERT_LAYER, 4), known(EXPERTS, 1, 9.0))
    assert (told["kernels_a_layer"], told["equal_layers"]) == (12, 4)
    by_name = {one["kernel"]: one for one in told["layer"] if one["kernel"] != "_gemv"}
    assert by_name["_up"]["mb"] == pytest.approx(2 * 9 * 7168 * 2048 / 1e6), "FP8: a byte a weight"
    assert by_name["_mla_absorb"]["mb"] == pytest.approx(128 * 128 * 512 * 2 / 1e6), "W_UK stays bf16"
    whats = [one["what"] for one in told["layer"] if one["kernel"] == "_gemv"]
    assert whats == ["query and latent projection", "query up projection", "output projection"]


def test_absorbing_products_of_a_library_come_before_the_output_projection(script: ModuleType) -> None:
    kernels = ["gemm_a", "gemm_b", "_mla_write", "nvjet_k", "_decode", "nvjet_v", "gemm_c"]
    products, others = script.works(EXPERTS, 128, 200.0, kernels)
    assert [one.what for one in products][2:4] == ["queries into latent space", "out of latent space"]
    assert "_mla_write" in others


def test_an_indexers_products_are_told_from_attentions(script: ModuleType) -> None:
    config = EXPERTS | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    projections = ["_gemv", "_gemv", "_rms_norm", "_gemv", "_gemv", "_mla_absorb", "_logits_few", "_write"]
    own = [*projections, "_attend", "_merge_up", "_gemv", "_logits_few", "_choose"]
    layer = [script.Line(name, 10.0, 10.0) for name in own]
    told = script.budgeted(layer, config, 1, 9.0, script.Ceilings(**CEILINGS))
    assert [one["what"] for one in told if one["kernel"] == "_gemv"] == [
        "query and latent projection", "index key", "query up projection", "index queries", "output projection",
    ]  # fmt: skip
    assert [one["what"] for one in told if one["kernel"] == "_logits_few"] == [
        "weights of the index heads",
        "router logits",
    ]
    assert told[1]["mb"] == pytest.approx(128 * 7168 * 2 / 1e6), "bfloat16"
    together = [name for i, name in enumerate(own) if i not in (1, 4)]
    products, _ = script.works(config, 1, 9.0, together)
    assert products[1].bytes == 1536 * (128 * 192 + 64 * 128), "one product, in FP8"


def test_steps_that_were_not_recorded_are_an_error(script: ModuleType) -> None:
    seen = [script.Seen("_gemv", 10.0 * i, 10.0 * i + 5, i, 7) for i in range(300)]
    with pytest.raises(ValueError, match="300 kernels .* were the steps recorded"):
        script.steps(seen)


def test_the_table_is_what_the_results_say(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = script.budget(trace(script, [], DENSE_LAYER, 4), known(DENSE, 64, 0.0))
    path = tmp_path / "kernel_budget_m_64.json"
    path.write_text(json.dumps(told))
    script.table([str(path)])
    shown = capsys.readouterr().out
    assert "**m, batch 64**: 1.00 ms a step" in shown
    assert "| `nvjet_d` | down projection | 135.8 | 45.3 | 10.0 |" in shown
    assert "| 9 kernels | a layer |" in shown and "outside the 4 equal layers" in shown
