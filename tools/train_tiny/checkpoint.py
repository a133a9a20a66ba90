"""Between the training model and the published layout: FP8 blocks, per-expert names, the NextN layer as one layer
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tools.train_tiny.model import MLP, DecoderLayer, Linear, MoE, TinyModel, block_scale, spread_scale
from tools.train_tiny.shape import Shape, save_config

WEIGHTS = "model.safetensors"

# Where a parameter lives in the training model, and its published name below the layer.
_PLAIN = {"indexer.weights_proj.weight", "indexer.k_norm.weight", "indexer.k_norm.bias"}


def published_parameters(model: TinyModel) -> Iterator[tuple[str, Tensor, bool]]:
    """Every published tensor: its name, the part of the training model's memory it is, and whether it is stored as FP8.

    The NextN layer repeats the embedding and the head, as DeepSeek's checkpoints do; here they are the same memory.
    """
    yield "model.embed_tokens.weight", model.embed_tokens.weight, False
    yield "model.norm.weight", model.norm.weight, False
    yield "lm_head.weight", model.lm_head.weight, False
    for number, layer in enumerate((*model.layers, model.nextn)):
        assert isinstance(layer, DecoderLayer)
        yield from _layer(f"model.layers.{number}", layer)
    draft, nextn = f"model.layers.{len(model.layers)}", model.nextn
    yield f"{draft}.embed_tokens.weight", model.embed_tokens.weight, False
    yield f"{draft}.enorm.weight", nextn.enorm.weight, False
    yield f"{draft}.hnorm.weight", nextn.hnorm.weight, False
    yield f"{draft}.eh_proj.weight", nextn.eh_proj.weight, False
    yield f"{draft}.shared_head.norm.weight", nextn.shared_norm.weight, False
    yield f"{draft}.shared_head.head.weight", model.lm_head.weight, False


def _layer(prefix: str, layer: DecoderLayer) -> Iterator[tuple[str, Tensor, bool]]:
    yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight, False
    yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight, False
    for name, module in layer.self_attn.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.self_attn.{name}.{kind}", parameter, isinstance(module, Linear)
    if isinstance(layer.mlp, MoE):
        yield from _experts(f"{prefix}.mlp", layer.mlp)
    else:
        yield from _mlp(f"{prefix}.mlp", layer.mlp, slice(None))


def _experts(prefix: str, moe: MoE) -> Iterator[tuple[str, Tensor, bool]]:
    yield f"{prefix}.gate.weight", moe.gate.weight, False
    yield f"{prefix}.gate.e_score_correction_bias", moe.get_buffer("e_score_correction_bias"), False
    width = moe.shape.moe_intermediate_size
    for expert in range(moe.shape.n_routed_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", moe.experts, slice(expert * width, (expert + 1) * width))
    yield from _mlp(f"{prefix}.shared_experts", moe.shared_experts, slice(None))


def _mlp(prefix: str, mlp: MLP, channels: slice) -> Iterator[tuple[str, Tensor, bool]]:
    yield f"{prefix}.gate_proj.weight", mlp.gate_proj.weight[channels], True
    yield f"{prefix}.up_proj.weight", mlp.up_proj.weight[channels], True
    yield f"{prefix}.down_proj.weight", mlp.down_proj.weight[:, channels], True


@torch.no_grad()
def save_model(model: TinyModel, folder: Path) -> None:
    """Write weights and configuration (not the tokenizer) as DeepSeek publishes them."""
    tensors: dict[str, Tensor] = {}
    for name, part, is_fp8 in published_parameters(model):
        if is_fp8:
            scale = block_scale(part)
            tensors[name] = (part.float() / spread_scale(scale, part.shape)).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = part.float()
        else:
            tensors[name] = part.to(torch.bfloat16)
    save_file(
        {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    save_config(model.shape, folder)


def dequantized(folder: Path) -> dict[str, Tensor]:
    """Every published tensor of a checkpoint as fp32, FP8 blocks multiplied out."""
    stored = load_file(folder / WEIGHTS)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        tensors[name] = tensor.float()
        if f"{name}_scale_inv" in stored:
            tensors[name] *= spread_scale(stored[f"{name}_scale_inv"], tensor.shape)
    return tensors


@torch.no_grad()
def load_model(folder: Path, shape: Shape) -> TinyModel:
    """The training model with a checkpoint's weights, in fp32.

    Raises:
        KeyError: the checkpoint lacks a tensor.
        ValueError: it has one that the shape does not know.
    """
    tensors, model = dequantized(folder), TinyModel(shape)
    for name, part, _ in published_parameters(model):
        part.copy_(tensors.pop(name))
    if tensors:
        raise ValueError(f"tensors the model does not know: {sorted(tensors)[:5]}")
    return model


def parameter_count(model: nn.Module) -> int:
    """Number of trained values."""
    return sum(parameter.numel() for parameter in model.parameters())
