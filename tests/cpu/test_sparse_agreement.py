"""benchmarks/gpu/sparse_agreement.py accepts the bundled model's chunks and prefix hits, and finds planted errors."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from thalweg.attention.context import AttentionGroup, AttentionMetadata
from thalweg.engine import build
from thalweg.kernels.router import ref
from thalweg.layers.mla import Indexer

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 128


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "sparse_agreement", ROOT / "benchmarks" / "gpu" / "sparse_agreement.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def result(script: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out, given = path / "out.json", ["--model", str(ROOT / "models" / "tiny"), "--load-format", "auto"]
    monkeypatch.setattr(sys, "argv", ["", *given, "--dtype", "bfloat16", "--out", str(out), *flags])
    monkeypatch.setattr(build, "traced", lambda model, device: model)  # to record steps takes longer than all these
    status = script.main()
    return status, json.loads(out.read_text())


def choices(script: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path) -> tuple[int, dict[str, Any]]:
    return result(script, monkeypatch, path, "--tokens", "500", "--chunk", str(CHUNK))


def test_choices_that_differ_are_near_ties(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, found = choices(script, monkeypatch, tmp_path)
    free, imposed = (found["runs"][f"chunks of {CHUNK}, {name}"] for name in ("own choices", "imposed"))
    assert status == 0 and found["rounding_only"]
    assert 0 < script.total(imposed, "context", "flipped") < script.total(free, "context", "flipped")
    assert imposed["logits_error_max"] < free["logits_error_max"]


def test_bits_are_the_same_where_they_must_be(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "OTHERS", (5, 20))
    status, found = result(script, monkeypatch, tmp_path, "--check", "bits", "--tokens", "90", "--chunk", "64")
    assert status == 0 and found["same_bits"] and found["runs"]["prefix hit"]["cached"] == 64


def test_a_choice_by_wrong_scores_is_found(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of chunks alone, whose logits with imposed choices are as they should be."""
    right = Indexer.select

    def select(self: Indexer, x_TH: Tensor, query_TX: Tensor, step: AttentionMetadata) -> Any:
        return right(self, x_TH, query_TX.roll(1, 1) if 1 < len(x_TH) <= CHUNK else query_TX, step)

    monkeypatch.setattr(Indexer, "select", select)
    status, found = choices(script, monkeypatch, tmp_path)
    imposed = found["runs"][f"chunks of {CHUNK}, imposed"]
    assert status == 1 and imposed["logits_error_median"] < found["bound"]
    assert script.total(imposed, "context", "noise_over_spread") > 0.5


def test_attention_to_wrong_tokens_is_found(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = AttentionGroup.plane_rows

    def plane_rows(self: AttentionGroup, index_NK: Tensor) -> Tensor:
        return right(self, (index_NK - int(1 < self.query <= CHUNK)).clamp(min=0))

    monkeypatch.setattr(AttentionGroup, "plane_rows", plane_rows)
    status, found = choices(script, monkeypatch, tmp_path)
    assert status == 1 and found["runs"][f"chunks of {CHUNK}, imposed"]["logits_error_median"] > 2 * found["bound"]


def test_a_router_that_rounds_is_found(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = ref.choose_experts
    monkeypatch.setattr(ref, "choose_experts", lambda logits_TE, *rest: right(logits_TE.bfloat16().float(), *rest))
    status, found = choices(script, monkeypatch, tmp_path)
    assert status == 1 and found["runs"][f"chunks of {CHUNK}, imposed"]["experts_off_formula"] > 0
