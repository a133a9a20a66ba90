"""Multi-head latent attention with DSA where the model has an indexer (DeepSeek-V2 report §2.1, V3.2 report §2.1)."""

from __future__ import annotations

from typing import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.attention.context import Span, Step, join_groups
from thalweg.attention.selection import Choice, Choices, Selection
from thalweg.config.model import ModelFacts
from thalweg.kernels.gemm.warm import warm_for
from thalweg.kernels.mla import ref
from thalweg.kernels.rope.ref import rotate_
from thalweg.layers.indexer import Indexer
from thalweg.layers.linear import Linear, neighbours
from thalweg.layers.norm import RMSNorm
from thalweg.layers.part import Part
from thalweg.layers.rotary import softmax_scale

GATHERED = 1 << 19  # elements of chosen latents gathered at once: what stays in a near cache until it is read again
LATENT_NORM_EPS = 1e-6  # the class default in the published code, not rms_norm_eps


class Mla(Part):
    """Cached per token: the normed latent and the rotated key, side by side. Output heads are summed into the residual.

    down: rows q_a (or all queries, without q_lora), latent, key; then the indexer's key. up: rows of the queries, then the indexer's queries.
    uk [H, nope, r] and uv [H, r, v] are kv_b's halves. Short queries multiply by uk and attend to latents; those of more than `long` tokens
    decompress the context once and save work on every pair. A chosen context is gathered, or, while it is short, masked.
    """

    def __init__(
        self,
        facts: ModelFacts,
        layer: int,
        indexed: bool,
        selection: Selection,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert facts.mla is not None
        mla, self.heads, self.layer = facts.mla, facts.heads, layer
        self.rank, self.nope, self.rope, self.v = mla.kv_lora, mla.nope, mla.rope, mla.v
        self.scale = softmax_scale(mla.nope + mla.rope, facts.rope)
        self.query_size = facts.heads * (mla.nope + mla.rope)
        self.down_query = mla.q_lora or self.query_size
        self.indexer, index_key, index_query = None, 0, 0
        if indexed:
            assert facts.indexer is not None
            self.indexer = Indexer(facts.indexer, facts.hidden, layer, selection, device)
            index_key, index_query = facts.indexer.dim, facts.indexer.heads * facts.indexer.dim
        self.columns = [self.down_query, self.rank + self.rope, index_key]
        heads, wide = facts.heads, self.query_size + index_query
        before = (sum(self.columns), facts.hidden), (wide if mla.q_lora else 0, mla.q_lora)
        after = (heads, mla.nope, self.rank), (heads, self.rank, mla.v), (facts.hidden, heads * mla.v)
        self._before, (down, up) = neighbours(*before, dtype=dtype, device=device)
        self._after, (self.uk, self.uv, out) = neighbours(*after, dtype=dtype, device=device)
        self._warm_before, self._warm_after = warm_for(self._before), warm_for(self._after)
        self._uk, self._uv = self.uk.data, self.uv.data
        self.down = Linear(facts.hidden, sum(self.columns), dtype, device, weight=down)
        self.query_norm = RMSNorm(mla.q_lora, LATENT_NORM_EPS, device) if mla.q_lora else None
        self.up = Linear(mla.q_lora, wide, dtype, device, weight=up) if mla.q_lora else None
        self.latent_norm = RMSNorm(self.rank, LATENT_NORM_EPS, device)
        self.out = Linear(heads * mla.v, facts.hidden, dtype, device, weight=out)
        absorbed, plain = 2 * self.rank + self.rope, mla.nope + mla.rope + mla.v  # work for one key by one head
        self.long = self.rank * (mla.nope + mla.v) // (absorbed - plain) if absorbed > plain else 1 << 30
        chosen = facts.indexer.topk * (self.rank + self.rope) if facts.indexer is not None else 1
        self.piece = max(GATHERED // chosen, 1)
        # up to here a mask over everything costs less than gathering the chosen latents of every query token, measured as twice the work
        self.masked = 2 * facts.indexer.topk * absorbed // plain if facts.indexer is not None else 0

    def keep(self, latent_TD: Tensor, index_key_TD: Tensor, step: Step) -> None:
        """Stores this step's tokens: the latent with its key, normed and rotated in place, and the index key."""
        self.latent_norm.forward_(latent_TD[:, : self.rank])
        rotate_(latent_TD, step.cis_T1c, self.rank, 1, 0)
        self.store(latent_TD, step)
        if self.indexer is not None:
            self.indexer.keep(index_key_TD, step)

    def store(self, latent_TD: Tensor, step: Step) -> None:
        """What attention will read of these tokens."""
        step.planes.write("latent", self.layer, step.batch.write_T, latent_TD)

    def observe(self, x_TH: Tensor, step: Step) -> None:
        """Stores what attention would store, and computes nothing else."""
        down_TX = F.linear(x_TH, self.down.weight[self.down_query :])
        latent_TD, index_key_TD = torch.split(down_TX, self.columns[1:], 1)
        self.keep(latent_TD, index_key_TD, step)

    def add_(self, h_TH: Tensor, x_TH: Tensor, step: Step, earlier: Choices) -> Choices:
        """h += attention(x), in place. Returns the choice of context made here, or `earlier` in a layer without an indexer."""
        self._warm_before(self._before)
        query_TX, latent_TD, index_key_TD = torch.split(self.down.forward(x_TH), self.columns, 1)
        if self.query_norm is not None and self.up is not None:
            query_TX = self.up.forward(self.query_norm.forward(query_TX))
        self.keep(latent_TD, index_key_TD, step)
        choices = earlier
        if self.indexer is not None:
            choices = self.indexer.choose(x_TH, query_TX[:, self.query_size :], step)
        self._warm_after(self._after)
        rotate_(query_TX, step.cis_T1c, self.nope, self.heads, self.nope + self.rope)
        query_THd = query_TX[:, : self.query_size].view(-1, self.heads, self.nope + self.rope)
        parts = [
            self.attend(span, span.part(query_THd), choice, step)
            for span, choice in zip(step.spans, choices, strict=True)
        ]
        self.out.add_(h_TH, join_groups(parts))
        return choices

    def attend(self, span: Span, query_NHd: Tensor, choice: Choice | None, step: Step) -> Tensor:
        """One group: → [N, H * v]."""
        if span.query > self.long and (choice is None or span.reach <= min(self.masked, 2 * span.query)):
            contexts = self._gather(span, span.pages, step)
            return self.plain(span, query_NHd, choice, (ref.decompress(x_SD, self._uk, self._uv) for x_SD in contexts))
        absorbed = torch.bmm(query_NHd[..., : self.nope].transpose(0, 1), self._uk).transpose(0, 1)
        query_NHD = torch.cat((absorbed, query_NHd[..., self.nope :]), -1)
        u_NHR = self._dense(span, query_NHD, step) if choice is None else self._sparse(span, query_NHD, choice, step)
        return torch.bmm(u_NHR.transpose(0, 1), self._uv).transpose(0, 1).reshape(-1, self.heads * self.v)

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
        return step.planes.read("latent", self.layer, stored, self._uk.dtype)

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
        """Plain multi-head attention, row by row, to the whole context or to what a mask leaves of it: → [N, H * v]. contexts: keys [H, S, nope +
        rope] and values [H, S, v] of each row."""
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
