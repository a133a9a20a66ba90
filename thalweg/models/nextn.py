"""The NextN (multi-token prediction) layer of DeepSeek models: model.layers.{num_hidden_layers} of the checkpoint (DeepSeek-V3 report §2.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.attention.selection import Choices
from thalweg.batch.batch import Batch
from thalweg.core.errors import CheckpointError
from thalweg.layers.part import Part
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.deepseek import Deepseek, DeepseekLayer, indexed, layer_planes, layer_table
from thalweg.weights.table import Table


class NextN(Part):
    """From the hidden state of a token (after the main model's final norm) and the NEXT token's id: the hidden state whose logits
    predict the token after that. Chained steps feed its own output back. Shares the main model's embedding, head and rotary table.
    """

    def __init__(self, main: Deepseek) -> None:
        super().__init__()
        facts, parts = main.facts, main.parts
        if not facts.nextn:
            raise CheckpointError(
                "this checkpoint has no NextN layer: num_nextn_predict_layers is 0 in its config.json"
            )
        self.facts, self.index, self.width, self.dtype = facts, facts.layers, facts.hidden, parts.dtype
        self.main = (main,)  # a tuple: the main model is no child of this module
        self.ids_D: Tensor | None = None
        self.attends = False
        self.embedding_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.hidden_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.join = parts.linear(2 * facts.hidden, facts.hidden)
        self.layer = DeepseekLayer(facts, self.index, indexed(facts, self.index), parts)
        self.norm = parts.norm(facts.hidden, facts.norm_eps)

    def planes(self) -> tuple[PlaneSpec, ...]:
        """Of the same pages as the main model's."""
        return layer_planes(self.facts, self.index, self.main[0].parts)

    def learned(self, hidden_TX: Tensor) -> Tensor:
        """The target's hidden states after its final norm."""
        return hidden_TX[:, : self.width]

    def forward(self, ids_T: Tensor, hidden_TH: Tensor, batch: Batch, planes: Planes) -> Tensor:
        """ids_T: the token that follows each token of the batch. → [T, H] after shared_head.norm; writes the layer's KV."""
        step = self.main[0].steps.step(batch, planes)
        h_TH = self._joined(ids_T, hidden_TH)
        nothing: Choices = (None,) * len(step.spans)
        self.layer(h_TH, step, nothing)
        return self.norm.forward(h_TH)

    def observe(self, ids_T: Tensor, hidden_TH: Tensor, batch: Batch, planes: Planes) -> None:
        """Writes the KV that `forward` would write, with projections only: no attention, no MLP."""
        h_TH = self._joined(ids_T, hidden_TH)
        self.layer.attention.observe(self.layer.attention_norm.before(h_TH), self.main[0].steps.step(batch, planes))

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, vocabulary], by the main model's head."""
        return self.main[0].logits(hidden_NH)

    def _joined(self, ids_T: Tensor, hidden_TH: Tensor) -> Tensor:
        # the embedding first: the checkpoint's eh_proj reads (e, h) in that order
        embedded = self.embedding_norm.forward(self.main[0].embedding.forward(ids_T))
        return self.join.forward(torch.cat([embedded, self.hidden_norm.forward(hidden_TH)], -1))

    def table(self) -> Table:
        """Embedding and head of the layer repeat the main model's and are not read; neither is the main model."""
        table, there = Table(), f"model.layers.{self.index}"
        table.skips = [
            rf"(?!model\.layers\.{self.index}\.).*",
            *(rf"model\.layers\.{self.index + d}\..*" for d in range(1, self.facts.nextn)),
        ]
        table.skips += [
            rf"{there}\.embed_tokens\.weight",
            rf"{there}\.shared_head\.head\.weight",
            rf"{there}\.self_attn\.rotary_emb\.inv_freq",
        ]
        table.add(f"{there}.enorm.weight", "embedding_norm.weight")
        table.add(f"{there}.hnorm.weight", "hidden_norm.weight")
        table.add(f"{there}.eh_proj.weight", "join.weight")
        table.add(f"{there}.shared_head.norm.weight", "norm.weight")
        layer_table(table, self.facts, self.index, indexed(self.facts, self.index), self.main[0].parts, into="layer")
        return table
