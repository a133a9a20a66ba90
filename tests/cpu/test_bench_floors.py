"""The floors of a step against arithmetic by hand and against published figures for these shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.plan_models import DEEPSEEK, INDEXER, LITE
from thalweg.bench.floor import ServedModel, share_of_floor, step_seconds
from thalweg.config.machines import CHIPS, Hardware, hardware
from thalweg.config.model import ModelFacts
from thalweg.launch.planning import roofline
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.launch.planning.roofline import Ceilings, StepPhase, StepShape
from thalweg.launch.planning.weights import PlannedModel
from thalweg.models.catalog import read_config_facts

H100 = Ceilings(read=3.1e12, bf16=800e12, fp8=1526e12)
SLIM = DEEPSEEK | {"num_hidden_layers": 5, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
}


def facts(config: dict[str, Any]) -> ModelFacts:
    return read_config_facts(config, "test")


def milliseconds(config: dict[str, Any], shape: StepShape) -> float:
    return 1e3 * roofline.seconds(roofline.phases(PlannedModel(facts(config)).on(ONE), shape), H100)


@pytest.mark.parametrize(
    ("config", "rows", "expected"),
    [
        (LITE, 1, 1.59),
        (LITE, 8, 5.8),
        (LITE, 32, 9.9),
        (SLIM, 1, 1.54),
        (QWEN, 1, 4.6),
        (QWEN, 64, 5.9),
        (QWEN, 256, 10.0),
    ],
)
def test_decode_at_a_context_of_1024(config: dict[str, Any], rows: int, expected: float) -> None:
    assert milliseconds(config, StepShape(rows, 1, 1024)) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(("config", "expected"), [(LITE, 10.1), (SLIM, 15.65)])
def test_a_prompt_of_1024_reads_all_experts(config: dict[str, Any], expected: float) -> None:
    phases = roofline.phases(PlannedModel(facts(config)).on(ONE), StepShape(1, 1024, 1024))
    reads = sum(phase.bytes for phase in phases) / H100.read
    assert 1e3 * reads == pytest.approx(expected, rel=0.01)
    assert reads < roofline.seconds(phases, H100) < 1.12 * reads, "projections are bound by FLOPs"


def test_a_long_prefill_is_its_flops() -> None:
    """8,192 tokens: GEMM FLOPs at their type's rate, attention at bf16's, by hand."""
    tokens, heads = 8192, 16
    linear = 2 * tokens * (2048 * 3648 + 512 * heads * 256 + 2048 * 2048)
    scores = 2 * heads * 320 * (tokens * (tokens + 1) // 2)
    experts, dense = 2 * tokens * (8 * 3 * 2048 * 1408 + 2048 * 64), 2 * tokens * 3 * 2048 * 10944
    flops = 27 * (linear + scores) + 26 * experts + dense
    head = 2 * 102400 * 2048 / H100.read
    assert milliseconds(LITE, StepShape(1, tokens, tokens)) == pytest.approx(1e3 * (flops / H100.bf16 + head), rel=1e-6)


def test_a_cached_context_costs_its_pairs() -> None:
    assert StepShape(2, 3, 10).pairs == 2 * (8 + 9 + 10)
    assert StepShape(1, 4, 4).pairs == 1 + 2 + 3 + 4


def test_measured_coverage_takes_the_place_of_the_expected() -> None:
    all_read = StepShape(1, 1, 1024, covered=(64.0,) * 26)
    more = 26 * (64 - 6) * 3 * 2048 * 1408 * 2 / H100.read
    assert milliseconds(LITE, all_read) - milliseconds(LITE, StepShape(1, 1, 1024)) == pytest.approx(
        1e3 * more, rel=1e-6
    )


def test_the_share_of_a_run_is_its_decode_steps_at_the_mean_batch_and_context(tmp_path: Path) -> None:
    """96 requests of 1,024 + 256 tokens, 32 at a time: 768 steps of 32 rows at a context of 1,152."""
    (tmp_path / "config.json").write_text(json.dumps(LITE))
    chip = replace(CHIPS["h200"], read=H100.read, bf16=H100.bf16, fp8=H100.fp8)
    model = ServedModel(tmp_path, ONE)
    share = share_of_floor(model, Hardware(chip, 1), 96, 96 * 1024, 96 * 256, batch=31.8, seconds=10.0)
    step = milliseconds(LITE, StepShape(32, 1, 1152)) / 1e3
    assert share == pytest.approx(768 * step / 10.0) and 7.6 < 768 * step < 8.4, "about 10.4 ms a step"
    assert share_of_floor(model, Hardware(chip, 1), 0, 0, 0, 0.0, 1.0) is None, "without output"
    assert share_of_floor(ServedModel(tmp_path / "nothing", ONE), Hardware(chip, 1), 1, 1, 1, 1.0, 1.0) is None


def test_the_floor_is_that_of_the_layout_and_the_index_pattern(tmp_path: Path) -> None:
    """Two GPUs read half each and send. A layer that shares a selection saves its index keys, 256 bytes a token in bf16,
    and the indexer's weights, 14.4 MB.
    """
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | INDEXER))
    info = {"tp_size": 2, "dp_size": 1, "ep_size": 1, "enable_dp_attention": False}
    one, two = ServedModel(tmp_path, ONE), ServedModel.of_server(tmp_path, info)
    assert two.layout == ParallelLayout(tp=2)
    shape = StepShape(1, 1, 100_000)
    alone, computing = (step_seconds(model, shape, H100, None) for model in (one, two))
    sending = step_seconds(two, shape, H100, hardware("h100x2")) - computing
    assert 0.4 * alone < computing < 0.75 * alone and 122 * 5e-6 < sending < 1e-3
    pattern = "F" + "S" * 60
    shared = ServedModel.of_server(tmp_path, info | {"resolved": {"index_topk_pattern": {"value": pattern}}})
    saved = 60 * (100_000 * 256 + 14.4e6) / H100.read
    assert computing - step_seconds(shared, shape, H100, None) == pytest.approx(saved, rel=0.02)


def test_a_phase_takes_the_longer_of_reading_and_computing() -> None:
    assert StepPhase("", bytes=3.1e12, bf16=400e12).seconds(H100) == 1.0
    assert StepPhase("", bytes=1.0, bf16=800e12, fp8=1526e12).seconds(H100) == 2.0
