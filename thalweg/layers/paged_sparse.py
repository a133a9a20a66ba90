"""Latent attention on pages to a context that an indexer chooses (DSA), on `kernels.dsa`.

While no context is longer than the choice, attention is that of `LatentMla`; index keys are stored all the same.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from thalweg.attention.selection import SelectedContexts, Selection, select_top_k
from thalweg.config.model import ModelFacts
from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.dsa import triton as dsa
from thalweg.kernels.mla.backends import MlaDecodeKernel, MlaPrefillKernel, values_of_splits
from thalweg.kernels.norm.triton import rows_of
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.mla import KEY_NORM_EPS, Indexer, index_shards, unused_indexer
from thalweg.layers.paged import PagedStep
from thalweg.layers.paged_mla import LatentMla

SCORES_AT_ONCE = 1 << 28  # bytes of the scores of some tokens


class SparseMla(LatentMla):
    """A layer without an indexer attends to what the last one before it has chosen."""

    def __init__(
        self,
        layers: LayerFactory,
        facts: ModelFacts,
        layer: int,
        name: str,
        is_indexed: bool,
        decoder: MlaDecodeKernel,
        prefill: MlaPrefillKernel,
    ) -> None:
        super().__init__(layers, facts, layer, name, decoder, prefill, index_shards(facts, name, is_indexed))
        assert facts.indexer is not None
        self.indexer, self.topk = Indexer(layers, facts, layer, name) if is_indexed else None, facts.indexer.topk
        if not is_indexed:
            self.weights.skips.append(unused_indexer(name))

    def add_to(self, h: ResidualStream, x: Activation, step: PagedStep, earlier: SelectedContexts) -> SelectedContexts:
        """h += attention(x)."""
        query_TX, latent_TD, *index_key = self.down.split(x)
        assert self.query_norm is not None and self.up is not None, "models with an indexer have a query latent"
        query_TX, *index = self.up.split(self.query_norm.lazy(query_TX))
        self._store(query_TX, latent_TD, step)
        if self.indexer is not None:
            self._store_index(self.indexer, index_key[0], index[0], step)
            index.append(torch.mm(rows_of(x).float(), self.indexer.head_weights.t()))
        h.add(self.out, step.batch.graph_break(self._of_all_stored, step, query_TX, latent_TD, *index))
        return earlier

    def write_kv(self, x: Activation, step: PagedStep) -> None:
        """Stores what attention would store, and computes nothing else."""
        _, latent_TD, *index_key = self.down.split(x)
        nothing = latent_TD.new_empty(len(latent_TD), 0, self.rope)
        self.write(nothing, nothing, latent_TD, step, slice(None), False)
        if self.indexer is not None:
            self._store_index(self.indexer, index_key[0], index_key[0][:, :0], step)

    def _store_index(self, indexer: Indexer, key_Td: Tensor, query_TX: Tensor, step: PagedStep) -> None:
        norm = dsa.KeyNorm(indexer.key_norm.weight, indexer.key_norm.bias, KEY_NORM_EPS)
        dsa.write(key_Td, query_TX, norm, step.kv_write(slice(None)), step.planes.paged("index", self.layer))

    def _of_all_stored(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor, *index: Tensor) -> Tensor:
        """Attention of tokens that are stored. index: index queries and the weights of their heads. → [T, H * v]."""
        if step.rows_T is None:
            return self._of_stored(step, query_TX, latent_TD)
        rows = QueryRows(step.rows_T, step.batch.table_RP, step.batch.positions_T)
        if self.indexer is not None:
            step.chosen_TK[:] = [self._choose(self.indexer, index[0], index[1], step, rows)]
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        query_THD = query_THd.new_empty(*query_THd.shape[:2], self.rank + self.rope)
        query_THD[..., self.rank :] = query_THd[..., self.nope :]
        self._into_latents(query_THd, query_THD)
        states = dsa.attend(
            query_THD, step.latents(self.layer), step.chosen_TK[0], rows, scale=self.scale, rank=self.rank
        )
        return values_of_splits(*states, self.uv)

    def _choose(
        self, indexer: Indexer, query_TX: Tensor, weights_TH: Tensor, step: PagedStep, rows: QueryRows
    ) -> Tensor:
        """The positions that each token attends to, of as many tokens at a time as scores have room for."""
        longest, parts = max(group.max_kv_len for group in step.batch.groups), list[Tensor]()
        at_once, keys = max(SCORES_AT_ONCE // (4 * longest), 1), step.planes.paged("index", self.layer)
        for first in range(0, len(query_TX), at_once):
            some = slice(first, first + at_once)
            own = rows._replace(rows_T=rows.rows_T[some], positions_T=rows.positions_T[some])
            scores_TS = dsa.scores(query_TX[some], weights_TH[some], keys, own, longest, indexer.scale)
            choose = dsa.choose if indexer.selection is select_top_k else partial(choose_by, indexer.selection)
            parts.append(choose(scores_TS, own.positions_T, self.topk))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def choose_by(selection: Selection, scores_TS: Tensor, positions_T: Tensor, topk: int) -> Tensor:
    """`dsa.choose` by another rule."""
    column = torch.arange(scores_TS.shape[1], device=scores_TS.device)
    unseen = column > positions_T.unsqueeze(1)
    index = selection(scores_TS.masked_fill(unseen, -torch.inf), min(topk, len(column)))
    index = index.masked_fill(unseen.gather(1, index), len(column)).sort(1).values
    index = index.masked_fill(index == len(column), -1)
    return torch.nn.functional.pad(index, (0, topk - index.shape[1]), value=-1).to(torch.int32)
