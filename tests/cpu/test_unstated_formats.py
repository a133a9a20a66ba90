"""Checkpoints whose config.json has no quantization_config: INT8 weights with a scale for each row are recognized by
their tensors, and every other format is refused by the name of its first weight.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu.test_formats import CONFIGS, check_loads, matrices, of_module
from thalweg import LLM
from thalweg.config.tree import options_of
from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.core.report import AUTO, USER
from thalweg.launch import resolve as resolver
from thalweg.launch.hub import Checkpoint
from thalweg.models.catalog import read_facts
from thalweg.quant.catalog import config_of_tensors
from thalweg.quant.scheme import TensorSpec
from thalweg.quantize.cli import main as quantize
from thalweg.weights import stream

TINY = Path(__file__).parents[2] / "models/tiny"
SUM = "What is 45 + 315? It is 360. What is 46 + 322? It is 368."
FIRST = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def stated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in INT8, as compressed-tensors describes it, in several files."""
    folder = tmp_path_factory.mktemp("int8") / "stated"
    assert quantize([str(TINY), str(folder), "--format", "int8", "--threads", "1", "--shard-size", "0.005"]) == 0
    return folder


@pytest.fixture(scope="module")
def unstated(stated: Path) -> Path:
    return without_config(stated, stated.parent / "unstated")


def without_config(source: Path, folder: Path) -> Path:
    """A copy whose config.json has no quantization_config."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def decision(folder: Path, **options: Any) -> Any:
    report = resolver.resolve(options_of(model=str(folder), device="cpu", **options)).engine.report
    return next(entry for entry in report.decisions if entry.name == "quantization")


def test_int8_is_recognized_and_computes_what_its_configuration_says(stated: Path, unstated: Path) -> None:
    scores = []
    for folder, options in ((stated, {}), (unstated, {}), (unstated, {"quantization": "w8a8_int8"})):
        with LLM(str(folder), **options) as llm:
            scores.append(llm.score(SUM, use_tqdm=False)[0])
    assert scores[0] == scores[1] == scores[2]


def test_the_format_and_its_reason_are_reported(unstated: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "thalweg.launch"):
        found = decision(unstated)
    assert (found.value, found.source) == ("w8a8_int8", AUTO) and FIRST in found.reason
    assert f"config.json has no quantization_config; {FIRST}" in caplog.text and '"is_dynamic": false' in caplog.text
    assert decision(unstated, quantization="w8a8_int8").source == USER
    with pytest.raises(UnsupportedConfig, match=r"fp8 was asked for, and .* says w8a8_int8"):
        decision(unstated, quantization="fp8")


def test_activations_stay_16_bits_where_config_json_says_so(unstated: Path, tmp_path: Path) -> None:
    """What the warning recommends for a checkpoint of INT8 weights alone."""
    folder = tmp_path / "weights"
    shutil.copytree(unstated, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "w8a8_int8", "is_dynamic": False}
    (folder / "config.json").write_text(json.dumps(config))
    scores = []
    for model in (unstated, folder):
        with LLM(str(model)) as llm:
            scores.append(llm.score(SUM, use_tqdm=False)[0])
    assert scores[0] != scores[1]


def test_weights_of_the_hub_are_fetched_before_the_format_is_decided(
    unstated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(unstated, tmp_path / "hub", ignore=shutil.ignore_patterns("*.safetensors"))
    fetched: list[Checkpoint] = []

    def fetch(checkpoint: Checkpoint, token: str | None) -> None:
        fetched.append(checkpoint)
        shutil.copytree(unstated, checkpoint.folder, dirs_exist_ok=True)

    monkeypatch.setattr(resolver, "locate", lambda *_, **__: Checkpoint(tmp_path / "hub", "org/int8", "1"))
    monkeypatch.setattr(resolver, "fetch_weights", fetch)
    assert decision(tmp_path / "hub", quantization="w8a8_int8").value == "w8a8_int8" and fetched


def test_headers_are_not_read_where_the_index_names_plain_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published model of 16-bit weights has a hundred files."""
    config = json.loads((TINY / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}}
    (tmp_path / stream.INDEX).write_text(json.dumps(index))
    monkeypatch.setattr("thalweg.models.catalog.readable_specs", lambda folder: pytest.fail("read"))
    assert read_facts(tmp_path).quantization_config == {}


def specs(stored: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "ct_int8"])
def test_every_other_format_names_its_first_weight(name: str) -> None:
    stored = specs(of_module(matrices(name)[0][0]))
    with pytest.raises(CheckpointError, match=r"^x\.\w+ is torch\.\w+ .* no quantization_config .* add its producer's"):
        config_of_tensors({"model.norm.weight": TensorSpec("model.norm.weight", (8,), torch.bfloat16), **stored})


def int8(**others: Tensor) -> dict[str, TensorSpec]:
    stored = {"weight": torch.zeros(64, 32, dtype=torch.int8), "weight_scale": torch.ones(64, 1)} | others
    return specs(of_module(stored))


def test_only_int8_rows_are_unambiguous() -> None:
    assert config_of_tensors(int8(weight_scale=torch.ones(64).bfloat16(), bias=torch.ones(64)))
    assert config_of_tensors(specs({"x.weight": torch.zeros(4, 4)})) == {}
    for other in (
        int8(weight_scale=torch.ones(64, 2)),  # groups of columns
        int8(weight_scale=torch.ones(1)),
        int8(weight_scale=torch.ones(64, 1, dtype=torch.uint8)),
        int8(weight=torch.zeros(64, 32, dtype=torch.uint8)),
        int8(weight_zero_point=torch.zeros(64, 1, dtype=torch.int8)),
        int8(input_scale=torch.ones(1)),  # static activations
        int8() | specs({"y.weight": torch.zeros(64, 32, dtype=torch.int8)}),  # one of them lacks its scale
        int8() | specs({"y.qweight": torch.zeros(4, 32, dtype=torch.int32)}),
    ):
        with pytest.raises(CheckpointError, match="no quantization_config"):
            config_of_tensors(other)


def test_packed_nibbles_in_int8_are_refused_by_their_shape() -> None:
    """Two 4-bit codes in a byte look like INT8, and have half the columns."""
    stored = of_module({"weight": torch.ones(64, 32, dtype=torch.int8), "weight_scale": torch.ones(64, 1)})
    with pytest.raises(CheckpointError, match=r"x\.weight: shape \(64, 32\) does not fit"):
        check_loads(config_of_tensors(specs(stored)), stored, (64, 64))


def test_an_unstated_format_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    """The bundled model is FP8."""
    folder = without_config(TINY, tmp_path / "fp8")
    message = r"torch\.float8_e4m3fn .*, and config\.json has no quantization_config that says how it is scaled"
    for options in ({}, {"quantization": "fp8"}):
        with pytest.raises(CheckpointError, match=message):
            decision(folder, **options)


def test_a_plain_model_stays_plain(tmp_path: Path) -> None:
    folder = without_config(TINY, tmp_path / "plain")
    stored = load_file(folder / "model.safetensors")
    plain = {name: t.bfloat16() for name, t in stored.items() if not name.endswith("weight_scale_inv")}
    save_file(plain, folder / "model.safetensors")
    assert decision(folder).value == "none"
    with pytest.raises(UnsupportedConfig, match=r"w8a8_int8 was asked for, and .* says none"):
        decision(folder, quantization="w8a8_int8")
