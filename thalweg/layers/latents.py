"""Attention of a step's spans to latents on pages, in plain torch: to the whole context, or under DSA to a chosen
one.
"""

from __future__ import annotations

from typing import Iterable

import torch
from torch import Tensor

from thalweg.attention.context import AttentionGroup, AttentionMetadata
from thalweg.attention.selection import SelectedContext
from thalweg.config.model import ModelFacts
from thalweg.kernels.attend import ref

# elements of chosen latents gathered at once: what stays in a CPU's near cache until it is read again; on a GPU a whole
# tile's
GATHERED, GATHERED_ON_GPU = 1 << 19, 1 << 27


class Latents:
    """Reads one layer's plane. uk [H, nope, r], uv [H, r, v]: kv_b's halves, which may be refilled in place.

    Short queries multiply by uk and attend to latents; those of more than `long` tokens decompress the context once and
    save work on every pair. A chosen context is gathered, or, while it is short, masked.
    """

    def __init__(self, facts: ModelFacts, layer: int, scale: float, uk: Tensor, uv: Tensor) -> None:
        assert facts.mla is not None
        mla, self.heads, self.layer, self.scale, self.uk, self.uv = facts.mla, len(uk), layer, scale, uk, uv
        self.rank, self.nope, self.rope, self.v = mla.kv_lora, mla.nope, mla.rope, mla.v
        absorbed, plain = 2 * self.rank + self.rope, mla.nope + mla.rope + mla.v  # work for one key by one head
        self.long = self.rank * (mla.nope + mla.v) // (absorbed - plain) if absorbed > plain else 1 << 30
        chosen = facts.indexer.topk * (self.rank + self.rope) if facts.indexer is not None else 1
        self.piece = max((GATHERED_ON_GPU if uk.is_cuda else GATHERED) // chosen, 1)
        # up to here a mask over everything costs less than gathering the chosen latents of every query token, measured
        # as twice the work
        self.masked = 2 * facts.indexer.topk * absorbed // plain if facts.indexer is not None else 0

    def attend(
        self, group: AttentionGroup, query_NHd: Tensor, selected: SelectedContext | None, metadata: AttentionMetadata
    ) -> Tensor:
        """One group: → [N, H * v]."""
        if group.query > self.long and (selected is None or group.max_kv_len <= min(self.masked, 2 * group.query)):
            contexts = self._gather(group, group.pages, metadata)
            return self.plain(
                group, query_NHd, selected, (ref.expand_latents(x_SD, self.uk, self.uv) for x_SD in contexts)
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
        parts = []
        for tile in group.tiles:
            latents = self._gather(group, tile.pages, metadata)
            query = group.take_tile(query_NHD, tile).view(group.rows, -1, self.rank + self.rope)
            bias = group.bias(tile).unsqueeze(1).expand(-1, self.heads, -1).reshape(group.rows, query.shape[1], -1)
            parts.append(self._absorbed(query, latents, bias).view(-1, self.heads, self.rank))
        return group.join_tiles(parts)

    def _gather(self, group: AttentionGroup, pages: int, metadata: AttentionMetadata) -> Tensor:
        """The latents of every row's first pages: [R, S, r + rope]."""
        stored = group.gather(metadata.planes.paged("latent", self.layer), pages)
        return metadata.planes.read("latent", self.layer, stored, self.uk.dtype)

    def _sparse(
        self, group: AttentionGroup, query_NHD: Tensor, selected: SelectedContext, metadata: AttentionMetadata
    ) -> Tensor:
        """Absorbed attention to the chosen context: → [N, H, r]."""
        parts = []
        for tile, index_NK, bias_NK in zip(group.tiles, selected.positions, selected.biases, strict=True):
            query, slots_NK, bias = group.take_tile(query_NHD, tile), group.plane_rows(index_NK), bias_NK.unsqueeze(1)
            if len(query) <= self.piece:
                parts.append(self._gathered(query, slots_NK, bias, metadata))
            else:
                pieces = zip(*(torch.split(x, self.piece) for x in (query, slots_NK, bias)), strict=True)
                parts.append(torch.cat([self._gathered(q, slots, masked, metadata) for q, slots, masked in pieces]))
        return group.join_tiles(parts)

    def _gathered(self, query_NHD: Tensor, slots_NK: Tensor, bias_N1K: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Each query token to its own latents: → [N, H, r]."""
        stored = metadata.planes.tokens("latent", self.layer).index_select(0, slots_NK.view(-1))
        latents = metadata.planes.read("latent", self.layer, stored, query_NHD.dtype)
        latents = latents.view(len(query_NHD), -1, self.rank + self.rope)
        return self._absorbed(query_NHD, latents, bias_N1K)

    def _absorbed(self, query_BQD: Tensor, latents_BKD: Tensor, bias: Tensor) -> Tensor:
        return ref.attend(query_BQD, latents_BKD, latents_BKD[..., : self.rank], bias, self.scale)

    def plain(
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
                out = ref.attend(query, key[:, :max_kv_len], value[:, :max_kv_len], bias_qS, self.scale)
                rows.append(out.transpose(0, 1).flatten(1))
        return torch.cat(rows)
