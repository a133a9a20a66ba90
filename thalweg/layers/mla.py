"""Multi-head latent attention, with DSA where the model has an indexer (DeepSeek-V2 report §2.1, V3.2 report §2.1),
in plain torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.attention.context import AttentionGroup, AttentionMetadata, QueryTile, concat_groups
from thalweg.attention.draft_selection import shared_contexts, store_contexts
from thalweg.attention.exchange import exchange_stored
from thalweg.attention.selection import SelectedContext, SelectedContexts, Selection, select_top_k
from thalweg.config.model import ModelFacts
from thalweg.kernels.attend.ref import attend, expand_latents, hadamard, index_scores, rotate_
from thalweg.kernels.gemm.prefetch import Prefetch, no_prefetch, prefetch_for
from thalweg.layers.factory import LayerFactory
from thalweg.layers.index_shards import index_heads, index_shards, indexer_order, unused_indexer
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.linear import LayerNorm, Linear, PackedShard, place_together, taken
from thalweg.layers.module import Module, parameter
from thalweg.layers.residual import rows_of
from thalweg.layers.rotary import softmax_scale
from thalweg.memory.records import quantize
from thalweg.parallel.axis import share_of
from thalweg.weights.table import cache_scale_names

LATENT_NORM_EPS = 1e-6  # the class default in the published code, not rms_norm_eps
KEY_NORM_EPS = 1e-6  # of the indexer: nn.LayerNorm with this eps in the published code
# elements of selected latents gathered at once: what stays in a CPU's near cache until it is read again; on a GPU a
# whole tile's
GATHERED, GATHERED_ON_GPU = 1 << 19, 1 << 27


class MlaProjections(Module):
    """Projections, norms and checkpoint tensors that all latent attention layers share.

    down: reads the hidden state: the query latent (or all queries, without one), the KV latent with its rotary key,
    and the index key. up: queries and index queries, of the query latent.
    """

    def __init__(
        self,
        layers: LayerFactory,
        facts: ModelFacts,
        layer: int,
        name: str,
        index_key: Sequence[PackedShard] = (),
        index_query: Sequence[PackedShard] = (),
    ) -> None:
        super().__init__()
        assert facts.mla is not None
        mla, tp, self.layer = facts.mla, layers.layout.tp, layer
        own_heads = share_of(facts.heads, tp, "attention heads")
        self.heads, self.rank, self.nope, self.rope, self.v = len(own_heads), mla.kv_lora, mla.nope, mla.rope, mla.v
        self.scale = softmax_scale(mla.nope + mla.rope, facts.rope)

        def of_heads(width: int) -> range | None:
            return range(own_heads.start * width, own_heads.stop * width) if tp.size > 1 else None

        width = mla.nope + mla.rope
        queries = PackedShard(f"{name}.{'q_b' if mla.q_lora else 'q'}_proj", facts.heads * width, of_heads(width))
        query = PackedShard(f"{name}.q_a_proj", mla.q_lora) if mla.q_lora else queries
        latent = PackedShard(f"{name}.kv_a_proj_with_mqa", self.rank + self.rope)
        self.down = layers.packed([query, latent, *index_key], facts.hidden)
        self.query_norm = layers.norm(f"{name}.q_a_layernorm", mla.q_lora, LATENT_NORM_EPS) if mla.q_lora else None
        self.up = layers.packed([queries, *index_query], mla.q_lora) if mla.q_lora else None
        self.latent_norm = layers.norm(f"{name}.kv_a_layernorm", self.rank, LATENT_NORM_EPS)
        self.uk = parameter(self.heads, self.nope, self.rank, dtype=layers.dtype, device=layers.device)
        self.uv = self._value_weight(layers)
        kv_b, shape = f"{name}.kv_b_proj.weight", (facts.heads * (mla.nope + mla.v), self.rank)
        for target, half in (("uk", _key_half), ("uv", _value_half)):  # kv_b is dequantized for absorption
            transform, take = partial(half, nope=mla.nope, v=mla.v), taken(of_heads(mla.nope + mla.v))
            self.loads(target, kv_b, shape, layers.published, transform, take=take)
        self.out = layers.row(f"{name}.o_proj", (facts.hidden, facts.heads * self.v), of_heads(self.v))
        # a latent is key and value at once, and the key's scale is its
        self.weights.cache_scales["latent", layer] = cache_scale_names(name, "k")
        self.weights.skips += map(re.escape, cache_scale_names(name, "v"))

    def _value_weight(self, layers: LayerFactory) -> nn.Parameter:
        """W_UV [H, r, v]."""
        return parameter(self.heads, self.rank, self.v, dtype=layers.dtype, device=layers.device)


class Mla(MlaProjections):
    """Cached per token: the normed latent and the rotated key, side by side.

    Short queries multiply by uk and attend to latents; those of more than `long` tokens expand the context once and
    save work on every pair. A selected context is gathered, or, while it is short, masked.
    """

    attend_latents = staticmethod(attend)  # what computes absorbed attention
    cached: tuple[str, ...] = ("latent",)  # the planes that attention reads

    def __init__(
        self,
        layers: LayerFactory,
        facts: ModelFacts,
        layer: int,
        name: str,
        is_indexed: bool,
        selection: Selection = select_top_k,
    ) -> None:
        super().__init__(layers, facts, layer, name, *index_shards(layers, facts, name, is_indexed))
        index = facts.indexer
        self.indexer = self.make_indexer(layers, facts, layer, name, selection) if is_indexed else None
        if not is_indexed and index is not None:
            self.weights.skips.append(unused_indexer(name))
        self._prefetch_before: Prefetch = no_prefetch
        self._prefetch_after: Prefetch = no_prefetch
        self._before = self._after = self.uk.data
        if all(isinstance(linear, Linear | None) for linear in (self.down, self.up, self.out)):
            self._place()
        absorbed, expanded = 2 * self.rank + self.rope, self.nope + self.rope + self.v  # work for one key by one head
        self.long = self.rank * (self.nope + self.v) // (absorbed - expanded) if absorbed > expanded else 1 << 30
        topk = index.topk if index is not None else 0
        at_once = GATHERED_ON_GPU if self.uk.is_cuda else GATHERED
        self.queries_at_once = max(at_once // max(topk * (self.rank + self.rope), 1), 1)
        # up to here a mask over everything costs less than gathering the selected latents of every query token: twice
        # the work, measured
        self.masked = 2 * topk * absorbed // expanded

    def make_indexer(self, *args: Any) -> Indexer:
        """args: of `Indexer`."""
        return Indexer(*args)

    def _place(self) -> None:
        """Places weights that a step reads one after the other side by side, to prefetch them together
        (`kernels.gemm.prefetch`).
        """
        *before, out = [linear for linear in (self.down, self.up, self.out) if isinstance(linear, Linear)]
        self._before = place_together([linear.weight for linear in before])
        self._after = place_together([self.uk, self.uv, out.weight])
        self._prefetch_before, self._prefetch_after = prefetch_for(self._before), prefetch_for(self._after)
        for linear in (*before, out):
            linear.prefetched()

    def write_kv(self, x: Activation, metadata: AttentionMetadata) -> None:
        """Stores what attention would store, and computes nothing else."""
        x_TH = rows_of(x)
        if isinstance(self.down, Linear):  # the rows of the queries are not needed
            latent_TX = F.linear(x_TH, self.down.weight[self.down.widths[0] :])
            latent_TD, *index_key = torch.split(latent_TX, self.down.widths[1:], 1)
        else:
            _, latent_TD, *index_key = self.down.split(x_TH)
        self._store(latent_TD, index_key, metadata)

    def add_to(
        self, h: ResidualStream, x: Activation, metadata: AttentionMetadata, earlier: SelectedContexts
    ) -> SelectedContexts:
        """h += attention(x). Returns the selection of context made here, or `earlier` in a layer without an indexer."""
        x_TH = rows_of(x)
        self._prefetch_before(self._before)
        query_TX, latent_TD, *index_key = self.down.split(x_TH)
        index_query: list[Tensor] = []
        if self.query_norm is not None and self.up is not None:
            query_TX, *index_query = self.up.split(self.query_norm.forward(query_TX))
        self._store(latent_TD, index_key, metadata)
        selections = earlier
        if self.indexer is not None:
            selections = self.indexer.select(x_TH, index_query[0], metadata)
        self._prefetch_after(self._after)
        rotate_(query_TX, metadata.cos_sin_T1c, self.nope, self.heads, self.nope + self.rope)
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        parts = [
            self.attend(group, group.take(query_THd), selected, metadata)
            for group, selected in zip(metadata.groups, selections, strict=True)
        ]
        h.add(self.out, concat_groups(parts))
        return selections

    def _store(self, latent_TD: Tensor, index_key: list[Tensor], metadata: AttentionMetadata) -> None:
        """This step's tokens: the latent with its key, normed and rotated in place, and the index key."""
        self.latent_norm.forward_(latent_TD[:, : self.rank])
        rotate_(latent_TD, metadata.cos_sin_T1c, self.rank, 1, 0)
        self.store(latent_TD, metadata)
        names = self.cached
        if self.indexer is not None:
            self.indexer.keep(index_key[0], metadata)
            names = *names, "index"
        exchange_stored(metadata.batch, metadata.planes, names, self.layer)

    def store(self, latent_TD: Tensor, metadata: AttentionMetadata) -> None:
        """Writes the latents of these tokens into the KV cache."""
        metadata.planes.write("latent", self.layer, metadata.batch.write_T, latent_TD)

    def attend(
        self, group: AttentionGroup, query_NHd: Tensor, selected: SelectedContext | None, metadata: AttentionMetadata
    ) -> Tensor:
        """Attention of one group: → [N, H * v]."""
        if group.query > self.long and (selected is None or group.max_kv_len <= min(self.masked, 2 * group.query)):
            contexts = self._gather_whole(group, metadata)
            return self.attend_expanded(
                group.whole, query_NHd, selected, (expand_latents(x_SD, self.uk, self.uv) for x_SD in contexts)
            )
        absorbed = torch.bmm(query_NHd[..., : self.nope].transpose(0, 1), self.uk).transpose(0, 1)
        query_NHD = torch.cat((absorbed, query_NHd[..., self.nope :]), -1)
        u_NHR = (
            self._dense(group, query_NHD, metadata)
            if selected is None
            else self._sparse(group, query_NHD, selected, metadata)
        )
        return torch.bmm(u_NHR.transpose(0, 1), self.uv).transpose(0, 1).reshape(-1, self.heads * self.v)

    def _dense(self, group: AttentionGroup, query_NHD: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Absorbed attention to the whole context: → [N, H, r]."""
        parts, heads = [], query_NHD.shape[1]
        for tile in group.tiles:
            latents = self._gather(group, tile.pages, metadata)
            query = group.take_tile(query_NHD, tile).view(group.rows, -1, self.rank + self.rope)
            bias = group.bias(tile).unsqueeze(1).expand(-1, heads, -1).reshape(group.rows, query.shape[1], -1)
            out = self.attend_latents(query, latents, latents[..., : self.rank], bias, self.scale)
            parts.append(out.view(-1, heads, out.shape[-1]))
        return group.join_tiles(parts)

    def _gather_whole(self, group: AttentionGroup, metadata: AttentionMetadata) -> Tensor:
        """The latents of every row's whole context: [R, S, r + rope]."""
        return self._gather(group, group.pages, metadata)

    def _gather(self, group: AttentionGroup, pages: int, metadata: AttentionMetadata) -> Tensor:
        """The latents of every row's first pages: [R, S, r + rope]."""
        stored = group.gather(metadata.planes.paged("latent", self.layer), pages)
        return metadata.planes.read("latent", self.layer, stored, self.uk.dtype)

    def _sparse(
        self, group: AttentionGroup, query_NHD: Tensor, selected: SelectedContext, metadata: AttentionMetadata
    ) -> Tensor:
        """Absorbed attention to the selected context: → [N, H, r]."""
        parts = []
        for tile, index_NK, bias_NK in zip(group.tiles, selected.positions, selected.biases, strict=True):
            query, bias = group.take_tile(query_NHD, tile), bias_NK.unsqueeze(1)
            stored_XD, rows_NK = self.stored(group, tile, index_NK, bias_NK, metadata)
            if len(query) <= self.queries_at_once:
                parts.append(self._gathered(query, stored_XD, rows_NK, bias, metadata))
            else:
                pieces = zip(*(torch.split(x, self.queries_at_once) for x in (query, rows_NK, bias)), strict=True)
                parts.append(torch.cat([self._gathered(q, stored_XD, rows, b, metadata) for q, rows, b in pieces]))
        return group.join_tiles(parts)

    def stored(
        self, group: AttentionGroup, tile: QueryTile, index_NK: Tensor, bias_NK: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Stored latents [X, D], and which of them the tokens of a tile have chosen, int64 [N, K]."""
        return metadata.planes.tokens("latent", self.layer), group.plane_rows(index_NK)

    def _gathered(
        self, query_NHD: Tensor, stored_XD: Tensor, rows_NK: Tensor, bias_N1K: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Each query token to its own latents: → [N, H, r]."""
        stored = stored_XD.index_select(0, rows_NK.reshape(-1))
        latents = metadata.planes.read("latent", self.layer, stored, query_NHD.dtype)
        latents = latents.view(len(query_NHD), -1, self.rank + self.rope)
        return self.attend_latents(query_NHD, latents, latents[..., : self.rank], bias_N1K, self.scale)

    def attend_expanded(
        self,
        group: AttentionGroup,
        query_NHd: Tensor,
        selected: SelectedContext | None,
        contexts: Iterable[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Plain multi-head attention, row by row, to the whole context or to what a mask leaves of it: → [N, H * v].
        contexts: keys [H, S, nope + rope] and values [H, S, v] of each row.
        """
        rows = []
        queries = query_NHd.view(group.rows, group.query, self.heads, -1)
        for row, (query_qHd, (key, value)) in enumerate(zip(queries, contexts, strict=True)):
            for i, tile in enumerate(group.tiles):
                bias = (
                    group.bias(tile)
                    if selected is None
                    else group.selected_bias(tile, selected.positions[i], selected.biases[i])
                )
                bias_qS = bias.view(group.rows, tile.stop - tile.start, -1)[row]
                max_kv_len, query = bias_qS.shape[1], query_qHd[tile.start : tile.stop].transpose(0, 1)
                out = attend(query, key[:, :max_kv_len], value[:, :max_kv_len], bias_qS, self.scale)
                rows.append(out.transpose(0, 1).flatten(1))
        return torch.cat(rows)


class Indexer(Module):
    """DSA's lightning indexer (DeepSeek-V3.2 report §2.1): cheap scores of the whole past select what attention reads.

    Its query and key projections are rows of the attention's fused GEMMs; head weights are float32 (in bf16 they lose
    recall). Ranks may share the heads; their scores are added up, to the same bits on each. Only the first dims of a
    head rotate. Where queries and keys are rounded to e4m3, each with a scale, the published code of V3.2 turns both by
    a Hadamard matrix first; elsewhere that would change nothing. Here it meets dims in another order (`indexer_order`),
    which products do not see.
    """

    def __init__(
        self, layers: LayerFactory, facts: ModelFacts, layer: int, name: str, selection: Selection = select_top_k
    ) -> None:
        """name: of the attention."""
        super().__init__()
        index, hidden, name, turn = facts.indexer, facts.hidden, f"{name}.indexer", indexer_order(facts)
        assert index is not None
        self.axis, own_heads = layers.layout.indexer, index_heads(layers, facts)
        self.heads, self.dim, self.topk, self.layer = len(own_heads), index.dim, index.topk, layer
        self.selection, self.is_fp8 = selection, layers.kernels.fp8_index
        self.turns = self.is_fp8 and index.hadamard and index.dim & (index.dim - 1) == 0
        self.key_norm = LayerNorm(layers, f"{name}.k_norm", index.dim, KEY_NORM_EPS, turn)
        self.head_weights = parameter(self.heads, hidden, dtype=torch.float32, device=layers.device)
        weight, shape, take = f"{name}.weights_proj.weight", (index.heads, hidden), taken(own_heads)
        self.loads("head_weights", weight, shape, layers.published, take=take if self.heads < index.heads else ())
        self._transposed = self.head_weights.data.t()
        self.scale = (index.heads * index.dim) ** -0.5

    def keep(self, key_TD: Tensor, metadata: AttentionMetadata) -> None:
        """Norms, rotates and stores the keys of this step's tokens: always, also where every token will be read."""
        key_TD = self.key_norm.forward(key_TD)
        rotate_(key_TD, metadata.cos_sin_T1c, 0, 1, self.dim)
        key_TD = hadamard(key_TD) if self.turns else key_TD
        metadata.planes.write("index", self.layer, metadata.batch.write_T, key_TD)

    def select(self, x_TH: Tensor, query_TX: Tensor, metadata: AttentionMetadata) -> SelectedContexts:
        """The choice of each group; None where its longest context has no more than topk tokens, so that all are read.

        query_TX: this step's index queries before rotation [T, heads * dim]; rotated in place.
        """
        if metadata.max_kv_len <= self.topk:
            return (None,) * len(metadata.groups)
        shared = metadata.batch.draft_selection
        if shared is not None and not shared.is_first:
            return shared_contexts(shared, metadata)
        rotate_(query_TX, metadata.cos_sin_T1c, 0, self.heads, self.dim)
        query_THD = query_TX.view(-1, self.heads, self.dim)
        weights_TH = torch.mm(x_TH if x_TH.dtype == torch.float32 else x_TH.float(), self._transposed)
        if self.is_fp8:
            turned = hadamard(query_THD) if self.turns else query_THD
            codes_TX, scale_TH = quantize(turned.flatten(1), self.dim)
            query_THD, weights_TH = codes_TX.to(query_TX.dtype).view_as(query_THD), weights_TH * scale_TH
        selected = tuple(self._select(group, query_THD, weights_TH, metadata) for group in metadata.groups)
        if shared is not None:
            store_contexts(shared, metadata, selected)
        return selected

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
        return self._choose(self.axis.all_reduce(index_scores(query, weights, keys, bias, self.scale)), bias)

    def _choose(self, scores_NS: Tensor, bias_NS: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 and bias [N, K] of the choice."""
        index_NK = self.selection(scores_NS, min(self.topk, scores_NS.shape[1]))
        return index_NK, bias_NS.gather(1, index_NK)


def _key_half(kv_b: Tensor, nope: int, v: int) -> Tensor:
    """W_UK [H, nope, r]: the first rows of each head of kv_b."""
    return kv_b.view(-1, nope + v, kv_b.shape[1])[:, :nope]


def _value_half(kv_b: Tensor, nope: int, v: int) -> Tensor:
    """W_UV transposed [H, r, v]: the last rows of each head of kv_b."""
    return kv_b.view(-1, nope + v, kv_b.shape[1])[:, nope:].transpose(1, 2)
