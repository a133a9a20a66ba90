"""Grouped-query attention on pages."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.config.model import ModelFacts
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.rope import triton as rope
from thalweg.layers.fused import FusedNorm
from thalweg.layers.paged import MakeLinear, PagedStep, Rest
from thalweg.layers.part import Part


class PagedGqa(Part):
    """See `layers.gqa.Gqa`, whose parameters these are."""

    def __init__(
        self, facts: ModelFacts, layer: int, linear: MakeLinear, device: torch.device, *, qk_norm: bool, out_bias: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.layer = facts.heads, facts.kv_heads, facts.head_dim, layer
        self.scale, self.context, self.eps = self.dim**-0.5, facts.context, facts.norm_eps
        self.qkv = linear(facts.hidden, (self.heads + 2 * self.kv_heads) * self.dim, facts.qkv_bias)
        self.query_norm = FusedNorm(self.dim, facts.norm_eps, device) if qk_norm else None
        self.key_norm = FusedNorm(self.dim, facts.norm_eps, device) if qk_norm else None
        self.out = linear(self.heads * self.dim, facts.hidden, out_bias)

    def add_(self, h_TH: Tensor, x_TH: Tensor, step: PagedStep) -> Tensor:
        """h += attention(x), in place."""
        qkv_THd = self.qkv.forward(x_TH).view(len(x_TH), -1, self.dim)
        query, key, value = torch.split(qkv_THd, [self.heads, self.kv_heads, self.kv_heads], 1)
        planes, batch = step.planes, step.batch
        rope.gqa_write(
            query,
            key,
            value,
            step.cos_SC,
            step.sin_SC,
            batch.positions_T,
            batch.write_T,
            planes.tokens("key", self.layer).view(-1, self.kv_heads, self.dim),
            planes.tokens("value", self.layer).view(-1, self.kv_heads, self.dim),
            query_norm_d=None if self.query_norm is None else self.query_norm.weight,
            key_norm_d=None if self.key_norm is None else self.key_norm.weight,
            eps=self.eps,
        )
        parts = []
        if step.decode:
            parts.append(self._decode(query[: step.decode], step))
        if step.rest is not None:
            parts.append(self._ragged(query[step.decode :], step, step.rest))
        return self.out.add_(h_TH, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _pages(self, step: PagedStep) -> tuple[Tensor, Tensor]:
        key, value = (step.planes.paged(name, self.layer) for name in ("key", "value"))
        heads = (*key.shape[:2], self.kv_heads, self.dim)
        return key.view(heads), value.view(heads)

    def _decode(self, query_THd: Tensor, step: PagedStep) -> Tensor:
        splits = gqa.splits_for(step.decode, self.heads, self.kv_heads, step.reach, step.query)
        key, value = self._pages(step)
        positions = step.batch.positions_T[: step.decode]
        partial, lse = gqa.decode(
            query_THd, key, value, step.batch.table_RP, positions, scale=self.scale, splits=splits, query=step.query
        )
        return gqa.merge(partial, lse).flatten(1)

    def _ragged(self, query_THd: Tensor, step: PagedStep, rest: Rest) -> Tensor:
        key, value = self._pages(step)
        out_THd = gqa.prefill(
            query_THd,
            key,
            value,
            step.batch.table_RP[rest.row :],
            step.batch.positions_T[rest.token :],
            rest.starts_R1,
            max_query=rest.longest,
            scale=self.scale,
        )
        return out_THd.flatten(1)
