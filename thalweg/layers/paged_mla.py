"""Multi-head latent attention on pages: decode rows on latents, the others decompressed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.attention.exchange import exchange_stored
from thalweg.attention.selection import SelectedContexts
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.kernels.attend.args import ContextChunk, DecodeRows, RaggedRows
from thalweg.kernels.attend.triton import merge_state_
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.mla.backends import MlaDecodeKernel, MlaPrefillKernel
from thalweg.kernels.rope import triton as rope
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.linear import PackedShard
from thalweg.layers.mla import LATENT_NORM_EPS, MlaProjections
from thalweg.layers.paged import PagedStep, Prepare, Rest

ABSORBED = 64  # decode tokens up to which one kernel stores the latents and absorbs the queries


class PagedMla(MlaProjections, ABC):
    """See `layers.mla.Mla`, whose parameters these are. uv is stored [H, v, r] and seen as [H, r, v]: both its uses are
    one GEMM. Its kinds differ in `attention`.
    """

    def _value_weight(self, layers: LayerFactory) -> nn.Parameter:
        stored = torch.empty(self.heads, self.v, self.rank, dtype=layers.dtype, device=layers.device)
        return nn.Parameter(stored.transpose(1, 2), requires_grad=False)

    def add_to(self, h: ResidualStream, x: Activation, step: PagedStep, earlier: SelectedContexts) -> SelectedContexts:
        """h += attention(x)."""
        query_TX, latent_TD = self.down.split(x)
        if self.query_norm is not None and self.up is not None:
            query_TX = self.up.forward(self.query_norm.lazy(query_TX))
        h.add(self.out, self.attended(step, query_TX, latent_TD))
        return earlier

    def attended(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        """`attention` behind the seam."""
        return step.batch.graph_break(self.attention, step, query_TX, latent_TD)

    @abstractmethod
    def attention(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        """Stores the tokens and attends: → [T, H * v]."""

    def write_kv(self, x: Activation, step: PagedStep) -> None:
        """Stores what attention would store, and computes nothing else."""
        _, latent_TD = self.down.split(x)
        nothing = latent_TD.new_empty(len(latent_TD), 0, self.rope)
        self.write(nothing, nothing, latent_TD, step, slice(None), False)
        exchange_stored(step.batch, step.planes, ("latent",), self.layer)

    def write(
        self, query_THc: Tensor, out_THc: Tensor, latent_TD: Tensor, step: PagedStep, tokens: slice, in_place: bool
    ) -> None:
        """`rope.mla_write` of these tokens."""
        write, latents = step.kv_write(tokens), step.latents(self.layer)
        rope.mla_write(query_THc, out_THc, latent_TD, self._norm(), write, latents, in_place=in_place)

    def absorb(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep, tokens: slice, fixed: bool) -> Tensor:
        """`rope.mla_absorb` of these tokens."""
        write, latents = step.kv_write(tokens), step.latents(self.layer)
        return rope.mla_absorb(query_THd, self.uk, latent_TD, self._norm(), write, latents, fixed=fixed)

    def _norm(self) -> rope.LatentNorm:
        return rope.LatentNorm(self.latent_norm.weight, LATENT_NORM_EPS)


class LatentMla(PagedMla):
    """Keeps latents. Decode rows attend to them as they are, by `decoder`; the others to keys and values made of them,
    by `prefill`.
    """

    def __init__(
        self,
        layers: LayerFactory,
        facts: ModelFacts,
        layer: int,
        name: str,
        decoder: MlaDecodeKernel,
        prefill: MlaPrefillKernel,
        index: tuple[Sequence[PackedShard], Sequence[PackedShard]] = ((), ()),
    ) -> None:
        """index: see `layers.index_shards`."""
        super().__init__(layers, facts, layer, name, *index)
        self.decoder, self.prefill = decoder, prefill

    def attended(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        """With other than decode rows, KV is written before the graph break, since that depends on no length."""
        if step.rest is None:
            return super().attended(step, query_TX, latent_TD)
        self._store_all(query_TX, latent_TD, step)
        return step.batch.graph_break(self._of_stored, step, query_TX, latent_TD)

    def attention(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        if step.rest is not None:
            self._store_all(query_TX, latent_TD, step)
            return self._of_stored(step, query_TX, latent_TD)
        query_THD = self._absorb(query_TX.view(len(query_TX), self.heads, -1), latent_TD, step)
        exchange_stored(step.batch, step.planes, ("latent",), self.layer)
        return self._decode(query_THD, step)

    def _store_all(self, query_TX: Tensor, latent_TD: Tensor, step: PagedStep) -> None:
        """`_store`, and the latents of other ranks."""
        self._store(query_TX, latent_TD, step)
        exchange_stored(step.batch, step.planes, ("latent",), self.layer)

    def _store(self, query_TX: Tensor, latent_TD: Tensor, step: PagedStep) -> None:
        """Norms and turns the tokens' latents, and turns their queries, in place; stores the latents."""
        turned = query_TX.view(len(query_TX), self.heads, -1)[..., self.nope :]
        self.write(turned, turned, latent_TD, step, slice(None), True)

    def _of_stored(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        """Attention of tokens that are stored. → [T, H * v]."""
        query_THd, tokens = query_TX.view(len(query_TX), self.heads, -1), step.decode
        make = query_THd.new_empty if step.batch.prompts is None else query_THd.new_zeros  # padding must be finite
        out_THv = make(len(query_THd), self.heads, self.v)
        if tokens:
            out_THv[:tokens] = self._decode(self._absorbed(query_THd[:tokens]), step).view(tokens, self.heads, self.v)
        if step.rest is not None:
            first = step.rest.token
            self._ragged(query_THd[first:], latent_TD[first:], step, step.rest, out_THv[first:])
        return out_THv.flatten(1)

    def _decode(self, query_THD: Tensor, step: PagedStep) -> Tensor:
        """Absorbed: queries meet latents. → [T, H * v]."""
        return self.decoder.attend(query_THD, step.latents(self.layer), self.uv, step.rows, step.prepared)

    def _absorb(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep) -> Tensor:
        """Stores the tokens' latents, and multiplies their queries by W_UK: → [T, H, r + rope]."""
        tokens, rank = step.decode, self.rank
        if tokens <= ABSORBED:
            return self.absorb(query_THd, latent_TD, step, slice(0, tokens), False)
        query_THD = query_THd.new_empty(tokens, self.heads, rank + self.rope)
        self.write(query_THd[..., self.nope :], query_THD[..., rank:], latent_TD, step, slice(0, tokens), False)
        self._into_latents(query_THd, query_THD)
        return query_THD

    def _absorbed(self, query_THd: Tensor) -> Tensor:
        """Queries whose last dims are turned, times W_UK: → [T, H, r + rope]."""
        query_THD = query_THd.new_empty(*query_THd.shape[:2], self.rank + self.rope)
        query_THD[..., self.rank :] = query_THd[..., self.nope :]
        self._into_latents(query_THd, query_THD)
        return query_THD

    def _into_latents(self, query_THd: Tensor, query_THD: Tensor) -> None:
        """query_THD[..., :r] = query_THd[..., :n] times W_UK."""
        latent_THr, query_THn = query_THD[..., : self.rank], query_THd[..., : self.nope]
        torch.bmm(query_THn.transpose(0, 1), self.uk, out=latent_THr.transpose(0, 1))

    def _ragged(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep, rest: Rest, out_THv: Tensor) -> None:
        """Expanded: attention to the whole context; or to the step's own tokens, merged with that to each chunk of
        cached context.
        """
        starts, longest = rest.rows.starts_R1, rest.rows.max_query
        if step.whole is not None:
            rows = RaggedRows(starts, step.whole.starts_R1, longest, step.whole.max_tokens)
            self._attend(query_THd, self._gather(step, rest, step.whole), rows, out_THv)
            return
        _, lse = self._attend(query_THd, latent_TD, RaggedRows(starts, starts, longest, longest), out_THv)
        for prefix in step.prefixes:
            rows = RaggedRows(starts, prefix.starts_R1, longest, prefix.max_tokens, is_causal=False)
            merge_state_(out_THv, lse, *self._attend(query_THd, self._gather(step, rest, prefix), rows))

    def _gather(self, step: PagedStep, rest: Rest, chunk: ContextChunk) -> Tensor:
        """Cached latents of the ragged rows, contiguous: → [S, r + rope]."""
        return mla.gather(step.latents(self.layer), rest.rows.table_RL, chunk, self.rank)

    def _attend(
        self, query_THd: Tensor, latents_SD: Tensor, rows: RaggedRows, out_THv: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.prefill(query_THd, latents_SD, self.uk, self.uv, rows, scale=self.scale, out_THv=out_THv)


def prepare_by(decoder: MlaDecodeKernel) -> Prepare:
    """State of this backend that all layers of a step share."""

    def prepare(batch: Batch, tokens: int, rows: DecodeRows) -> Any:
        return decoder.prepare(rows) if tokens else None

    return prepare
