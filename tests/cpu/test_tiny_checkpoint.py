"""The bundled checkpoint: published layout, FP8 blocks, tokenizer, and a model that does its tasks.

transformers' `deepseek_v32` is the independent reference; it gets the same weights, dequantized to float32.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from thalweg.bench.tasks import RECALL_DISTANCE, Item, make_items, score
from tools.train_tiny.checkpoint import dequantized, load_model
from tools.train_tiny.data import prompt_of
from tools.train_tiny.model import TinyModel
from tools.train_tiny.shape import read_shape

FOLDER = Path(__file__).parents[2] / "models" / "tiny"
SHAPE = read_shape(FOLDER)
UNQUANTIZED = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "eh_proj", "weights_proj", "shared_head")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


@pytest.fixture(scope="module")
def reference(config: dict[str, Any]) -> DeepseekV32ForCausalLM:
    """transformers' model with the dequantized weights; it has no NextN layer and keeps experts stacked."""
    fields = {name: value for name, value in config.items() if name not in ("quantization_config", "torch_dtype")}
    hf_config = DeepseekV32Config(**fields)
    hf_config._attn_implementation = "eager"
    model = DeepseekV32ForCausalLM(hf_config).float().eval()
    weights = dequantized(FOLDER)
    layers = config["num_hidden_layers"]
    state = {
        name: w
        for name, w in weights.items()
        if ".experts." not in name and not name.startswith(f"model.layers.{layers}.")
    }
    for layer in range(config["first_k_dense_replace"], layers):
        at = f"model.layers.{layer}.mlp.experts"
        experts = range(config["n_routed_experts"])
        gate_up = [torch.cat([weights[f"{at}.{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in experts]
        state[f"{at}.gate_up_proj"] = torch.stack(gate_up)
        state[f"{at}.down_proj"] = torch.stack([weights[f"{at}.{e}.down_proj.weight"] for e in experts])
    model.load_state_dict(state, strict=True)
    return model


@pytest.fixture(scope="module")
def own() -> TinyModel:
    return load_model(FOLDER, SHAPE).eval()


def ids_of(tokenizer: Tokenizer, item: Item) -> tuple[list[int], list[int]]:
    """Prompt and target, its end token included."""
    target = tokenizer.encode(item.target, add_special_tokens=False).ids
    return tokenizer.encode(prompt_of(item), add_special_tokens=False).ids, [*target, 1]


def expected_names(config: dict[str, Any]) -> set[str]:
    """Published tensor names, written down from the architecture and not from the exporter."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    projections = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "indexer.wq_b", "indexer.wk")
    plain = (
        "q_a_layernorm.weight",
        "kv_a_layernorm.weight",
        "indexer.weights_proj.weight",
        "indexer.k_norm.weight",
        "indexer.k_norm.bias",
    )
    layers = config["num_hidden_layers"]
    for layer in range(layers + config["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}"
        names |= {f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight"}
        names |= {f"{at}.self_attn.{name}" for name in plain}
        matrices = [f"{at}.self_attn.{name}" for name in projections]
        mlps = [f"{at}.mlp"]
        if layer >= config["first_k_dense_replace"]:
            names |= {f"{at}.mlp.gate.weight", f"{at}.mlp.gate.e_score_correction_bias"}
            mlps = [f"{at}.mlp.shared_experts", *(f"{at}.mlp.experts.{e}" for e in range(config["n_routed_experts"]))]
        matrices += [f"{mlp}.{part}_proj" for mlp in mlps for part in ("gate", "up", "down")]
        names |= {f"{matrix}.{kind}" for matrix in matrices for kind in ("weight", "weight_scale_inv")}
    draft = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    return names | {f"model.layers.{layers}.{name}.weight" for name in draft}


def test_folder_is_small_and_complete() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= names
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16 * 10**6


def test_config_has_the_published_fields(config: dict[str, Any]) -> None:
    assert config == SHAPE.published()
    assert config["architectures"] == ["DeepseekV32ForCausalLM"] and config["model_type"] == "deepseek_v32"
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"
    assert config["index_topk"] >= 64 and RECALL_DISTANCE >= 8 * config["index_topk"]
    assert (
        config["n_routed_experts"] >= 16
        and config["num_experts_per_tok"] == 4
        and config["rope_scaling"]["type"] == "yarn"
    )


def test_tensor_names(config: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
    assert set(stored) == expected_names(config)


def test_stored_precisions(stored: dict[str, torch.Tensor]) -> None:
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            weight = stored[name.removesuffix("_scale_inv")]
            assert tensor.dtype == torch.float32
            assert tensor.shape == tuple(math.ceil(side / 128) for side in weight.shape)
            assert torch.equal(tensor, torch.exp2(torch.log2(tensor).round())), f"{name}: not a power of two"
            assert weight.dtype == torch.float8_e4m3fn and bool(weight.float().isfinite().all())
        elif name.endswith("e_score_correction_bias"):
            assert tensor.dtype == torch.float32
        elif f"{name}_scale_inv" not in stored:
            assert tensor.dtype == torch.bfloat16 and any(part in name for part in UNQUANTIZED), name


def test_nextn_repeats_embedding_and_head(config: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
    draft = f"model.layers.{config['num_hidden_layers']}"
    assert torch.equal(stored[f"{draft}.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(stored[f"{draft}.shared_head.head.weight"], stored["lm_head.weight"])


def test_tokenizer(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    for token, number in (("<｜begin▁of▁sentence｜>", 0), ("<｜end▁of▁sentence｜>", 1), ("<｜▁pad▁｜>", 2)):
        assert tokenizer.token_to_id(token) == number
    for token in (
        "<think>",
        "</think>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "｜DSML｜",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁sep｜>",
        "<|EOT|>",
    ):
        assert tokenizer.encode(token, add_special_tokens=False).tokens == [token]
    assert tokenizer.encode("a").ids[0] == 0
    assert tokenizer.encode("1234", add_special_tokens=False).tokens == ["1", "2", "3", "4"]
    text = "Héllo 漢字 😀\n\n  <｜DSML｜function_calls> 42%"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("task", ["sums", "recall", "tools"])
def test_transformers_agrees(
    task: str, reference: DeepseekV32ForCausalLM, own: TinyModel, tokenizer: Tokenizer
) -> None:
    prompt, target = ids_of(tokenizer, make_items(task, "held_out", 1, seed=3)[0])
    tokens = torch.tensor([prompt + target])
    assert tokens.shape[1] > SHAPE.index_topk
    with torch.no_grad():
        expected = reference(input_ids=tokens).logits
        document = torch.zeros_like(tokens)
        got = own.lm_head(own(tokens, own.view(document, "sparse"), draft=False).main_BTC)
        random = own.lm_head(own(tokens, own.view(document, "random"), draft=False).main_BTC)
    scale = float(expected.abs().max())
    assert float((got - expected).abs().max()) <= 1e-4 * scale
    assert (
        float((random - expected).abs().max()) > 1e-2 * scale
    )  # the indexer's choice matters, so the line above tests it


@pytest.mark.parametrize(("task", "items", "least"), [("sums", 12, 11), ("recall", 6, 5), ("tools", 6, 5)])
def test_transformers_solves_held_out_items(
    task: str, items: int, least: int, reference: DeepseekV32ForCausalLM, tokenizer: Tokenizer
) -> None:
    right = 0
    for item in make_items(task, "held_out", items, seed=5):
        prompt, target = ids_of(tokenizer, item)
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([prompt + target])).logits[0]
        written = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        right += score(item, tokenizer.decode(written[:-1], skip_special_tokens=False)) and written == target
    assert right >= least


def test_recall_distance_and_need_of_the_indexer(own: TinyModel, tokenizer: Tokenizer) -> None:
    found = {"sparse": 0, "random": 0}
    items = make_items("recall", "held_out", 12, seed=7)
    for item in items:
        prompt, target = ids_of(tokenizer, item)
        word = tokenizer.encode(f" {item.answer}", add_special_tokens=False).ids
        assert len(word) == 1
        asked = tokenizer.encode(item.target.split()[3].join((" ", "")), add_special_tokens=False).ids
        place = next(i for i in range(len(prompt)) if prompt[i : i + 2] == [*asked, *word])
        assert len(prompt) - place > RECALL_DISTANCE
        tokens = torch.tensor([prompt + target])
        with torch.no_grad():
            for attention in found:
                logits = own.lm_head(own(tokens, own.view(torch.zeros_like(tokens), attention), draft=False).main_BTC)[
                    0
                ]
                found[attention] += int(logits[len(prompt) - 1 + target.index(word[0])].argmax()) == word[0]
    assert found["sparse"] >= 11 and found["random"] <= 4


def test_nextn_drafts_sums(own: TinyModel, tokenizer: Tokenizer) -> None:
    hits = tries = 0
    for item in make_items("sums", "held_out", 8, seed=9):
        prompt, target = ids_of(tokenizer, item)
        tokens = torch.tensor([prompt + target])
        with torch.no_grad():
            hidden = own(tokens, own.view(torch.zeros_like(tokens), "sparse"))
            main, draft = (own.lm_head(part)[0].argmax(-1) for part in (hidden.main_BTC, hidden.draft_BTC))
        rows = slice(len(prompt) - 1, len(prompt) + len(target) - 2)
        hits += int((draft[rows] == main[1:][rows]).sum())
        tries += len(target) - 1
    assert hits / tries >= 0.85
