"""DeepSeek V2, V2-Lite, V3, R1, V3.1, V3.2, and what is built alike: Kimi-K2, GLM-5.

They differ in facts only: with or without a query latent, an indexer (DSA), routing method, rotary scaling.
"""

from __future__ import annotations

from thalweg.attention.context import WorkspaceNeed
from thalweg.attention.selection import SelectedContexts
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import ForwardMetadata, ResidualStream
from thalweg.layers.module import Module
from thalweg.memory.planes import PlaneSpec


class DeepseekLayer(Module):
    """x += attention(norm x); x += mlp(norm x), the MLP dense in the first layers and a mixture of experts in the
    others.
    """

    def __init__(self, facts: ModelFacts, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        if facts.mla is None:
            raise CheckpointError(
                f"config.json: kv_lora_rank is missing, and {facts.architecture} has latent attention"
            )
        name = f"model.layers.{layer}"
        self.facts, self.number, self.factory, self.is_indexed = facts, layer, factory, has_indexer(facts, layer)
        self.attention_norm = factory.norm(f"{name}.input_layernorm", facts.hidden, facts.norm_eps)
        self.attention = factory.mla(facts, layer, f"{name}.self_attn", self.is_indexed)
        self.mlp_norm = factory.norm(f"{name}.post_attention_layernorm", facts.hidden, facts.norm_eps)
        self.mlp = factory.feed_forward(facts, layer, f"{name}.mlp")

    def forward(self, h: ResidualStream, metadata: ForwardMetadata, selections: SelectedContexts) -> SelectedContexts:
        selections = self.attention.add_to(h, h.normed(self.attention_norm), metadata, selections)
        self.mlp.add_to(h, h.normed(self.mlp_norm), metadata.batch.real_T)
        return selections

    def planes(self) -> tuple[PlaneSpec, ...]:
        """Cache tensors of the attention, with the index key where the layer has an indexer."""
        attended = self.factory.mla_planes(self.facts, self.number)
        if self.facts.indexer is None or not self.is_indexed:
            return attended
        return *attended, self.factory.plane("index", self.number, self.facts.indexer.dim)


def has_indexer(facts: ModelFacts, layer: int) -> bool:
    """Whether this layer has its own indexer; NextN layers, behind the main ones, have when any layer has."""
    return facts.indexer is not None and (layer >= facts.layers or facts.indexer.full[layer])


def workspace(facts: ModelFacts) -> WorkspaceNeed:
    """Scores of all heads for each pair; for each query token the latents of its selection."""
    if facts.indexer is None or facts.mla is None:
        return WorkspaceNeed(per_pair=facts.heads)
    selected = facts.indexer.topk * (facts.mla.kv_lora + facts.mla.rope)
    return WorkspaceNeed(per_pair=max(facts.heads, facts.indexer.heads), per_token=selected)
