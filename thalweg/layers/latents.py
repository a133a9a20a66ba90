"""Attention of a step's spans to latents on pages, in plain torch: to the whole context, or under DSA to a chosen
one.
"""

from __future__ import annotations

from typing import Iterable

import torch
from torch import Tensor

from thalweg.attention.context import Span, Step
from thalweg.attention.selection import Choice
from thalweg.config.model import ModelFacts
from thalweg.kernels.mla import ref

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

    def attend(self, span: Span, query_NHd: Tensor, choice: Choice | None, step: Step) -> Tensor:
        """One group: → [N, H * v]."""
        if span.query > self.long and (choice is None or span.reach <= min(self.masked, 2 * span.query)):
            contexts = self._gather(span, span.pages, step)
            return self.plain(span, query_NHd, choice, (ref.decompress(x_SD, self.uk, self.uv) for x_SD in contexts))
        absorbed = torch.bmm(query_NHd[..., : self.nope].transpose(0, 1), self.uk).transpose(0, 1)
        query_NHD = torch.cat((absorbed, query_NHd[..., self.nope :]), -1)
        u_NHR = self._dense(span, query_NHD, step) if choice is None else self._sparse(span, query_NHD, choice, step)
        return torch.bmm(u_NHR.transpose(0, 1), self.uv).transpose(0, 1).reshape(-1, self.heads * self.v)

    def _dense(self, span: Span, query_NHD: Tensor, step: Step) -> Tensor:
        """Absorbed attention to the whole context: → [N, H, r]."""
        parts = []
        for tile in span.tiles:
            latents = self._gather(span, tile.pages, step)
            query = span.tokens_of(query_NHD, tile).view(span.rows, -1, self.rank + self.rope)
            bias = span.bias(tile).unsqueeze(1).expand(-1, self.heads, -1).reshape(span.rows, query.shape[1], -1)
            parts.append(ref.absorbed(query, latents, bias, self.scale, self.rank).view(-1, self.heads, self.rank))
        return span.join(parts)

    def _gather(self, span: Span, pages: int, step: Step) -> Tensor:
        """The latents of every row's first pages: [R, S, r + rope]."""
        stored = span.gather(step.planes.paged("latent", self.layer), pages)
        return step.planes.read("latent", self.layer, stored, self.uk.dtype)

    def _sparse(self, span: Span, query_NHD: Tensor, choice: Choice, step: Step) -> Tensor:
        """Absorbed attention to the chosen context: → [N, H, r]."""
        parts = []
        for tile, index_NK, bias_NK in zip(span.tiles, choice.positions, choice.biases, strict=True):
            query, slots_NK, bias = span.tokens_of(query_NHD, tile), span.slots(index_NK), bias_NK.unsqueeze(1)
            if len(query) <= self.piece:
                parts.append(self._gathered(query, slots_NK, bias, step))
            else:
                pieces = zip(*(torch.split(x, self.piece) for x in (query, slots_NK, bias)), strict=True)
                parts.append(torch.cat([self._gathered(q, slots, masked, step) for q, slots, masked in pieces]))
        return span.join(parts)

    def _gathered(self, query_NHD: Tensor, slots_NK: Tensor, bias_N1K: Tensor, step: Step) -> Tensor:
        """Each query token to its own latents: → [N, H, r]."""
        stored = step.planes.tokens("latent", self.layer).index_select(0, slots_NK.view(-1))
        latents = step.planes.read("latent", self.layer, stored, query_NHD.dtype)
        latents = latents.view(len(query_NHD), -1, self.rank + self.rope)
        return ref.absorbed(query_NHD, latents, bias_N1K, self.scale, self.rank)

    def plain(
        self, span: Span, query_NHd: Tensor, choice: Choice | None, contexts: Iterable[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Plain multi-head attention, row by row, to the whole context or to what a mask leaves of it: → [N, H * v].
        contexts: keys [H, S, nope + rope] and values [H, S, v] of each row.
        """
        rows = []
        queries = query_NHd.view(span.rows, span.query, self.heads, -1)
        for row, (query_qHd, (key, value)) in enumerate(zip(queries, contexts, strict=True)):
            for i, tile in enumerate(span.tiles):
                bias = span.bias(tile) if choice is None else span.only(tile, choice.positions[i], choice.biases[i])
                bias_qS = bias.view(span.rows, tile.stop - tile.start, -1)[row]
                reach, query = bias_qS.shape[1], query_qHd[tile.start : tile.stop].transpose(0, 1)
                out = ref.attend(query, key[:, :reach], value[:, :reach], bias_qS, self.scale)
                rows.append(out.transpose(0, 1).flatten(1))
        return torch.cat(rows)
