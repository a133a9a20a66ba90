"""DSA's lightning indexer (DeepSeek-V3.2 report §2.1): cheap scores of the whole past decide which tokens the attention
reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.attention.context import AttentionGroup, AttentionMetadata, QueryTile
from thalweg.attention.selection import SelectedContext, SelectedContexts, Selection
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.ref import index_scores, rotate_
from thalweg.layers.factory import LayerFactory
from thalweg.layers.module import Module, parameter
from thalweg.layers.reference_linear import LayerNorm
from thalweg.weights.table import Transform

KEY_NORM_EPS = 1e-6  # nn.LayerNorm with this eps in the published code, whatever rms_norm_eps says


class Indexer(Module):
    """Its query and key projections are rows of the attention's fused GEMMs; head weights are float32 (in bf16 they
    lose recall).

    Only the first dims of a head rotate. Without quantised keys a Hadamard transform of queries and keys would change
    nothing.
    """

    def __init__(
        self, layers: LayerFactory, facts: ModelFacts, layer: int, name: str, selection: Selection, turn: Transform
    ) -> None:
        """turn: reorders the dims of its key norm."""
        super().__init__()
        index, hidden = facts.indexer, facts.hidden
        assert index is not None
        self.heads, self.dim, self.topk, self.layer = index.heads, index.dim, index.topk, layer
        self.selection = selection
        self.key_norm = LayerNorm(layers, f"{name}.k_norm", index.dim, KEY_NORM_EPS, turn)
        self.head_weights = parameter(index.heads, hidden, dtype=torch.float32, device=layers.device)
        self.loads("head_weights", f"{name}.weights_proj.weight", (index.heads, hidden), layers.published)
        self._transposed = self.head_weights.data.t()
        self.scale = (index.heads * index.dim) ** -0.5

    def keep(self, key_TD: Tensor, metadata: AttentionMetadata) -> None:
        """Norms, rotates and stores the keys of this step's tokens: always, also where every token will be read."""
        key_TD = self.key_norm.forward(key_TD)
        rotate_(key_TD, metadata.cos_sin_T1c, 0, 1, self.dim)
        metadata.planes.write("index", self.layer, metadata.batch.write_T, key_TD)

    def select(self, x_TH: Tensor, query_TX: Tensor, metadata: AttentionMetadata) -> SelectedContexts:
        """The choice of each group; None where its longest context has no more than topk tokens, so that all are read.

        query_TX: this step's index queries before rotation [T, heads * dim]; rotated in place.
        """
        if metadata.max_kv_len <= self.topk:
            return (None,) * len(metadata.groups)
        rotate_(query_TX, metadata.cos_sin_T1c, 0, self.heads, self.dim)
        query_THD = query_TX.view(-1, self.heads, self.dim)
        weights_TH = torch.mm(x_TH if x_TH.dtype == torch.float32 else x_TH.float(), self._transposed)
        return tuple(self._select(group, query_THD, weights_TH, metadata) for group in metadata.groups)

    def _select(
        self, group: AttentionGroup, query_THD: Tensor, weights_TH: Tensor, metadata: AttentionMetadata
    ) -> SelectedContext | None:
        if group.max_kv_len <= self.topk:
            return None
        query_NHD, weights_NH = group.take(query_THD), group.take(weights_TH)
        chosen = [self._select_tile(group, tile, query_NHD, weights_NH, metadata) for tile in group.tiles]
        return SelectedContext(tuple(index for index, _ in chosen), tuple(bias for _, bias in chosen))

    def _select_tile(
        self, group: AttentionGroup, tile: QueryTile, query_NHD: Tensor, weights_NH: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        query, weights, bias = group.take_tile(query_NHD, tile), group.take_tile(weights_NH, tile), group.bias(tile)
        paged = metadata.planes.paged("index", self.layer)
        # past each query's own position -inf, not 0: scores may be negative
        keys = metadata.planes.read("index", self.layer, group.gather(paged, tile.pages), query.dtype)
        scores = index_scores(query, weights, keys, bias, self.scale)
        index = self.selection(scores, min(self.topk, tile.pages * PAGE))
        return index, bias.gather(1, index)
