"""The NextN (multi-token prediction) layer of DeepSeek models: model.layers.{num_hidden_layers} of the checkpoint
(DeepSeek-V3 report §2.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.attention.selection import SelectedContexts
from thalweg.batch.batch import Batch
from thalweg.core.errors import CheckpointError
from thalweg.layers.interface import ResidualStream
from thalweg.layers.residual import rows_of
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.decoder import Decoder
from thalweg.models.deepseek import DeepseekLayer
from thalweg.models.draft_head import DraftHead, EntryProjection


class NextN(DraftHead):
    """Predicts the token after the next, from a token's hidden state (after the main model's final norm) and the next
    token's id.

    Chained steps feed its own output back. It shares the main model's embedding, head and rotary table. See
    `models.draft_head.DraftHead`.
    """

    def __init__(self, main: Decoder) -> None:
        facts, factory = main.facts, main.factory
        if not facts.nextn:
            raise CheckpointError(
                "this checkpoint has no NextN layer: num_nextn_predict_layers is 0 in its config.json"
            )
        super().__init__(facts, factory, main)
        name = f"model.layers.{self.index}"
        self.embedding_norm = factory.norm(f"{name}.enorm", facts.hidden, facts.norm_eps)
        self.hidden_norm = factory.norm(f"{name}.hnorm", facts.hidden, facts.norm_eps)
        self.join = EntryProjection(factory, f"{name}.eh_proj", (facts.hidden, 2 * facts.hidden))
        self.layer = DeepseekLayer(facts, self.index, factory)
        self.norm = factory.norm(f"{name}.shared_head.norm", facts.hidden, facts.norm_eps)
        # embedding and head of the layer repeat the main model's and are not read; neither is the main model
        self.weights.skips += [
            rf"(?!model\.layers\.{self.index}\.).*",
            *(rf"model\.layers\.{self.index + depth}\..*" for depth in range(1, facts.nextn)),
            *(
                rf"model\.layers\.{self.index}\.{inner}"
                for inner in (r"embed_tokens\.weight", r"shared_head\.head\.weight")
            ),
            rf"model\.layers\.{self.index}\.self_attn\.rotary_emb\.inv_freq",
        ]

    def planes(self) -> tuple[PlaneSpec, ...]:
        return self.layer.planes()

    def own_states(self, ids_T: Tensor, hidden_TH: Tensor, batch: Batch, planes: Planes) -> Tensor:
        """ids_T: the token that follows each token of the batch. Returns [T, H] after shared_head.norm; writes the
        layer's KV.
        """
        metadata = self.main[0].metadata.build(batch, planes)
        h = self._joined(ids_T, hidden_TH)
        nothing: SelectedContexts = (None,) * len(metadata.groups)
        self.layer(h, metadata, nothing)
        return rows_of(h.normed(self.norm))

    def write_own_kv(self, ids_T: Tensor, hidden_TH: Tensor, batch: Batch, planes: Planes) -> None:
        """Writes the KV that `forward` would write, with projections only: no attention, no MLP."""
        x = self._joined(ids_T, hidden_TH).normed(self.layer.attention_norm)
        self.layer.attention.write_kv(x, self.main[0].metadata.build(batch, planes))

    def _joined(self, ids_T: Tensor, hidden_TH: Tensor) -> ResidualStream:
        """The stream that the layer edits: eh_proj of (embedding, hidden state), in that order."""
        embedded_TH = self.embedding_norm.forward(self.main[0].embed(ids_T))
        joined_TX = torch.cat([embedded_TH, self.hidden_norm.forward(hidden_TH)], -1)
        return self.join.start(joined_TX)
