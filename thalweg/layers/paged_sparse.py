"""Latent attention on pages to a context that an indexer chooses (DSA), on `kernels.dsa`.

While no context is longer than the choice, attention is that of `LatentMla`; index keys are stored all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from thalweg.attention.draft_selection import shared_positions
from thalweg.attention.exchange import exchange_stored
from thalweg.attention.selection import SelectedContexts, Selection, select_top_k
from thalweg.batch.batch import Attend, Batch, no_graph_break
from thalweg.batch.draft_selection import DraftSelection
from thalweg.config.backends import DECODE, INDEX_SCORES, PREFILL
from thalweg.config.entry_point import load_entry
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import RECORD
from thalweg.kernels.attend.args import ContextChunk, QueryRows, RaggedRows
from thalweg.kernels.attend.triton import merge
from thalweg.kernels.dsa import triton as dsa
from thalweg.kernels.dsa.backends import SparseKernel, SparseShape
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.mla.backends import MlaDecodeKernel, MlaPrefillKernel, triton_prefill
from thalweg.kernels.router.triton import partial_logits
from thalweg.layers.factory import LayerFactory
from thalweg.layers.index_scores import IndexScores
from thalweg.layers.index_shards import index_shards, unused_indexer
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.mla import KEY_NORM_EPS, Indexer
from thalweg.layers.paged import PagedStep, Rest
from thalweg.layers.paged_mla import LatentMla
from thalweg.memory.records import decode_record

SCORES_AT_ONCE = 1 << 28  # bytes of the scores of some tokens
INVARIANT_SPLITS = 8  # parts of every choice in deterministic mode
PARTS = 1 << 27  # elements of partial sums at a time in deterministic mode: 256 MiB

Choose = Callable[[Tensor, Tensor, int], Tensor]  # as `dsa.choose`


class SparseMla(LatentMla):
    """A layer without an indexer attends to what the last one before it has chosen. Of a tree of drafts each token's
    context is its own path.
    """

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
        super().__init__(layers, facts, layer, name, decoder, prefill, index_shards(layers, facts, name, is_indexed))
        assert facts.indexer is not None
        self.indexer, self.topk = Indexer(layers, facts, layer, name) if is_indexed else None, facts.indexer.topk
        self.has_records, self.choose = layers.kernels.kv == RECORD, layers.kernels.topk
        self.deterministic = layers.kernels.deterministic
        shape = SparseShape(self.rank, self.topk, self.scale)
        self.sparse_decoder: SparseKernel = load_entry(DECODE[layers.kernels.decode].sparse)(shape)
        self.sparse_prefill: SparseKernel = load_entry(PREFILL[layers.kernels.prefill].sparse)(shape)
        self.index_scores: IndexScores = load_entry(INDEX_SCORES[layers.kernels.index_scores].index_scores)()
        if not is_indexed:
            self.weights.skips.append(unused_indexer(name))

    def add_to(self, h: ResidualStream, x: Activation, step: PagedStep, earlier: SelectedContexts) -> SelectedContexts:
        """h += attention(x)."""
        query_TX, latent_TD, *index_key = self.down.split(x)
        assert self.query_norm is not None and self.up is not None, "models with an indexer have a query latent"
        query_TX, *index = self.up.split(self.query_norm.lazy(query_TX))
        attend, queries = self._prepare_attention(query_TX, latent_TD, step)
        if self.indexer is not None and step.scores_context:
            weights_STH = partial_logits(x, self.indexer.head_weights, deterministic=self.deterministic).logits_STE
            index = [self._store_index(self.indexer, index_key[0], index[0], weights_STH, step), weights_STH[0]]
        elif self.indexer is not None:
            index = self._store_key(self.indexer, index_key[0], step)
        self._exchange(step)
        h.add(self.out, step.batch.graph_break(attend, step, *queries, *index))
        return earlier

    def _prepare_attention(
        self, query_TX: Tensor, latent_TD: Tensor, step: PagedStep
    ) -> tuple[Attend, tuple[Tensor, ...]]:
        """Stores the tokens' latents. → what attends after the graph break, and its first arguments after the step. A
        piece of a graph may be replayed with other rows than it was captured with.
        """
        if step.rest is None and step.batch.graph_break is no_graph_break:
            query_THd = query_TX.view(len(query_TX), self.heads, -1)
            return self._of_absorbed, (self._absorb(query_THd, latent_TD, step),)
        self._store(query_TX, latent_TD, step)
        return self._of_all_stored, (query_TX, latent_TD)

    def write_kv(self, x: Activation, step: PagedStep) -> None:
        """Stores what attention would store, and computes nothing else."""
        _, latent_TD, *index_key = self.down.split(x)
        nothing = latent_TD.new_empty(len(latent_TD), 0, self.rope)
        self.write(nothing, nothing, latent_TD, step, slice(None), False)
        if self.indexer is not None:
            self._store_key(self.indexer, index_key[0], step)
        self._exchange(step)

    def _exchange(self, step: PagedStep) -> None:
        names = ("latent",) if self.indexer is None else ("latent", "index")
        exchange_stored(step.batch, step.planes, names, self.layer)

    def _store_index(
        self, indexer: Indexer, key_Td: Tensor, query_TX: Tensor, weights_STH: Tensor | None, step: PagedStep
    ) -> Tensor:
        norm = dsa.KeyNorm(indexer.key_norm.weight, indexer.key_norm.bias, KEY_NORM_EPS)
        write, keys = step.kv_write(slice(None)), step.planes.paged("index", self.layer)
        return dsa.write(key_Td, query_TX, weights_STH, norm, write, keys, indexer.scale, indexer.turns)

    def _store_key(self, indexer: Indexer, key_Td: Tensor, step: PagedStep) -> list[Tensor]:
        """Of a step that does not select: → nothing to select with."""
        self._store_index(indexer, key_Td, key_Td[:, :0], None, step)
        return []

    def _of_all_stored(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor, *index: Tensor) -> Tensor:
        """Attention of tokens that are stored. index: index queries and the weights of their heads. → [T, H * v]."""
        if not step.chooses or step.query_rows is None:
            return self._of_stored(step, query_TX, latent_TD)
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        if step.rest is not None and step.whole is not None:
            chosen_TK = self._chosen(step, step.query_rows, *index)
            return self._of_masked(step, step.query_rows, step.rest, step.whole, query_THd, chosen_TK)
        return self._of_absorbed(step, self._absorbed(query_THd), *index)

    def _of_masked(
        self, step: PagedStep, rows: QueryRows, rest: Rest, whole: ContextChunk, query_THd: Tensor, chosen_TK: Tensor
    ) -> Tensor:
        """Ragged rows attend to what a mask leaves of their expanded context, the rows before them to their choice: →
        [T, H * v].
        """
        out_THv, decode = query_THd.new_empty(*query_THd.shape[:2], self.v), slice(0, rest.token)
        if rest.token:
            query_THD, some = self._absorbed(query_THd[decode]), rows.some(decode)
            out_THv[decode] = self._values(query_THD, step, chosen_TK[decode], some).view(-1, *out_THv.shape[1:])
        ragged = RaggedRows(rest.rows.starts_R1, whole.starts_R1, rest.rows.max_query, whole.max_tokens)
        triton_prefill(
            query_THd[rest.token :], self._gather(step, rest, whole), self.uk, self.uv, ragged,
            scale=self.scale, out_THv=out_THv[rest.token :],
            chosen_TS=dsa.mask_of(chosen_TK[rest.token :], whole.max_tokens),
        )  # fmt: skip
        return out_THv.flatten(1)

    def _of_absorbed(self, step: PagedStep, query_THD: Tensor, *index: Tensor) -> Tensor:
        """Attention of absorbed queries of stored tokens: → [T, H * v]."""
        if not step.chooses or step.query_rows is None:
            return self._decode(query_THD, step)
        return self._values(query_THD, step, self._chosen(step, step.query_rows, *index), step.query_rows)

    def _values(self, query_THD: Tensor, step: PagedStep, chosen_TK: Tensor | None, rows: QueryRows) -> Tensor:
        """Attention of the step's first tokens to their choice: → [T, H * v]. chosen_TK: None is all they see."""
        tokens, parts = len(query_THD), list[Tensor]()
        border = tokens if self.sparse_decoder == self.sparse_prefill else min(step.decode, tokens)
        for kernel, some in (self.sparse_decoder, slice(0, border)), (self.sparse_prefill, slice(border, tokens)):
            if some.start < some.stop:
                of = query_THD[some], step.latents(self.layer), None if chosen_TK is None else chosen_TK[some]
                parts.append(kernel.attend(*of, rows.some(some), self.uv, step.schedules))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _of_chosen(
        self, query_THD: Tensor, step: PagedStep, chosen_TK: Tensor | None, rows: QueryRows, splits: int = 0
    ) -> tuple[Tensor, Tensor]:
        latents = step.latents(self.layer)
        return dsa.attend(
            query_THD, latents, chosen_TK, rows, self.topk, scale=self.scale, rank=self.rank, splits=splits
        )

    def _decode(self, query_THD: Tensor, step: PagedStep) -> Tensor:
        """Absorbed: queries meet latents, or records of them. → [T, H * v]."""
        if not self.has_records or step.query_rows is None:
            return super()._decode(query_THD, step)
        return self._values(query_THD, step, None, step.query_rows.some(slice(0, len(query_THD))))

    def _gather(self, step: PagedStep, rest: Rest, chunk: ContextChunk) -> Tensor:
        if not self.has_records:
            return super()._gather(step, rest, chunk)
        return gather_records(
            step.planes.tokens("latent", self.layer), rest.rows.table_RL, chunk, self.rank, self.uk.dtype
        )

    def _chosen(self, step: PagedStep, rows: QueryRows, *index: Tensor) -> Tensor:
        """The positions that each token attends to: by this layer's indexer, of as many tokens at a time as scores have
        room for, or by an earlier one's; or that the first step of their draft has chosen, and the drafts since.
        """
        shared = step.batch.draft_selection
        if self.indexer is None:
            return step.chosen_TK[0]
        if shared is not None and not shared.is_first:
            return step.keep_chosen(self._shared(shared, step.batch))
        (query_TX, weights_TH), parts = index, list[Tensor]()
        axis, by_kernel = self.indexer.axis, self.indexer.selection is select_top_k
        choose: Choose = (
            dsa.choose if by_kernel and self.choose == "triton" else partial(choose_by, self.indexer.selection)
        )
        for scored in self.index_scores.parts(step, rows, step.planes.paged("index", self.layer)):
            longest = self._stored_len(scored.max_kv_len)
            # each rank gets the scores of all
            for some in scored.chunks(SCORES_AT_ONCE // (4 * longest * axis.size)):
                scores_TS = scored.scores(query_TX, weights_TH, rows, some, longest)
                parts.append(self._choose(choose, axis.all_reduce(scores_TS), rows.some(some)))
        chosen_TK = step.keep_chosen(parts[0] if len(parts) == 1 else torch.cat(parts))
        if shared is not None:
            shared.store(chosen_TK, step.batch.positions_T)
        return chosen_TK

    def _shared(self, shared: DraftSelection, batch: Batch) -> Tensor:
        """What the steps of a draft share, as `_choose` has it."""
        return shared_positions(shared, batch.positions_T)

    def _stored_len(self, max_kv_len: int) -> int:
        """How much of a context of so many tokens this rank stores at most."""
        return max_kv_len

    def _choose(self, choose: Choose, scores_TS: Tensor, rows: QueryRows) -> Tensor:
        """The choice by these scores of what this rank stores."""
        return choose(scores_TS, rows.positions_T, self.topk)


class InvariantSparseMla(SparseMla):
    """Of the deterministic mode: bits of a token depend on neither the batch, nor chunks, nor cache hits, nor drafts.
    Every token attends to latents by itself, also where all of its context is chosen.
    """

    def _prepare_attention(
        self, query_TX: Tensor, latent_TD: Tensor, step: PagedStep
    ) -> tuple[Attend, tuple[Tensor, ...]]:
        """`absorb` stores them before each attends; of a share all are stored before any does."""
        if step.batch.share is not None:
            query_THd = query_TX.view(len(query_TX), self.heads, -1)
            for first in range(0, len(query_THd), self._at_once):
                some = slice(first, first + self._at_once)
                self.absorb(query_THd[some], latent_TD[some], step, some, True)
        return self._of_all_stored, (query_TX, latent_TD)

    def _of_all_stored(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor, *index: Tensor) -> Tensor:
        assert step.query_rows is not None
        chosen_TK = self._chosen(step, step.query_rows, *index) if step.chooses else None
        query_THd, parts = query_TX.view(len(query_TX), self.heads, -1), list[Tensor]()
        for first in range(0, len(query_THd), self._at_once):  # in order: a token's context is stored before it attends
            some = slice(first, first + self._at_once)
            query_THD = self.absorb(query_THd[some], latent_TD[some], step, some, True)
            chosen = None if chosen_TK is None else chosen_TK[some]
            states = self._of_chosen(query_THD, step, chosen, step.query_rows.some(some), INVARIANT_SPLITS)
            parts.append(mla.up(merge(*states, query_THD.dtype), self.uv))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def _at_once(self) -> int:
        """Tokens whose partial sums are in memory together."""
        return max(PARTS // (self.heads * INVARIANT_SPLITS * self.rank), 1)


def gather_records(records_SB: Tensor, table_RL: Tensor, chunk: ContextChunk, rank: int, dtype: torch.dtype) -> Tensor:
    """`mla.gather` of records: → [tokens, r + rope]."""
    token = torch.arange(chunk.tokens, dtype=torch.int32, device=records_SB.device)
    row = torch.searchsorted(chunk.starts_R1, token, right=True) - 1
    is_real = row < len(chunk.first_R)
    row = row.clamp(max=len(chunk.first_R) - 1)
    position = torch.where(is_real, token - chunk.starts_R1[row] + chunk.first_R[row], 0)
    place = table_RL[row, position // 64].long() * 64 + position % 64
    return decode_record(records_SB.index_select(0, place), rank, dtype) * is_real.unsqueeze(1)


def choose_by(selection: Selection, scores_TS: Tensor, positions_T: Tensor, topk: int) -> Tensor:
    """`dsa.choose` by another rule."""
    column = torch.arange(scores_TS.shape[1], device=scores_TS.device)
    unseen = column > positions_T.unsqueeze(1)
    index = selection(scores_TS.masked_fill(unseen, -torch.inf), min(topk, len(column)))
    index = index.masked_fill(unseen.gather(1, index), len(column)).sort(1).values
    index = index.masked_fill(index == len(column), -1)
    return torch.nn.functional.pad(index, (0, topk - index.shape[1]), value=-1).to(torch.int32)
