"""Multi-head latent attention with DSA where the model has an indexer (DeepSeek-V2 report §2.1, V3.2 report §2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.attention.context import Span, Step, join_groups
from thalweg.attention.selection import Choice, Choices, Selection
from thalweg.config.model import ModelFacts
from thalweg.kernels.gemm.warm import warm_for
from thalweg.kernels.rope.ref import rotate_
from thalweg.layers.indexer import Indexer
from thalweg.layers.latents import Latents
from thalweg.layers.linear import Linear, neighbours
from thalweg.layers.norm import RMSNorm
from thalweg.layers.part import Part
from thalweg.layers.rotary import softmax_scale

LATENT_NORM_EPS = 1e-6  # the class default in the published code, not rms_norm_eps


class Mla(Part):
    """Cached per token: the normed latent and the rotated key, side by side. Output heads are summed into the residual.

    down: rows q_a (or all queries, without q_lora), latent, key; then the indexer's key. up: rows of the queries, then the indexer's queries.
    uk [H, nope, r] and uv [H, r, v] are kv_b's halves.
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
        scale = softmax_scale(mla.nope + mla.rope, facts.rope)
        self.latents = Latents(facts, layer, scale, self._uk, self._uv)

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
        return self.latents.attend(span, query_NHd, choice, step)
