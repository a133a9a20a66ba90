"""Latent attention whose context is dealt out to several ranks (`attention.context_shard`), in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.attention.context import TIE, AttentionGroup, AttentionMetadata
from thalweg.attention.context_shard import ContextShard, attend_packed
from thalweg.attention.selection import SelectedContext
from thalweg.layers.factory import LayerFactory
from thalweg.layers.mla import Indexer, Mla


class ShardedIndexer(Indexer):
    """Each rank scores the keys that it stores; the best of all ranks' best are the choice."""

    def __init__(self, layers: LayerFactory, *args: Any) -> None:
        super().__init__(layers, *args)
        self.shard = ContextShard(layers.layout.dcp)

    def _choose(self, scores_NS: Tensor, bias_NS: Tensor) -> tuple[Tensor, Tensor]:
        stored_NK = self.selection(scores_NS, min(self.topk, scores_NS.shape[1]))
        positions_NK = self.shard.positions(stored_NK).to(torch.int32)
        pairs = torch.stack((scores_NS.gather(1, stored_NK).view(torch.int32), positions_NK))
        # [N, D * K]: the candidates of all ranks
        scores_NC, positions_NC = self.shard.axis.all_gather(pairs).permute(1, 2, 0, 3).flatten(2).unbind()
        positions_NC, order_NC = positions_NC.sort(1)  # so that the first of equal scores is chosen
        scores_NC = scores_NC.gather(1, order_NC).view(torch.float32)
        index_NK = self.selection(scores_NC, min(self.topk, scores_NC.shape[1]))
        scores_NK, positions_NK = scores_NC.gather(1, index_NK), positions_NC.gather(1, index_NK).to(torch.int64)
        return positions_NK, torch.where(scores_NK == -torch.inf, -torch.inf, positions_NK * -TIE)


class ShardedMla(Mla):
    """Absorbed queries of all ranks meet the latents that this rank stores; long prompts gather those of all ranks."""

    attend_latents = staticmethod(attend_packed)

    def __init__(self, layers: LayerFactory, *args: Any) -> None:
        super().__init__(layers, *args)
        self.shard = ContextShard(layers.layout.dcp)

    def make_indexer(self, *args: Any) -> ShardedIndexer:
        return ShardedIndexer(*args)

    def _dense(self, group: AttentionGroup, query_NHD: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.shard.merge(super()._dense(group, self.shard.gather_heads(query_NHD), metadata))

    def _gather_whole(self, group: AttentionGroup, metadata: AttentionMetadata) -> Tensor:
        stored = self.shard.gather_context(group.gather(metadata.planes.paged("latent", self.layer), group.pages))
        return metadata.planes.read("latent", self.layer, stored, self.uk.dtype)

    def _sparse(
        self, group: AttentionGroup, query_NHD: Tensor, selected: SelectedContext, metadata: AttentionMetadata
    ) -> Tensor:
        own = self._own(selected)
        return self.shard.merge(super()._sparse(group, self.shard.gather_heads(query_NHD), own, metadata))

    def _own(self, selected: SelectedContext) -> SelectedContext:
        """What this rank stores of the choice, by where it stores it; the others are masked."""
        shard = self.shard
        biases = (
            bias.masked_fill(shard.owner(positions) != shard.axis.rank, -torch.inf)
            for positions, bias in zip(*selected, strict=True)
        )
        return SelectedContext(tuple(map(shard.stored, selected.positions)), tuple(biases))
