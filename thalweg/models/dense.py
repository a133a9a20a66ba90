"""Decoders with grouped-query attention: Llama 3, Qwen2 and Qwen2.5, Qwen3, Qwen3-MoE.

They differ in biases, in norms of queries and keys, and in whether a layer's MLP is a mixture of experts.
"""

from __future__ import annotations

from functools import partial

from thalweg.attention.context import WorkspaceNeed
from thalweg.attention.selection import SelectedContexts
from thalweg.config.model import ModelFacts
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import ForwardMetadata
from thalweg.layers.module import Module
from thalweg.layers.residual import ResidualStream
from thalweg.memory.planes import PlaneSpec
from thalweg.parallel.axis import share_of


class DenseLayer(Module):
    """x += attention(norm x); x += mlp(norm x)."""

    def __init__(self, facts: ModelFacts, layer: int, factory: LayerFactory, *, qk_norm: bool = False) -> None:
        """qk_norm: every query and key head is normed."""
        super().__init__()
        name = f"model.layers.{layer}"
        self.facts, self.number, self.factory = facts, layer, factory
        self.attention_norm = factory.norm(f"{name}.input_layernorm", facts.hidden, facts.norm_eps)
        self.attention = factory.gqa(facts, layer, f"{name}.self_attn", qk_norm=qk_norm, out_bias=facts.attention_bias)
        self.mlp_norm = factory.norm(f"{name}.post_attention_layernorm", facts.hidden, facts.norm_eps)
        if facts.moe is not None and facts.moe.in_layer(layer):
            self.mlp = factory.moe(f"{name}.mlp", facts.moe, facts.hidden)
        else:
            self.mlp = factory.mlp(f"{name}.mlp", facts.hidden, facts.intermediate, facts.mlp_bias)

    def forward(self, h: ResidualStream, metadata: ForwardMetadata, selections: SelectedContexts) -> SelectedContexts:
        self.attention.add_to(h, h.normed(self.attention_norm), metadata)
        self.mlp.add_to(h, h.normed(self.mlp_norm), metadata.batch.real_T)
        return selections

    def planes(self) -> tuple[PlaneSpec, ...]:
        return dense_planes(self.facts, self.number, self.factory)


QwenNormedLayer = partial(DenseLayer, qk_norm=True)


def dense_planes(facts: ModelFacts, layer: int, factory: LayerFactory) -> tuple[PlaneSpec, ...]:
    """Keys and values of one layer of grouped-query attention."""
    width = len(share_of(facts.kv_heads, factory.layout.tp, "key heads")) * facts.head_dim
    return tuple(factory.plane(name, layer, width, shard="heads") for name in ("key", "value"))


def workspace(facts: ModelFacts) -> WorkspaceNeed:
    """Scores of all heads for each pair."""
    return WorkspaceNeed(per_pair=facts.heads)
