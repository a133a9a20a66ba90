"""Multi-head latent attention with DSA where the model has an indexer (facts §2.3, §2.7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.attention.context import Span, Step, join_groups
from thalweg.attention.selection import Choice, Choices, Selection
from thalweg.config.model import ModelFacts
from thalweg.kernels.gemm.warm import warm_for
from thalweg.kernels.mla import ref
from thalweg.kernels.rope.ref import rotate_
from thalweg.layers.indexer import Indexer
from thalweg.layers.linear import Linear, parameter
from thalweg.layers.norm import RMSNorm
from thalweg.layers.rotary import softmax_scale

LATENT_NORM_EPS = 1e-6  # the class default in the published code, not rms_norm_eps (facts §2.1)


class Mla(nn.Module):
    """Cached per token: the normed latent and the rotated key, side by side. Output heads are summed into the residual.

    down: rows q_a (or all queries, without q_lora), latent, key; then the indexer's key. up: rows of the queries, then the indexer's queries.
    uk [H, nope, r] and uv [H, r, v] are kv_b's halves. Short queries multiply by uk and attend to latents; long ones decompress the
    context once: that pays above `long` query tokens, where (r + v) · nope-sized work a key is saved on every query.
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
            self.indexer = Indexer(facts.indexer, facts.hidden, mla.rope, layer, selection, device)
            index_key, index_query = facts.indexer.dim, facts.indexer.heads * facts.indexer.dim
        self.down = Linear(facts.hidden, self.down_query + self.rank + self.rope + index_key, dtype, device)
        self.query_norm = RMSNorm(mla.q_lora, LATENT_NORM_EPS, device) if mla.q_lora else None
        self.up = Linear(mla.q_lora, self.query_size + index_query, dtype, device) if mla.q_lora else None
        self.latent_norm = RMSNorm(self.rank, LATENT_NORM_EPS, device)
        self.uk = parameter(facts.heads, mla.nope, self.rank, dtype=dtype, device=device)
        self.uv = parameter(facts.heads, self.rank, mla.v, dtype=dtype, device=device)
        self.warm = warm_for(device)
        self.out = Linear(facts.heads * mla.v, facts.hidden, dtype, device)
        saved = (2 * self.rank + self.rope) - (mla.nope + mla.rope + mla.v)
        self.long = self.rank * (mla.nope + mla.v) // saved if saved > 0 else 1 << 30

    def keep(self, latent_TX: Tensor, step: Step) -> None:
        """Stores latent, key and index key of this step's tokens. latent_TX: output of `down` from the latent's columns on, edited."""
        rank, stored = self.rank, self.rank + self.rope
        self.latent_norm.forward_(latent_TX[:, :rank])
        rotate_(latent_TX[:, rank:stored], step.cis_Tc)
        step.planes.tokens("latent", self.layer).index_copy_(0, step.batch.write_T, latent_TX[:, :stored])
        if self.indexer is not None:
            self.indexer.keep(latent_TX[:, stored:], step)

    def observe(self, x_TH: Tensor, step: Step) -> None:
        """Stores what attention would store, and computes nothing else."""
        self.keep(F.linear(x_TH, self.down.weight[self.down_query :]), step)

    def add_(self, h_TH: Tensor, x_TH: Tensor, step: Step, earlier: Choices) -> Choices:
        """h += attention(x), in place. Returns the choice of context made here, or `earlier` in a layer without an indexer."""
        down_TX = self.down.forward(x_TH)
        query_TX = down_TX[:, : self.down_query]
        if self.query_norm is not None and self.up is not None:
            query_TX = self.up.forward(self.query_norm.forward(query_TX))
        self.keep(down_TX[:, self.down_query :], step)
        choices = earlier
        if self.indexer is not None:
            choices = self.indexer.choose(x_TH, query_TX[:, self.query_size :], step)
        query_THd = query_TX[:, : self.query_size].view(-1, self.heads, self.nope + self.rope)
        rotate_(query_THd[..., self.nope :], step.cis_T1c)
        parts = [self._attend(span, span.part(query_THd), choice, step) for span, choice in zip(step.spans, choices, strict=True)]
        self.out.add_(h_TH, join_groups(parts))
        return choices

    def _attend(self, span: Span, query_NHd: Tensor, choice: Choice | None, step: Step) -> Tensor:
        """One group: → [N, H * v]."""
        if choice is None and span.query > self.long:
            return self._decompressed(span, query_NHd, step)
        uk, uv = self.uk, self.uv
        self.warm(uk)
        absorbed = torch.bmm(query_NHd[..., : self.nope].transpose(0, 1), uk).transpose(0, 1)
        query_NHD = torch.cat((absorbed, query_NHd[..., self.nope :]), -1)
        u_NHR = self._dense(span, query_NHD, step) if choice is None else self._sparse(span, query_NHD, choice, step)
        self.warm(uv)
        return torch.bmm(u_NHR.transpose(0, 1), uv).transpose(0, 1).reshape(-1, self.heads * self.v)

    def _dense(self, span: Span, query_NHD: Tensor, step: Step) -> Tensor:
        """Absorbed attention to the whole context: → [N, H, r]."""
        parts = []
        for tile in span.tiles:
            latents = span.gather(step.planes.paged("latent", self.layer), tile.pages)
            query = span.tokens_of(query_NHD, tile).view(span.rows, -1, self.rank + self.rope)
            bias = span.bias(tile).unsqueeze(1).expand(-1, self.heads, -1).reshape(span.rows, query.shape[1], -1)
            parts.append(ref.absorbed(query, latents, bias, self.scale, self.rank).view(-1, self.heads, self.rank))
        return span.join(parts)

    def _sparse(self, span: Span, query_NHD: Tensor, choice: Choice, step: Step) -> Tensor:
        """Absorbed attention to the chosen context: → [N, H, r]."""
        plane, parts = step.planes.tokens("latent", self.layer), []
        for tile, slots_NK, bias_NK in zip(span.tiles, choice.slots, choice.biases, strict=True):
            latents = plane.index_select(0, slots_NK.view(-1)).view(*slots_NK.shape, -1)
            query = span.tokens_of(query_NHD, tile)
            parts.append(ref.absorbed(query, latents, bias_NK.unsqueeze(1), self.scale, self.rank))
        return span.join(parts)

    def _decompressed(self, span: Span, query_NHd: Tensor, step: Step) -> Tensor:
        """Plain multi-head attention, row by row: → [N, H * v]."""
        latents_RSD = span.gather(step.planes.paged("latent", self.layer), span.pages)
        rows = []
        for row, query_qHd in enumerate(query_NHd.view(span.rows, span.query, self.heads, -1)):
            key, value = ref.decompress(latents_RSD[row], self.uk, self.uv)
            for tile in span.tiles:
                bias_qS = span.bias(tile).view(span.rows, tile.stop - tile.start, -1)[row]
                reach, query = bias_qS.shape[1], query_qHd[tile.start : tile.stop].transpose(0, 1)
                out = ref.attend(query, key[:, :reach], value[:, :reach], bias_qS, self.scale)
                rows.append(out.transpose(0, 1).flatten(1))
        return torch.cat(rows)
