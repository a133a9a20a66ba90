"""Qwen3 (dense): as Llama, with RMSNorm on every query and key head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thalweg.attention.context import Step, Work, counting, step_of
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.layers import rotary
from thalweg.layers.gqa import Gqa
from thalweg.layers.linear import Embedding
from thalweg.layers.mlp import Mlp
from thalweg.layers.norm import RMSNorm
from thalweg.layers.part import Part
from thalweg.memory.planes import Planes, PlaneSpec, vectors
from thalweg.models import tables
from thalweg.weights.table import Table


class Qwen3Layer(Part):
    def __init__(self, facts: ModelFacts, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(facts.hidden, facts.norm_eps, device)
        self.attention = Gqa(facts, layer, dtype, device, qk_norm=True, out_bias=facts.attention_bias)
        self.mlp_norm = RMSNorm(facts.hidden, facts.norm_eps, device)
        self.mlp = Mlp(facts.hidden, facts.intermediate, dtype, device)

    def forward(self, h_TH: Tensor, step: Step) -> Tensor:
        h_TH = self.attention.add_(h_TH, self.attention_norm.forward(h_TH), step)
        return self.mlp.add_(h_TH, self.mlp_norm.forward(h_TH))


class Qwen3(Part):
    """Qwen3ForCausalLM."""

    cis: Tensor
    counting: Tensor

    def __init__(self, facts: ModelFacts, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.facts, self.dtype = facts, dtype
        self.embedding = Embedding(facts.vocab, facts.hidden, dtype, device)
        self.layers = nn.ModuleList(Qwen3Layer(facts, layer, dtype, device) for layer in range(facts.layers))
        self.norm = RMSNorm(facts.hidden, facts.norm_eps, device)
        self.head = self.embedding if facts.tied else Embedding(facts.vocab, facts.hidden, dtype, device)
        self.register_buffer("cis", rotary.table(facts.rope, facts.context, device), persistent=False)
        self.register_buffer("counting", counting(facts.context, device), persistent=False)

    def planes(self) -> tuple[PlaneSpec, ...]:
        width = self.facts.kv_heads * self.facts.head_dim
        return tuple(
            vectors(name, layer, width, self.dtype, shard="heads")
            for layer in range(self.facts.layers)
            for name in ("key", "value")
        )

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        step = step_of(batch, planes, self.cis, self.counting, Work(pair=self.facts.heads))
        h_TH = self.embedding.forward(batch.ids_T)
        for layer in self.layers:
            h_TH = layer(h_TH, step)
        return self.norm.forward(h_TH)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return self.head.logits(hidden_NH)

    def table(self) -> Table:
        table = tables.outside(self.facts)
        for layer in range(self.facts.layers):
            tables.norms(table, layer)
            tables.gqa(table, self.facts, layer, qk_norm=True, out_bias=self.facts.attention_bias)
            tables.mlp(table, f"model.layers.{layer}.mlp", f"layers.{layer}.mlp", self.facts.intermediate)
        return table
