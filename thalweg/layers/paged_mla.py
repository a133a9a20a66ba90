"""Multi-head latent attention on pages: decode rows on latents, the others decompressed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.attention.selection import SelectedContexts
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.mla.paged import MlaDecodeKernel, MlaDecodeRows, MlaPrefillKernel
from thalweg.kernels.rope import triton as rope
from thalweg.layers.factory import LayerFactory
from thalweg.layers.mla import LATENT_NORM_EPS, MlaProjections
from thalweg.layers.paged import PagedStep, Prefix, Prepare, Rest
from thalweg.layers.residual import Activation, ResidualStream

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

    def write(
        self, query_THc: Tensor, rotated_THc: Tensor, latent_TD: Tensor, step: PagedStep, tokens: slice, in_place: bool
    ) -> None:
        """`rope.mla_write` of these tokens."""
        rope.mla_write(
            query_THc,
            rotated_THc,
            latent_TD,
            self.latent_norm.weight,
            step.cos_SC,
            step.sin_SC,
            step.batch.positions_T[tokens],
            step.batch.write_T[tokens],
            step.planes.tokens("latent", self.layer),
            scale=step.planes.scale("latent", self.layer),
            eps=LATENT_NORM_EPS,
            in_place=in_place,
        )

    def absorb(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep, tokens: slice, fixed: bool) -> Tensor:
        """`rope.mla_absorb` of these tokens."""
        return rope.mla_absorb(
            query_THd,
            self.uk,
            latent_TD,
            self.latent_norm.weight,
            step.cos_SC,
            step.sin_SC,
            step.batch.positions_T[tokens],
            step.batch.write_T[tokens],
            step.planes.tokens("latent", self.layer),
            scale=step.planes.scale("latent", self.layer),
            eps=LATENT_NORM_EPS,
            fixed=fixed,
        )


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
    ) -> None:
        super().__init__(layers, facts, layer, name)
        self.decoder, self.prefill = decoder, prefill

    def attended(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        """Where there are more than decode rows tokens are stored ahead of the seam, since that depends on no
        length.
        """
        if step.rest is None:
            return super().attended(step, query_TX, latent_TD)
        self._store(query_TX, latent_TD, step)
        return step.batch.graph_break(self._of_stored, step, query_TX, latent_TD)

    def attention(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        if step.rest is not None:
            self._store(query_TX, latent_TD, step)
            return self._of_stored(step, query_TX, latent_TD)
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        return self._decode(self._absorb(query_THd, latent_TD, step), step)

    def _store(self, query_TX: Tensor, latent_TD: Tensor, step: PagedStep) -> None:
        """Norms and turns the tokens' latents, and turns their queries, in place; stores the latents."""
        turned = query_TX.view(len(query_TX), self.heads, -1)[..., self.nope :]
        self.write(turned, turned, latent_TD, step, slice(None), True)

    def _of_stored(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        """Attention of tokens that are stored. → [T, H * v]."""
        query_THd, tokens = query_TX.view(len(query_TX), self.heads, -1), step.decode
        out_THv = query_THd.new_empty(len(query_THd), self.heads, self.v)
        if tokens:
            query_THD = query_THd.new_empty(tokens, self.heads, self.rank + self.rope)
            query_THD[..., self.rank :] = query_THd[:tokens, :, self.nope :]
            self._into_latents(query_THd[:tokens], query_THD)
            out_THv[:tokens] = self._decode(query_THD, step).view(tokens, self.heads, self.v)
        if step.rest is not None:
            self._ragged(query_THd[tokens:], latent_TD[tokens:], step, step.rest, out_THv[tokens:])
        return out_THv.flatten(1)

    def _decode(self, query_THD: Tensor, step: PagedStep) -> Tensor:
        """Absorbed: queries meet latents. → [T, H * v]."""
        return self.decoder.attend(
            query_THD,
            step.planes.paged("latent", self.layer),
            step.planes.scale("latent", self.layer),
            self.uv,
            decode_rows(step.batch, step.decode, step.query)._replace(max_kv_len=step.max_kv_len, rows_T=step.rows_T),
            step.prepared,
        )

    def _absorb(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep) -> Tensor:
        """Stores the tokens' latents, and multiplies their queries by W_UK: → [T, H, r + rope]."""
        tokens, rank = step.decode, self.rank
        if tokens <= ABSORBED:
            return self.absorb(query_THd, latent_TD, step, slice(0, tokens), False)
        query_THD = query_THd.new_empty(tokens, self.heads, rank + self.rope)
        self.write(query_THd[..., self.nope :], query_THD[..., rank:], latent_TD, step, slice(0, tokens), False)
        self._into_latents(query_THd, query_THD)
        return query_THD

    def _into_latents(self, query_THd: Tensor, query_THD: Tensor) -> None:
        """query_THD[..., :r] = query_THd[..., :n] times W_UK."""
        latent_THr, query_THn = query_THD[..., : self.rank], query_THd[..., : self.nope]
        torch.bmm(query_THn.transpose(0, 1), self.uk, out=latent_THr.transpose(0, 1))

    def _ragged(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep, rest: Rest, out_THv: Tensor) -> None:
        """Decompressed: attention to the whole context, or to the step's own tokens, merged with that to each chunk of
        cached context.
        """
        starts, longest = rest.starts_R1, rest.longest
        if step.whole is not None:
            latents_SD, begins, most = self._gather(step, rest, step.whole), step.whole.starts_R1, step.whole.longest
            self._attend(query_THd, latents_SD, starts, begins, longest, most, True, out_THv)
            return
        _, lse = self._attend(query_THd, latent_TD, starts, starts, longest, longest, True, out_THv)
        for prefix in step.prefixes:
            latents_SD, begins = self._gather(step, rest, prefix), prefix.starts_R1
            other, other_lse = self._attend(query_THd, latents_SD, starts, begins, longest, prefix.longest, False)
            mla.merge_state_(out_THv, lse, other, other_lse)

    def _gather(self, step: PagedStep, rest: Rest, prefix: Prefix) -> Tensor:
        """Cached latents of the ragged rows, side by side: → [S, r + rope]."""
        return mla.gather(
            step.planes.paged("latent", self.layer),
            step.batch.table_RP[rest.row :],
            prefix.starts_R1,
            prefix.tokens,
            first_R=prefix.first_R,
            rank=self.rank,
            max_context=prefix.longest,
            plane_scale=step.planes.scale("latent", self.layer),
        )

    def _attend(
        self,
        query_THd: Tensor,
        latents_SD: Tensor,
        starts: Tensor,
        context_starts: Tensor,
        longest: int,
        longest_context: int,
        causal: bool,
        out_THv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.prefill(
            query_THd,
            latents_SD,
            self.uk,
            self.uv,
            starts,
            context_starts,
            max_query=longest,
            max_context=longest_context,
            scale=self.scale,
            causal=causal,
            out_THv=out_THv,
        )


def decode_rows(batch: Batch, tokens: int, query: int) -> MlaDecodeRows:
    """The decode rows of a step as the kernels see them."""
    max_kv_len, tree_mask_T = batch.groups[0].max_kv_len, batch.tree_mask(tokens)
    return MlaDecodeRows(batch.table_RP, batch.columns_T[:tokens], query, max_kv_len, tree_mask_T=tree_mask_T)


def prepare_by(decoder: MlaDecodeKernel) -> Prepare:
    """What this backend shares among the layers of a step."""

    def prepare(batch: Batch, tokens: int, query: int) -> Any:
        return decoder.prepare(decode_rows(batch, tokens, query)) if tokens else None

    return prepare
