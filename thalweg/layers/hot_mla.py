"""Latent attention to chosen contexts whose latents are in host memory, in plain torch: `kernels.swap_in`."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.attention.context import AttentionGroup, AttentionMetadata, QueryTile
from thalweg.kernels.swap_in import ref
from thalweg.layers.mla import Mla


class HotMla(Mla):
    """Rows whose tokens together choose no more than a hot set holds read their slot's hot set. All other rows, prompts
    above all, read host memory, and so does a row all of whose context is read.
    """

    def stored(
        self, group: AttentionGroup, tile: QueryTile, index_NK: Tensor, bias_NK: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        host_XD, places_NK = super().stored(group, tile, index_NK, bias_NK, metadata)
        batch, hot, query = metadata.batch, metadata.planes.hot(self.layer), tile.stop - tile.start
        if batch.slot_R is None or batch.shares_slots or query * index_NK.shape[1] > hot.entries:
            return host_XD, places_NK
        # of the whole row: drafts of it may change
        columns_RQ = group.take(batch.columns_T).view(group.rows, group.query)
        real_RQ = group.take_tile(group.take(batch.real_T), tile).view(group.rows, query)
        chosen_NK = index_NK.masked_fill(bias_NK == -torch.inf, -1)
        chosen_RQK, places_RQK = (x.view(group.rows, query, -1) for x in (chosen_NK, places_NK))
        slots_R = batch.slot_R[group.group.row_slice]
        rows_RQK = ref.swap_in(hot, host_XD, slots_R, columns_RQ, real_RQ, chosen_RQK, places_RQK)
        return hot.latents_ED, rows_RQK.flatten(0, 1)
