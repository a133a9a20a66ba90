"""Latent attention on pages whose contexts are dealt out to several ranks (`attention.context_shard`).

Kernels see a rank's part of a context as a whole one: positions and tree masks count the tokens that it stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.attention.context_shard import ContextShard, pack_state
from thalweg.attention.draft_selection import NONE, shared_columns
from thalweg.attention.tree_paths import path_columns
from thalweg.batch.batch import Batch, TreeMask
from thalweg.batch.draft_selection import DraftSelection
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import ContextChunk, QueryRows, SharedChunk
from thalweg.kernels.attend.triton import merge_with_lse
from thalweg.kernels.mla.backends import project_values
from thalweg.layers.factory import LayerFactory
from thalweg.layers.paged import PagedMetadataBuilder, PagedStep, Rest, context_chunk
from thalweg.layers.paged_mla import LatentMla
from thalweg.layers.paged_sparse import Choose, SparseMla


class ShardedMetadataBuilder(PagedMetadataBuilder):
    """See `PagedMetadataBuilder`. Attention of ragged rows is not captured."""

    def __init__(self, shard: ContextShard, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"captures": False})
        self.shard, self.page = shard, shard.page_size

    def stored(self, batch: Batch) -> Batch:
        lengths = (-(-group.max_kv_len // self.page) * PAGE for group in batch.groups)
        groups = tuple(replace(group, max_kv_len=length) for group, length in zip(batch.groups, lengths, strict=True))
        batch, columns_T = self.shard.written(batch), last_stored(self.shard, batch.columns_T)
        if batch.tree is None:
            return replace(batch, positions_T=columns_T, groups=groups)
        tree = stored_tree(self.shard, batch.tree)
        before_D = torch.arange(64, device=columns_T.device)
        is_hidden_TD = ((tree.tree_mask_T.unsqueeze(1) >> before_D) & 1 == 0) & (before_D <= columns_T.unsqueeze(1))
        positions_T = columns_T - is_hidden_TD.sum(1)
        return replace(batch, positions_T=positions_T, groups=groups, tree=tree)

    def chunk(self, firsts: Sequence[int], lengths: Sequence[int], device: torch.device) -> ContextChunk:
        pages = [-(-length // self.page) for length in lengths]
        own = context_chunk([first // self.page * PAGE for first in firsts], [PAGE * count for count in pages], device)
        chunk = context_chunk(firsts, lengths, device)
        starts_R = chunk.starts_R1[:-1].to(torch.int64)
        row_S = torch.arange(len(starts_R), device=device).repeat_interleave(
            chunk.starts_R1.diff(), output_size=chunk.tokens
        )
        offset_S = torch.arange(chunk.tokens, device=device) - starts_R.index_select(0, row_S)
        order_S = own.starts_R1.to(torch.int64).index_select(0, row_S) + self.shard.stored(offset_S)
        return chunk._replace(shared=SharedChunk(own, order_S + self.shard.owner(offset_S) * own.tokens))


def last_stored(shard: ContextShard, columns_T: Tensor) -> Tensor:
    """The last token that this rank stores up to each column, among its own: int64, -1 where there is none."""
    page_T, offset_T = columns_T // shard.page_size, columns_T % shard.page_size
    return page_T * PAGE + (offset_T - shard.axis.rank * PAGE).clamp(-1, PAGE - 1)


def stored_tree(shard: ContextShard, tree: TreeMask) -> TreeMask:
    """What each token sees of the tokens that this rank stores."""
    own_T, before_D = last_stored(shard, tree.columns_T), torch.arange(64, device=tree.columns_T.device)
    columns_TD = shard.positions((own_T.unsqueeze(1) - before_D).clamp(min=0))
    bits_TD = (tree.tree_mask_T.unsqueeze(1) >> (tree.columns_T.unsqueeze(1) - columns_TD).clamp(0, 63)) & 1
    bits_TD |= before_D > own_T.unsqueeze(1)  # no token: as of what is further away
    return TreeMask(own_T, (bits_TD << before_D).sum(1), tree.rows)


class ShardedLatentMla(LatentMla):
    """`decoder` is of the heads of all ranks that share a context: each attends to its part for all of them. Prompts
    gather the latents of all ranks.
    """

    def __init__(self, layers: LayerFactory, *args: Any) -> None:
        super().__init__(layers, *args)
        self.shard = ContextShard(layers.layout.dcp)

    def _decode(self, query_THD: Tensor, step: PagedStep) -> Tensor:
        every, latents = self.shard.gather_heads(query_THD), step.latents(self.layer)
        return self._merged(*self.decoder.attend_with_lse(every, latents, step.rows, step.prepared))

    def _merged(self, out_TJr: Tensor, lse_TJ: Tensor) -> Tensor:
        """Of this rank's heads, times W_UV: → [T, H * v]. A kernel writes no output where nothing is seen."""
        out_TJr = out_TJr.masked_fill((lse_TJ == -torch.inf).unsqueeze(-1), 0.0)
        return project_values(self.shard.merge(pack_state(out_TJr, lse_TJ)), self.uv)

    def _gather(self, step: PagedStep, rest: Rest, chunk: ContextChunk) -> Tensor:
        assert chunk.shared is not None, "`ShardedMetadataBuilder` makes the chunks"
        own_SD = super()._gather(step, rest, chunk.shared.stored)
        return self.shard.axis.all_gather(own_SD).flatten(0, 1).index_select(0, chunk.shared.order_S)


class ShardedSparseMla(ShardedLatentMla, SparseMla):
    """Each rank scores the keys that it stores; the best of all ranks' best are the choice, as columns."""

    def _decode(self, query_THD: Tensor, step: PagedStep) -> Tensor:
        return (SparseMla if self.has_records else ShardedLatentMla)._decode(self, query_THD, step)

    def _stored_len(self, max_kv_len: int) -> int:
        return -(-max_kv_len // self.shard.page_size) * PAGE

    def _choose(self, choose: Choose, scores_TS: Tensor, rows: QueryRows) -> Tensor:
        own_TK = choose(scores_TS, rows.positions_T, self.topk).to(torch.int64)
        scores_TK = scores_TS.gather(1, own_TK.clamp(min=0))
        stored_TK = path_columns(own_TK.clamp(min=0), rows.positions_T, rows.paths_TD)
        columns_TK = self.shard.positions(stored_TK).masked_fill(own_TK < 0, NONE)
        pairs = torch.stack((scores_TK.view(torch.int32), columns_TK.to(torch.int32)))
        scores_TC, columns_TC = self.shard.axis.all_gather(pairs).permute(1, 2, 0, 3).flatten(2).unbind()
        columns_TC, order_TC = columns_TC.sort(1)  # so that the first of equal scores is chosen
        last_T = (columns_TC < NONE).sum(1) - 1
        index_TK = choose(scores_TC.gather(1, order_TC).view(torch.float32), last_T, self.topk).to(torch.int64)
        return columns_TC.gather(1, index_TK.clamp(min=0)).masked_fill(index_TK < 0, -1)

    def _shared(self, shared: DraftSelection, batch: Batch) -> Tensor:
        return shared_columns(shared, batch)

    def _values(self, query_THD: Tensor, step: PagedStep, chosen_TK: Tensor | None, rows: QueryRows) -> Tensor:
        if chosen_TK is not None:
            is_own_TK = (chosen_TK >= 0) & (self.shard.owner(chosen_TK) == self.shard.axis.rank)
            chosen_TK = self.shard.stored(chosen_TK).masked_fill(~is_own_TK, NONE).sort(1).values
            rows = QueryRows(rows.rows_T, rows.table_RL, is_own_TK.sum(1) - 1)
        states = self._of_chosen(self.shard.gather_heads(query_THD), step, chosen_TK, rows)
        return self._merged(*merge_with_lse(*states, query_THD.dtype))
