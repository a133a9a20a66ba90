"""DeepSeek V2, V2-Lite, V3, R1, V3.1, V3.2, and what is built alike: Kimi-K2, GLM-5. They differ in facts only:
with or without a query latent, an indexer (DSA), routing method, rotary scaling.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from thalweg.attention.context import Step, Work
from thalweg.attention.selection import Choices
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.layers.part import Part
from thalweg.layers.parts import Parts
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models import tables
from thalweg.models.base import Streams
from thalweg.weights.table import Table


class DeepseekLayer(Part):
    """x += attention(norm x); x += mlp(norm x), the MLP dense in the first layers and a mixture of experts in the others."""

    def __init__(self, facts: ModelFacts, layer: int, indexed: bool, parts: Parts) -> None:
        super().__init__()
        self.attention_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.attention = parts.mla(facts, layer, indexed)
        self.mlp_norm = parts.norm(facts.hidden, facts.norm_eps)
        if facts.moe is not None and facts.moe.in_layer(layer):
            self.mlp = parts.moe(facts.moe, facts.hidden)
        else:
            self.mlp = parts.mlp(facts.hidden, facts.intermediate)

    def forward(self, h_TH: Tensor, step: Step, earlier: Choices) -> Choices:
        """Edits h in place; returns the choice of context that later layers may share."""
        choices = self.attention.add_(h_TH, self.attention_norm.before(h_TH), step, earlier)
        self.mlp.add_(h_TH, self.mlp_norm.before(h_TH), step.batch.real_T)
        return choices


class Deepseek(Part):
    """DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM."""

    def __init__(self, facts: ModelFacts, parts: Parts) -> None:
        super().__init__()
        if facts.mla is None:
            raise CheckpointError(
                f"config.json: kv_lora_rank is missing, and {facts.architecture} has latent attention"
            )
        self.facts, self.parts, self.watched = facts, parts, tuple[int, ...]()
        self.embedding = parts.embedding(facts.vocab, facts.hidden)
        self.layers = nn.ModuleList(
            DeepseekLayer(facts, layer, indexed(facts, layer), parts) for layer in range(facts.layers)
        )
        self.norm = parts.norm(facts.hidden, facts.norm_eps)
        self.head = self.embedding if facts.tied else parts.embedding(facts.vocab, facts.hidden)
        self.steps = parts.steps(facts, work(facts))

    def watch(self, layers: Sequence[int]) -> None:
        self.watched = tuple(layers)

    def planes(self) -> tuple[PlaneSpec, ...]:
        return tuple(spec for layer in range(self.facts.layers) for spec in layer_planes(self.facts, layer, self.parts))

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        step = self.steps.step(batch, planes)
        h_TH = self.embedding.forward(batch.ids_T)
        choices: Choices = (None,) * len(step.spans)
        streams = Streams(self.watched)
        for index, layer in enumerate(self.layers):
            streams.enter(index, h_TH)
            choices = layer(h_TH, step, choices)
        streams.enter(len(self.layers), h_TH)
        return streams.behind(self.norm.forward(h_TH))

    def logits(self, hidden_NX: Tensor) -> Tensor:
        return self.head.logits(hidden_NX[:, : self.facts.hidden])

    def table(self) -> Table:
        facts, table = self.facts, tables.outside(self.facts)
        for layer in range(facts.layers):
            layer_table(table, facts, layer, indexed(facts, layer), self.parts)
        table.skips += [rf"model\.layers\.{facts.layers + depth}\..*" for depth in range(facts.nextn)]
        return table


def indexed(facts: ModelFacts, layer: int) -> bool:
    """Whether this layer has its own indexer; NextN layers, beyond the main ones, have when any layer has."""
    return facts.indexer is not None and (layer >= facts.layers or facts.indexer.full[layer])


def layer_planes(facts: ModelFacts, layer: int, parts: Parts) -> tuple[PlaneSpec, ...]:
    """What attention reads; the index key where the layer has an indexer."""
    attended = parts.mla_planes(facts, layer)
    if facts.indexer is None or not indexed(facts, layer):
        return attended
    return *attended, parts.plane("index", layer, facts.indexer.dim)


def work(facts: ModelFacts) -> Work:
    """Scores of all heads for each pair; for each query token the latents of its choice."""
    assert facts.mla is not None
    if facts.indexer is None:
        return Work(pair=facts.heads)
    chosen = facts.indexer.topk * (facts.mla.kv_lora + facts.mla.rope)
    return Work(pair=max(facts.heads, facts.indexer.heads), token=chosen)


def layer_table(
    table: Table, facts: ModelFacts, layer: int, own_indexer: bool, parts: Parts, into: str = "layers.{}"
) -> None:
    """The published tensors of one decoder layer."""
    tables.norms(table, layer, into)
    tables.mla(table, facts, layer, own_indexer, into, parts.own_index)
    if facts.moe is not None and facts.moe.in_layer(layer):
        tables.moe(table, facts.moe, layer, into, parts.stacked_shared)
    else:
        tables.mlp(table, f"model.layers.{layer}.mlp", f"{into.format(layer)}.mlp", facts.intermediate)
