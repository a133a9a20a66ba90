"""EAGLE heads with random weights in the published formats, and the published formulas in plain PyTorch: one function
of the whole sequence, without a cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

EPS = 1e-5


def config(target: dict[str, Any], third: bool, **fields: Any) -> dict[str, Any]:
    """The config.json of a head for this target, with dims unlike the target's where the format lets them be."""
    made: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,  # less than the target's, as it often is
        "rms_norm_eps": EPS,
        "rope_theta": 5000.0,
        "hidden_act": "silu",
    }
    return made | ({"draft_vocab_size": target["vocab_size"] // 2} if third else {}) | fields


def tensors(given: dict[str, Any], target_hidden: int, third: bool, seed: int = 0) -> dict[str, Tensor]:
    """Random ones by their published names."""
    hidden, heads, kv, dim = (
        given[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    inner, vocab = given["intermediate_size"], given.get("draft_vocab_size", given["vocab_size"])
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(given["num_hidden_layers"]):
        there, wide = ("midlayer", 2 * hidden) if third else (f"layers.{i}", hidden)
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            shapes[f"{there}.self_attn.{name}_proj.weight"] = (rows * dim, wide)
            if given.get("qkv_bias"):
                shapes[f"{there}.self_attn.{name}_proj.bias"] = (rows * dim,)
        shapes[f"{there}.self_attn.o_proj.weight"] = (hidden, heads * dim)
        shapes |= {f"{there}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{there}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{there}.post_attention_layernorm.weight"] = (hidden,)
        if third or i:
            shapes[f"{there}.input_layernorm.weight"] = (hidden,)
    if third:
        shapes |= {
            "midlayer.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
        }
        shapes["fc.weight"] = (hidden, 3 * target_hidden)
    else:
        shapes |= {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    generator, made = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and "bias" not in name
        made[name] = noise * 0.2 + 1 if norm else noise * shape[-1] ** -0.5
    if third and vocab < given["vocab_size"]:
        ids = torch.randperm(given["vocab_size"], generator=generator)[:vocab].sort().values
        made["d2t"] = ids - torch.arange(vocab)
        made["t2d"] = torch.zeros(given["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return made


def publish(folder: Path, given: dict[str, Any], made: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(given))
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, folder / "model.safetensors")
    return folder


class Reference:
    """`step` is one pass over all entries: the states behind them. Entry i is made of token i and of the state of
    position i - 1.
    """

    def __init__(self, given: dict[str, Any], made: dict[str, Tensor], embedding: Tensor, head: Tensor) -> None:
        """embedding, head: the target's."""
        self.given, self.made, self.embedding, self.head = given, made, embedding, head
        self.third = "norm.weight" in made

    def learned(self, streams: Tensor) -> Tensor:
        """Of the streams side by side, or of the final hidden states."""
        return streams @ self.made["fc.weight"].T if self.third else streams

    def step(self, ids: Tensor, states: Tensor) -> Tensor:
        if self.third:
            e = _norm(self.embedding[ids], self.made["midlayer.input_layernorm.weight"])
            x = torch.cat([e, _norm(states, self.made["midlayer.hidden_norm.weight"])], -1)
            return self._mlp("midlayer", states + self._attention("midlayer", x))
        h = torch.cat([self.embedding[ids], states], -1) @ self.made["fc.weight"].T + self.made["fc.bias"]
        for i in range(self.given["num_hidden_layers"]):
            there = f"layers.{i}"
            x = _norm(h, self.made[f"{there}.input_layernorm.weight"]) if i else h
            h = self._mlp(there, h + self._attention(there, x))
        return h

    def logits(self, states: Tensor) -> Tensor:
        """Over the target's vocabulary; -inf where nothing is drafted."""
        if not self.third:
            return states @ self.head.T
        few = _norm(states, self.made["norm.weight"]) @ self.made["lm_head.weight"].T
        if "d2t" not in self.made:
            return few
        found = torch.full((len(states), self.given["vocab_size"]), -torch.inf)
        for i, shift in enumerate(self.made["d2t"].tolist()):
            found[:, i + shift] = few[:, i]
        return found

    def chain(self, ids: list[int], before: Tensor, count: int) -> tuple[list[int], float]:
        """Greedy drafts behind these tokens, and how close two candidates came. before: of each token the state of the
        position before it.
        """
        close, drafts = float("inf"), list[int]()
        states = before
        for _ in range(count):
            after = self.step(torch.tensor([*ids, *drafts]), states)
            best = self.logits(after[-1:])[0].topk(2)
            close = min(close, float(best.values[0] - best.values[1]))
            drafts.append(int(best.indices[0]))
            states = torch.cat([states, after[-1:]])
        return drafts, close

    def _attention(self, there: str, x: Tensor) -> Tensor:
        given, length = self.given, len(x)
        dim = given["head_dim"]
        q, k, v = (
            (x @ self.made[f"{there}.self_attn.{name}_proj.weight"].T + self._bias(there, name))
            .view(length, -1, dim)
            .transpose(0, 1)
            for name in "qkv"
        )
        angles = torch.outer(torch.arange(length).float(), given["rope_theta"] ** (-torch.arange(0, dim, 2) / dim))
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))

        def rotated(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat([-b, a], -1) * sin

        group = given["num_attention_heads"] // given["num_key_value_heads"]
        k, v = rotated(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = rotated(q) @ k.transpose(1, 2) * dim**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        return out @ self.made[f"{there}.self_attn.o_proj.weight"].T

    def _bias(self, there: str, name: str) -> Tensor:
        return self.made.get(f"{there}.self_attn.{name}_proj.bias", torch.zeros(()))

    def _mlp(self, there: str, h: Tensor) -> Tensor:
        x = _norm(h, self.made[f"{there}.post_attention_layernorm.weight"])
        gate, up, down = (self.made[f"{there}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return h + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
