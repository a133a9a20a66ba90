"""Grouped-query attention whose context is dealt out to the ranks that hold the same key head
(`attention.context_shard`), in plain torch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thalweg.attention.context import AttentionGroup, AttentionMetadata
from thalweg.attention.context_shard import ContextShard, pack_state
from thalweg.kernels.attend.ref import attend_grouped_with_lse
from thalweg.layers.factory import LayerFactory
from thalweg.layers.gqa import Gqa


class ShardedGqa(Gqa):
    """Queries of all ranks meet the keys and values that this rank stores."""

    def __init__(self, layers: LayerFactory, *args: Any) -> None:
        super().__init__(layers, *args)
        self.shard = ContextShard(layers.layout.dcp)

    def _attend(self, group: AttentionGroup, query_NHd: Tensor, metadata: AttentionMetadata) -> Tensor:
        state_NJX = super()._attend(group, self.shard.gather_heads(query_NHd), metadata)
        return self.shard.merge(state_NJX).flatten(1)

    def _attend_tile(self, query_RqJd: Tensor, key_RSKd: Tensor, value_RSKd: Tensor, bias_RqS: Tensor) -> Tensor:
        state = pack_state(*attend_grouped_with_lse(query_RqJd, key_RSKd, value_RSKd, bias_RqS))
        return state.flatten(0, 1)
