"""Grouped-query attention, with biases (Qwen2) and query and key norms (Qwen3) where the model has them."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.attention.context import Span, Step, join_groups
from thalweg.config.model import ModelFacts
from thalweg.kernels.gqa import ref
from thalweg.kernels.rope.ref import rotate_
from thalweg.layers.linear import Linear
from thalweg.layers.norm import RMSNorm
from thalweg.layers.part import Part


class Gqa(Part):
    """qkv: rows of the query heads, then key heads, then value heads. Cached per token: rotated keys and values of all key heads. inputs: numbers
    that queries, keys and values are made of; 0 is as many as the hidden state has."""

    def __init__(
        self,
        facts: ModelFacts,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        qk_norm: bool,
        out_bias: bool,
        inputs: int = 0,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.layer = facts.heads, facts.kv_heads, facts.head_dim, layer
        self.qkv = Linear(
            inputs or facts.hidden, (self.heads + 2 * self.kv_heads) * self.dim, dtype, device, facts.qkv_bias
        )
        self.columns = [self.heads, self.kv_heads, self.kv_heads]
        self.query_norm = RMSNorm(self.dim, facts.norm_eps, device) if qk_norm else None
        self.key_norm = RMSNorm(self.dim, facts.norm_eps, device) if qk_norm else None
        self.out = Linear(self.heads * self.dim, facts.hidden, dtype, device, out_bias)

    def add_(self, h_TH: Tensor, x_TX: Tensor, step: Step) -> Tensor:
        """h += attention(x), in place."""
        query = self._store(x_TX, step)
        return self.out.add_(h_TH, join_groups([self._attend(span, span.part(query), step) for span in step.spans]))

    def observe(self, x_TX: Tensor, step: Step) -> None:
        """Stores what attention would store, and computes no more than projections."""
        self._store(x_TX, step)

    def _store(self, x_TX: Tensor, step: Step) -> Tensor:
        """Stores the tokens' keys and values; → their queries, rotated, [T, H, d]."""
        qkv_TX = self.qkv.forward(x_TX)
        qkv_THd = qkv_TX.view(len(x_TX), -1, self.dim)
        query, key, value = torch.split(qkv_THd, self.columns, 1)
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.forward_(query)
            self.key_norm.forward_(key)
        rotate_(qkv_TX, step.cis_T1c, 0, self.heads + self.kv_heads, self.dim)
        step.planes.write("key", self.layer, step.batch.write_T, key.flatten(1))
        step.planes.write("value", self.layer, step.batch.write_T, value.flatten(1))
        return query

    def _attend(self, span: Span, query_NHd: Tensor, step: Step) -> Tensor:
        """One group: → [N, H * d]."""
        context = (span.rows, -1, self.kv_heads, self.dim)
        key, value = (
            step.planes.read(
                name, self.layer, span.gather(step.planes.paged(name, self.layer), span.pages), query_NHd.dtype
            ).view(context)
            for name in ("key", "value")
        )
        parts = []
        for tile in span.tiles:
            bias = span.bias(tile).view(span.rows, tile.stop - tile.start, -1)
            query = span.tokens_of(query_NHd, tile).view(span.rows, tile.stop - tile.start, self.heads, self.dim)
            out = ref.attend(query, key[:, : bias.shape[-1]], value[:, : bias.shape[-1]], bias)
            parts.append(out.reshape(-1, self.heads * self.dim))
        return span.join(parts)
