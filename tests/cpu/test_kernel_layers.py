"""Published files load into the layers of the GPU kernels, on a CPU: memory holds what the files say, in the files' own
schemes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cpu import zoo
from thalweg.bench.make_checkpoint import main as make_checkpoint
from thalweg.config.backends import DECODE
from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.fp8_block.ref import quantize
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.layers.mla import Mla
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.quant.fp8_block import Fp8Block
from thalweg.quant.scheme import Quantized
from thalweg.weights.loader import load
from thalweg.weights.random import load_random
from thalweg.weights.stream import Safetensors, schemes_in
from thalweg.weights.table import WeightRule, WeightTable

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WIDE = {  # whole blocks, so that weights can stay FP8
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "quantization_config": FP8,
}  # fmt: skip
SPARSE = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 16}


def written(folder: Path, family: str, **fields: Any) -> Path:
    """What make-checkpoint makes of a random shape of the family."""
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(zoo.draw_config(family, 4) | fields))
    assert make_checkpoint([str(folder / "shape"), str(folder / "out")]) == 0
    return folder / "out"


def dequantized(folder: Path) -> dict[str, Tensor]:
    """The published numbers, each FP8 weight times its scales, computed here."""
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    plain = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor
    return plain


def held(parameters: dict[str, Tensor], table: WeightTable) -> dict[str, list[tuple[Tensor, WeightRule, bool]]]:
    """By published name: a slice of a parameter as numbers, its rule, and whether memory holds it quantized."""
    found: dict[str, list[Any]] = {}
    for rule in table.rules:
        whole = parameters[rule.target]
        if isinstance(rule.held, Quantized):
            scale = parameters[f"{rule.target}_scale"].repeat_interleave(128, -2).repeat_interleave(128, -1)
            whole = whole.float() * scale[..., : whole.shape[-2], : whole.shape[-1]]
        value = whole[rule.into] if rule.into else whole
        found.setdefault(rule.source.name, []).append((value, rule, rule.held is not None))
    return found


def check(folder: Path, *, nextn: bool, latent: bool = True) -> dict[str, bool]:
    """Loads the folder and compares every slice. Returns which published weights memory holds quantized."""
    facts, published = read_facts(folder), dequantized(folder)
    by = "torch" if facts.indexer is not None else "triton"
    kernels = KernelConfig(decode=by, prefill=by, latent=latent)
    layers = KernelLayers(
        torch.bfloat16, torch.device("cpu"), kernels, schemes=schemes_in(folder, facts.quantization_config)
    )
    model = catalog.assemble(facts, layers)
    modules: list[Any] = [model, catalog.build_nextn(model)] if nextn else [model]
    quantized: dict[str, bool] = {}
    with Safetensors(folder) as stream:
        for module in modules:
            load(module, module.table(), stream, facts.quantization_config)
    for module in modules:
        for name, slices in held(dict(module.named_parameters()), module.table()).items():
            for value, rule, is_quantized in slices:
                taken = published[name][rule.take] if rule.take else published[name]
                want = rule.transform(taken).to(torch.float32 if is_quantized else value.dtype)
                assert torch.equal(value, want.to(value.dtype)), name
                quantized[name] = is_quantized
    return quantized


@pytest.mark.parametrize("family", list(zoo.FAMILIES))
def test_every_family_loads_as_it_is_published(family: str, tmp_path: Path) -> None:
    folder = written(tmp_path, family)
    assert not any(check(folder, nextn=read_facts(folder).nextn > 0).values())


@pytest.mark.parametrize("family", ["v2", "v2-lite", "v3", "kimi-k2", "v32", "glm-5"])
def test_fp8_checkpoints_stay_fp8(family: str, tmp_path: Path) -> None:
    sparse = SPARSE if family in ("v32", "glm-5") else {}
    lora = {"q_lora_rank": None} if family == "v2-lite" else {}
    folder = written(tmp_path, family, **WIDE | sparse | lora)
    facts = read_facts(folder)
    quantized = check(folder, nextn=facts.nextn > 0)
    layer = f"model.layers.{facts.layers - 1}"
    assert quantized[f"{layer}.self_attn.o_proj.weight"] and quantized[f"{layer}.mlp.experts.0.down_proj.weight"]
    assert quantized[f"{layer}.mlp.shared_experts.up_proj.weight"]
    assert not quantized[f"{layer}.self_attn.kv_b_proj.weight"]  # multiplied into queries and outputs, in bf16
    if family == "v32":  # rows of V3.2's indexer are reordered, which blocks do not allow
        assert not quantized[f"{layer}.self_attn.indexer.wq_b.weight"]
    if facts.nextn:
        behind = f"model.layers.{facts.layers}"
        assert not quantized[f"{behind}.eh_proj.weight"]  # published in bf16
        assert quantized[f"{behind}.mlp.experts.1.up_proj.weight"]


def repacked(folder: Path, plain: Callable[[str], bool]) -> None:
    """Stores the weights that `plain` names in bf16."""
    for path in folder.glob("*.safetensors"):
        stored, changed = load_file(path), dict[str, Tensor]()
        for name, tensor in stored.items():
            weight = name.removesuffix("_scale_inv")
            if stored[weight].dtype != torch.float8_e4m3fn or not plain(weight):
                changed[name] = tensor
            elif weight == name:
                changed[name] = dequantized(folder)[name].bfloat16()
        save_file(changed, path)


def test_a_whole_nextn_layer_in_bf16(tmp_path: Path) -> None:
    folder = written(tmp_path, "v3", **WIDE)
    facts = read_facts(folder)
    repacked(folder, lambda name: name.startswith(f"model.layers.{facts.layers}."))
    quantized = check(folder, nextn=True)
    assert quantized["model.layers.1.self_attn.o_proj.weight"]
    assert not any(value for name, value in quantized.items() if name.startswith(f"model.layers.{facts.layers}."))


@pytest.mark.parametrize(
    ("excluded", "plain"),
    [
        ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
        ("model.layers.1.mlp.shared_experts", "model.layers.1.mlp.shared_experts"),
        ("model.layers.1.mlp.experts.3", "model.layers.1.mlp.experts"),  # one expert keeps its stack from staying FP8
        ("q_a_proj", "model.layers.1.self_attn.q_a_proj"),
    ],
)
def test_modules_to_not_convert(excluded: str, plain: str, tmp_path: Path) -> None:
    """Named by config.json for what is invented; read off the files for what is loaded. Packed neighbours stay FP8."""
    config = FP8 | {"modules_to_not_convert": [excluded]}
    folder = written(tmp_path, "v3", **WIDE | {"quantization_config": config})
    quantized = check(folder, nextn=False)
    assert not any(value for name, value in quantized.items() if name.startswith(plain))
    assert (
        quantized["model.layers.1.self_attn.q_b_proj.weight"]
        and quantized["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    )
    assert quantized["model.layers.0.mlp.up_proj.weight"]


def test_layers_that_share_a_selection_ignore_their_published_indexers(tmp_path: Path) -> None:
    """IndexCache on a V3.2 checkpoint, whose every layer has an indexer."""
    folder = written(tmp_path, "v32", **WIDE, **SPARSE, num_hidden_layers=4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"index_topk_freq": 2}))
    facts = read_facts(folder)
    assert facts.indexer is not None and facts.indexer.full == (True, True, False, True)
    quantized = check(folder, nextn=True)
    assert "model.layers.1.self_attn.indexer.wk.weight" in quantized
    assert "model.layers.2.self_attn.indexer.wk.weight" not in quantized
    zoo.ours(folder)  # the reference's layers, too


def test_a_scheme_that_holds_reordered_rows_as_they_are_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading puts the rows of V3.2's indexer in another order, which stored codes would lose."""
    folder = written(tmp_path, "v32", **WIDE | SPARSE)
    facts, holds = read_facts(folder), Fp8Block.holds
    monkeypatch.setattr(Fp8Block, "holds", lambda self, take, shape, is_reordered: holds(self, take, shape, False))
    kernels = KernelConfig(decode="torch", prefill="torch")
    layers = KernelLayers(
        torch.bfloat16, torch.device("cpu"), kernels, schemes=schemes_in(folder, facts.quantization_config)
    )
    model = catalog.assemble(facts, layers)
    with Safetensors(folder) as stream, pytest.raises(CheckpointError, match="rows in another order"):
        load(model, model.table(), stream, facts.quantization_config)


def test_blocks_of_another_size_are_dequantized(tmp_path: Path) -> None:
    folder = written(tmp_path, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    small = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": small}))
    name = "model.layers.0.mlp.down_proj.weight"
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        stored[name], stored[f"{name}_scale_inv"] = quantize(stored[name].float(), (64, 64), False)
        save_file(stored, path)
    facts = read_facts(folder)
    kernels = KernelConfig(decode="triton", prefill="triton")
    layers = KernelLayers(
        torch.bfloat16, torch.device("cpu"), kernels, schemes=schemes_in(folder, facts.quantization_config)
    )
    model = catalog.assemble(facts, layers)
    with Safetensors(folder) as stream:
        load(model, model.table(), stream, facts.quantization_config)
    assert any(name in note and "dequantized" in note for note in layers.notes)
    assert dict(model.named_parameters())["layers.0.mlp.down.weight"].dtype == torch.bfloat16


def test_a_format_that_is_not_supported_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "aqlm", "bits": 4}})
    )
    with pytest.raises(CheckpointError, match=r"'aqlm' is not supported; there is fp8"):
        read_facts(folder)


def test_random_weights_are_those_of_a_written_checkpoint(tmp_path: Path) -> None:
    """`--load-format dummy` and `make-checkpoint` invent the same numbers, so any layout holds equal weights."""
    folder = written(tmp_path, "v3", **WIDE)
    facts = read_facts(folder)
    kernels = KernelConfig(decode="triton", prefill="triton")
    layers = KernelLayers(
        torch.bfloat16, torch.device("cpu"), kernels, schemes=schemes_in(folder, facts.quantization_config)
    )
    files, invented = catalog.assemble(facts, layers), catalog.assemble(facts, layers)
    with Safetensors(folder) as stream:
        load(files, files.table(), stream, facts.quantization_config)
    load_random(invented, invented.table(), facts.quantization_config, 0, facts.tied)
    for (name, a), b in zip(files.named_parameters(), invented.parameters(), strict=True):
        assert torch.equal(a.float(), b.float()), name


def test_a_row_of_the_catalog_may_name_a_layer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sparse attention is one file and one row."""
    row = DECODE["torch"]
    monkeypatch.setitem(DECODE, "another", replace(row, mla_layer="layers.mla:Mla"))
    facts = read_facts(written(tmp_path, "v32", **WIDE | SPARSE))
    layers = KernelLayers(torch.bfloat16, torch.device("cpu"), KernelConfig(decode="another", prefill="another"))
    assert {type(layer.attention) for layer in catalog.assemble(facts, layers).layers} == {Mla}
