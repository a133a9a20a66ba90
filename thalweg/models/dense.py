"""Decoders with grouped-query attention: Llama 3, Qwen2 and Qwen2.5, Qwen3, Qwen3-MoE.

They differ in biases, in norms of queries and keys, and in whether a layer's MLP is a mixture of experts.
"""

from __future__ import annotations

from functools import partial

from thalweg.attention.context import WorkspaceNeed
from thalweg.attention.selection import SelectedContexts
from thalweg.config.model import ModelFacts
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import ForwardMetadata, Norm, ResidualStream
from thalweg.layers.module import Module
from thalweg.memory.planes import PlaneSpec
from thalweg.parallel.axis import share_of


class DenseLayer(Module):
    """x += attention(norm x); x += mlp(norm x)."""

    def __init__(
        self,
        facts: ModelFacts,
        layer: int,
        factory: LayerFactory,
        *,
        qk_norm: bool = False,
        name: str = "",
        attention_norm: Norm | None = None,
    ) -> None:
        """qk_norm: every query and key head is normed. name: the published one, if it does not follow from the number.
        attention_norm: in place of a published one.
        """
        super().__init__()
        name = name or f"model.layers.{layer}"
        self.facts, self.number, self.factory = facts, layer, factory
        self.attention_norm = attention_norm or factory.norm(f"{name}.input_layernorm", facts.hidden, facts.norm_eps)
        self.attention = factory.gqa(facts, layer, f"{name}.self_attn", qk_norm)
        self.mlp_norm = factory.norm(f"{name}.post_attention_layernorm", facts.hidden, facts.norm_eps)
        self.mlp = factory.feed_forward(facts, layer, f"{name}.mlp", facts.mlp_bias)

    def forward(self, h: ResidualStream, metadata: ForwardMetadata, selections: SelectedContexts) -> SelectedContexts:
        self.attention.add_to(h, h.normed(self.attention_norm), metadata)
        self.mlp.add_to(h, h.normed(self.mlp_norm), metadata.batch.real_T)
        return selections

    def planes(self) -> tuple[PlaneSpec, ...]:
        return dense_planes(self.facts, self.number, self.factory)


QwenNormedLayer = partial(DenseLayer, qk_norm=True)


def dense_planes(facts: ModelFacts, layer: int, factory: LayerFactory) -> tuple[PlaneSpec, ...]:
    """Keys and values of one layer of grouped-query attention."""
    width = len(share_of(facts.kv_heads, factory.layout.tp, "key heads", may_repeat=True)) * facts.head_dim
    return tuple(factory.plane(name, layer, width, shard="heads") for name in ("key", "value"))


def workspace(facts: ModelFacts) -> WorkspaceNeed:
    """Scores of all heads for each pair."""
    return WorkspaceNeed(per_pair=facts.heads)
