"""Llama 3: pre-norm decoder, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from thalweg.attention.context import Step, Work
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.layers.part import Part
from thalweg.layers.parts import Parts
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models import tables
from thalweg.models.base import Streams
from thalweg.weights.table import Table


class LlamaLayer(Part):
    def __init__(self, facts: ModelFacts, layer: int, parts: Parts) -> None:
        super().__init__()
        self.attention_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.attention = parts.gqa(facts, layer, qk_norm=False, out_bias=facts.attention_bias)
        self.mlp_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.mlp = parts.mlp(facts.hidden, facts.intermediate, facts.mlp_bias)

    def forward(self, h_TH: Tensor, step: Step) -> Tensor:
        h_TH = self.attention.add_(h_TH, self.attention_norm.before(h_TH), step)
        return self.mlp.add_(h_TH, self.mlp_norm.before(h_TH))


class Llama(Part):
    """LlamaForCausalLM."""

    def __init__(self, facts: ModelFacts, parts: Parts) -> None:
        super().__init__()
        self.facts, self.parts, self.watched = facts, parts, tuple[int, ...]()
        self.embedding = parts.embedding(facts.vocab, facts.hidden)
        self.layers = nn.ModuleList(LlamaLayer(facts, layer, parts) for layer in range(facts.layers))
        self.norm = parts.norm(facts.hidden, facts.norm_eps)
        self.head = self.embedding if facts.tied else parts.embedding(facts.vocab, facts.hidden)
        self.steps = parts.steps(facts, Work(pair=facts.heads))

    def watch(self, layers: Sequence[int]) -> None:
        self.watched = tuple(layers)

    def planes(self) -> tuple[PlaneSpec, ...]:
        width = self.facts.kv_heads * self.facts.head_dim
        return tuple(
            self.parts.plane(name, layer, width, shard="heads")
            for layer in range(self.facts.layers)
            for name in ("key", "value")
        )

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        step = self.steps.step(batch, planes)
        h_TH = self.embedding.forward(batch.ids_T)
        streams = Streams(self.watched)
        for index, layer in enumerate(self.layers):
            streams.enter(index, h_TH)
            h_TH = layer(h_TH, step)
        streams.enter(len(self.layers), h_TH)
        return streams.behind(self.norm.forward(h_TH))

    def logits(self, hidden_NX: Tensor) -> Tensor:
        return self.head.logits(hidden_NX[:, : self.facts.hidden])

    def table(self) -> Table:
        table = tables.outside(self.facts)
        for layer in range(self.facts.layers):
            tables.norms(table, layer)
            tables.gqa(table, self.facts, layer, qk_norm=False, out_bias=self.facts.attention_bias)
            tables.mlp(
                table, f"model.layers.{layer}.mlp", f"layers.{layer}.mlp", self.facts.intermediate, self.facts.mlp_bias
            )
        return table
