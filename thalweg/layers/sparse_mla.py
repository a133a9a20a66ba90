"""Latent attention with DSA beside the kernels of a GPU: projections and norms are kernels, the indexer and attention itself plain torch."""

from __future__ import annotations

from typing import Callable, Protocol

import torch
from torch import Tensor

from thalweg.attention.context import Step, join_groups
from thalweg.attention.selection import Choices, best
from thalweg.config.model import ModelFacts
from thalweg.kernels.rope.ref import rotate_
from thalweg.layers.indexer import Indexer
from thalweg.layers.latents import Latents
from thalweg.layers.linear import Linear, parameter
from thalweg.layers.mla import LATENT_NORM_EPS
from thalweg.layers.part import Part
from thalweg.layers.parts import Norm, Projection
from thalweg.layers.rotary import softmax_scale


class Rows(Protocol):
    """A norm that has not been computed yet."""

    def rows(self) -> Tensor: ...


class SparseMla(Part):
    """See `layers.mla.Mla`, of which this is another cut: the indexer's projections, index_key [dim, hidden] and index_query [heads * dim, q_lora],
    are layers of their own in the model's type. Their rows are rearranged when they are loaded, which blocks of FP8 do not allow.

    linear(inputs, outputs) and norm(dim, eps) make layers of the caller's kind.
    """

    def __init__(
        self,
        facts: ModelFacts,
        layer: int,
        indexed: bool,
        linear: Callable[[int, int], Projection],
        norm: Callable[[int, float], Norm],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert facts.mla is not None and facts.indexer is not None and facts.mla.q_lora is not None
        mla, index, self.heads, self.layer = facts.mla, facts.indexer, facts.heads, layer
        self.rank, self.nope, self.rope = mla.kv_lora, mla.nope, mla.rope
        self.down_query = mla.q_lora
        self.down = linear(facts.hidden, mla.q_lora + mla.kv_lora + mla.rope)
        self.query_norm = norm(mla.q_lora, LATENT_NORM_EPS)
        self.up = linear(mla.q_lora, facts.heads * (mla.nope + mla.rope))
        self.latent_norm = norm(mla.kv_lora, LATENT_NORM_EPS)
        self.uk = parameter(facts.heads, mla.nope, mla.kv_lora, dtype=dtype, device=device)
        self.uv = parameter(facts.heads, mla.kv_lora, mla.v, dtype=dtype, device=device)
        self.out = linear(facts.heads * mla.v, facts.hidden)
        self.indexer = None
        if indexed:
            self.indexer = Indexer(index, facts.hidden, layer, best, device)
            self.index_key = Linear(facts.hidden, index.dim, dtype, device)
            self.index_query = Linear(mla.q_lora, index.heads * index.dim, dtype, device)
        scale = softmax_scale(mla.nope + mla.rope, facts.rope)
        self.latents = Latents(facts, layer, scale, self.uk.data, self.uv.data)

    def add_(self, h_TH: Tensor, x_TH: Tensor | Rows, step: Step, earlier: Choices) -> Choices:
        """h += attention(x), in place. Returns the choice of context made here, or `earlier` in a layer without an indexer."""
        x_TH = _rows(x_TH)
        down_TX = self.down.forward(x_TH)
        latent_Tq = self.query_norm.forward(down_TX[:, : self.down_query])
        query_TX = self.up.forward(latent_Tq)
        self._keep(x_TH, down_TX[:, self.down_query :], step)
        choices = earlier
        if self.indexer is not None:
            choices = self.indexer.choose(x_TH, self.index_query.forward(latent_Tq), step)
        rotate_(query_TX, step.cis_T1c, self.nope, self.heads, self.nope + self.rope)
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        parts = [
            self.latents.attend(span, span.part(query_THd), choice, step)
            for span, choice in zip(step.spans, choices, strict=True)
        ]
        self.out.add_(h_TH, join_groups(parts))
        return choices

    def observe(self, x_TH: Tensor | Rows, step: Step) -> None:
        """Stores what attention would store, and computes nothing else."""
        x_TH = _rows(x_TH)
        self._keep(x_TH, self.down.forward(x_TH)[:, self.down_query :], step)

    def _keep(self, x_TH: Tensor, latent_TD: Tensor, step: Step) -> None:
        """Stores this step's tokens: the latent, normed, with its key, rotated; and the index key."""
        kept_TD = torch.cat([self.latent_norm.forward(latent_TD[:, : self.rank]), latent_TD[:, self.rank :]], 1)
        rotate_(kept_TD, step.cis_T1c, self.rank, 1, 0)
        step.planes.write("latent", self.layer, step.batch.write_T, kept_TD)
        if self.indexer is not None:
            self.indexer.keep(self.index_key.forward(x_TH), step)


def _rows(x_TH: Tensor | Rows) -> Tensor:
    return x_TH if isinstance(x_TH, Tensor) else x_TH.rows()
