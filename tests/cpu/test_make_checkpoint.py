"""`thalweg bench make-checkpoint` writes a checkpoint that transformers and Thalweg read alike, with sane numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.cpu import zoo
from tests.cpu.batches import Bench
from thalweg.bench.make_checkpoint import main, published
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.quant.scheme import TensorSpec
from thalweg.weights.index import INDEX
from thalweg.weights.loader import load
from thalweg.weights.random import RandomTensor
from thalweg.weights.stream import Safetensors

FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
}


def shape(folder: Path, family: str, **more: Any) -> Path:
    config = zoo.draw_config(family, 3) | more
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


@pytest.mark.parametrize("family", ["v2-lite", "v3", "v32", "qwen2", "qwen3", "qwen3-moe", "llama"])
def test_transformers_and_we_read_the_same_model(family: str, tmp_path: Path) -> None:
    import transformers

    out = tmp_path / "out"
    assert main([str(shape(tmp_path / "shape", family)), str(out), "--shard-size", "0.00001", "--seed", "5"]) == 0
    assert len(list(out.glob("*.safetensors"))) > 2 and (out / "tokenizer_config.json").is_file()
    config = json.loads((out / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    theirs = kind.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    ids = [(7 * i) % config["vocab_size"] for i in range(30)]
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0]
    got = Bench(zoo.ours(out), 1).step([(0, ids)])[0]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4
    assert torch.isfinite(got).all() and 0.1 < float(want.std()) < 10


def test_names_and_shapes_are_those_that_transformers_publishes(tmp_path: Path) -> None:
    folder = shape(tmp_path / "shape", "v3")
    config = zoo.draw_config("v3", 3)
    zoo.save(zoo.reference(config, 1), config, tmp_path / "theirs")
    want = {name: tuple(one.shape) for name, one in tensors(tmp_path / "theirs").items()}
    assert {one.spec.name: one.spec.shape for one in published(read_facts(folder), nextn=False)} == want


def test_fp8_as_published(tmp_path: Path) -> None:
    folder, out = shape(tmp_path / "shape", "v3", **FP8), tmp_path / "out"
    assert main([str(folder), str(out)]) == 0
    held = tensors(out)
    facts = read_facts(out)
    kinds = {name: one.dtype for name, one in held.items() if name.startswith("model.layers.1.")}
    assert kinds["model.layers.1.mlp.experts.3.up_proj.weight"] == torch.float8_e4m3fn
    assert kinds["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"] == torch.float32
    assert kinds["model.layers.1.mlp.gate.weight"] == torch.bfloat16
    assert kinds["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert kinds["model.layers.1.input_layernorm.weight"] == torch.bfloat16
    main_model = zoo.ours(out)
    weight = dict(main_model.named_parameters())["layers.1.attention.out.weight"]  # type: ignore[attr-defined]
    assert 0.5 < float(weight.std()) * weight.shape[1] ** 0.5 < 2
    nextn = catalog.build_nextn(main_model)
    with Safetensors(out) as stream:
        load(nextn, nextn.table(), stream, facts.quantization_config)
    there = f"model.layers.{facts.layers}"
    assert torch.equal(held[f"{there}.embed_tokens.weight"], held["model.embed_tokens.weight"])
    assert torch.equal(held[f"{there}.shared_head.head.weight"], held["lm_head.weight"])


def test_the_same_seed_gives_the_same_weights_in_any_shards(tmp_path: Path) -> None:
    folder = shape(tmp_path / "shape", "v32")
    assert main([str(folder), str(tmp_path / "a"), "--no-nextn"]) == 0
    assert main([str(folder), str(tmp_path / "b"), "--no-nextn", "--shard-size", "0.00005"]) == 0
    assert main([str(folder), str(tmp_path / "c"), "--no-nextn", "--seed", "1"]) == 0
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    index = json.loads((tmp_path / "b" / INDEX).read_text())
    assert index["weight_map"].keys() == b.keys()
    assert index["metadata"]["total_size"] == sum(one.numel() * one.itemsize for one in b.values())
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert not any(".layers.3." in name or "shared_head" in name for name in a)


def test_any_slice_is_that_of_the_whole() -> None:
    """So ranks that read different slices hold the same weights."""
    cpu, spec = torch.device("cpu"), TensorSpec("x", (300, 260), torch.float32)
    whole = RandomTensor(spec, "x", 0.5, 1.0).slice((), 7, cpu)
    take = (slice(128, 250), slice(64, 200))
    assert torch.equal(RandomTensor(spec, "x", 0.5, 1.0).slice(take, 7, cpu), whole[take])
    assert 0.49 < float(whole.std()) < 0.51 and 0.99 < float(whole.mean()) < 1.01
    other = RandomTensor(spec, "y", 0.5, 1.0).slice((), 7, cpu)
    assert abs(float(torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]))[0, 1])) < 0.02


def test_a_full_folder_or_disk_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shape(tmp_path / "shape", "llama")
    assert main([str(folder), str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "100 B are free" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "out2")]) == 1


def test_all_files_that_a_checkpoint_is_read_by_are_copied(tmp_path: Path) -> None:
    """Of a vocabulary in tiktoken's form, and of a format that ModelOpt's file alone states."""
    folder, names = shape(tmp_path / "shape", "v3"), ("tiktoken.model", "added_tokens.json", "chat.jinja")
    for name in names:
        (folder / name).write_text("{}")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8_PB_WO"}}))
    assert main([str(folder), str(tmp_path / "out")]) == 0
    assert {one.name for one in (tmp_path / "out").iterdir()} >= {*names, "hf_quant_config.json"}
    assert read_facts(tmp_path / "out").quantization_config


def test_scales_that_follow_from_a_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    static = {"quantization_config": {"quant_method": "w4afp8", "activation_scheme": "static"}}
    assert main([str(shape(tmp_path / "shape", "v3", **static)), str(tmp_path / "out")]) == 2
    assert "scales of a calibration" in capsys.readouterr().err and not (tmp_path / "out").exists()
