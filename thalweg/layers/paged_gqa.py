"""Grouped-query attention on pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.attend.triton import merge_state_
from thalweg.kernels.gqa import ext as fa3
from thalweg.kernels.gqa import flashinfer
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.rope import triton as rope
from thalweg.layers.factory import LayerFactory
from thalweg.layers.gqa import GqaProjections
from thalweg.layers.paged import PagedStep, Prefix, Prepare, Ragged, Rest, nothing, ragged
from thalweg.layers.residual import Activation, ResidualStream


class Cache(NamedTuple):
    """A layer's pages [P, 64, K, d], and of e4m3 ones their scales, float32 [1]."""

    key_PSKd: Tensor
    value_PSKd: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None


class PagedGqa(GqaProjections):
    """Decode rows of one token go through a kernel that also norms and rotates them and stores their keys; all others
    are stored first.
    """

    def __init__(
        self,
        layers: LayerFactory,
        facts: ModelFacts,
        layer: int,
        name: str,
        *,
        qk_norm: bool,
        out_bias: bool,
        inputs: int = 0,
    ) -> None:
        super().__init__(layers, facts, layer, name, qk_norm=qk_norm, out_bias=out_bias, inputs=inputs)
        self.scale, self.kernels = self.dim**-0.5, layers.kernels

    def add_to(self, h: ResidualStream, x: Activation, step: PagedStep) -> None:
        """h += attention(x)."""
        h.add(self.out, step.batch.graph_break(self._attention, step, self.qkv.forward(x)))

    def write_kv(self, x: Activation, step: PagedStep) -> None:
        """Stores what attention would store, and computes projections only."""
        qkv_TX = self.qkv.forward(x)
        self._write(qkv_TX.view(len(qkv_TX), -1, self.dim), step, 0)

    def _attention(self, step: PagedStep, qkv_TX: Tensor) -> Tensor:
        """Stores the tokens' keys and values and attends: → [T, H * d]."""
        qkv_THd = qkv_TX.view(len(qkv_TX), -1, self.dim)
        own = self.kernels.decode == "triton" and not self.kernels.deterministic
        fresh = step.decode if own and step.query == 1 and step.tree_mask_T is None else 0
        if fresh < len(qkv_THd):
            self._write(qkv_THd, step, fresh)
        parts = []
        if step.decode:
            parts.append(self._decode(qkv_THd[: step.decode], step, fresh > 0))
        if step.rest is not None:
            parts.append(self._ragged(qkv_THd[step.decode :], step, step.rest))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _split(self, qkv_THd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = torch.split(qkv_THd, self.columns, 1)
        return query, key, value

    def _norms(self) -> tuple[Tensor | None, Tensor | None]:
        if self.query_norm is None or self.key_norm is None:
            return None, None
        return self.query_norm.weight, self.key_norm.weight

    def _cache(self, step: PagedStep) -> Cache:
        key, value = (step.planes.paged(name, self.layer) for name in ("key", "value"))
        heads = (*key.shape[:2], self.kv_heads, self.dim)
        scales = (step.planes.scale(name, self.layer) for name in ("key", "value"))
        return Cache(key.view(heads), value.view(heads), *scales)

    def _write(self, qkv_THd: Tensor, step: PagedStep, first: int) -> None:
        """Norms and rotates queries and keys in place, from the first of these tokens on, and stores keys and
        values.
        """
        (query, key, value), cache, batch = self._split(qkv_THd[first:]), self._cache(step), step.batch
        query_norm, key_norm = self._norms()
        rope.gqa_write(
            query,
            key,
            value,
            step.cos_SC,
            step.sin_SC,
            batch.positions_T[first:],
            batch.write_T[first:],
            cache.key_PSKd.flatten(0, 1),
            cache.value_PSKd.flatten(0, 1),
            query_norm_d=query_norm,
            key_norm_d=key_norm,
            eps=self.eps,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
        )

    def _decode(self, qkv_THd: Tensor, step: PagedStep, fresh: bool) -> Tensor:
        """Rows of one length, split: → [T, H, d]. fresh: their keys are not stored yet."""
        (query, key, value), cache = self._split(qkv_THd), self._cache(step)
        if self.kernels.decode == "flashinfer":
            return flashinfer.run(step.prepared.decode, query, cache.key_PSKd, cache.value_PSKd)
        if self.kernels.deterministic:
            return self._paged(query, cache, step.batch.positions_T[: step.decode], step.prepared)
        made = None
        if fresh:
            write = step.batch.write_T[: step.decode]
            made = gqa.NewTokens(key, value, write, step.cos_SC, step.sin_SC, *self._norms(), self.eps)
        partial, lse = gqa.decode(
            query,
            cache.key_PSKd,
            cache.value_PSKd,
            step.batch.table_RP,
            step.batch.columns_T[: step.decode],
            scale=self.scale,
            splits=gqa.splits_for(step.decode, self.heads, self.kv_heads, step.max_kv_len, step.query),
            query=step.query,
            rows_T=step.rows_T,
            tree_mask_T=step.tree_mask_T,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
            fresh=made,
        )
        return gqa.merge(partial, lse)

    def _ragged(self, qkv_THd: Tensor, step: PagedStep, rest: Rest) -> Tensor:
        """Rows of any length: → [T, H, d]."""
        (query, key, value), cache, table = self._split(qkv_THd), self._cache(step), step.batch.table_RP[rest.row :]
        if self.kernels.prefill == "flashinfer":
            return flashinfer.run(step.prepared.ragged, query, cache.key_PSKd, cache.value_PSKd)
        if self.kernels.prefill == "triton":
            positions = step.batch.positions_T[rest.token :]
            return self._paged(query, cache, positions, Ragged(table, rest.starts_R1, rest.longest))
        starts, whole = rest.starts_R1, step.whole
        if whole is not None:
            key, value = _gather(cache, table, whole)
            return self._contiguous(
                query, key, value, starts, whole.starts_R1, rest.longest, whole.longest, causal=True
            )[0]
        out, lse = self._contiguous(query, key, value, starts, starts, rest.longest, rest.longest, causal=True)
        for prefix in step.prefixes:
            key, value = _gather(cache, table, prefix)
            part = self._contiguous(
                query, key, value, starts, prefix.starts_R1, rest.longest, prefix.longest, causal=False
            )
            merge_state_(out, lse, *part)
        return out

    def _contiguous(
        self,
        query_THd: Tensor,
        key_SKd: Tensor,
        value_SKd: Tensor,
        starts_R1: Tensor,
        context_starts_R1: Tensor,
        longest: int,
        longest_context: int,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """By FlashAttention 3."""
        return fa3.prefill(
            query_THd,
            key_SKd,
            value_SKd,
            starts_R1,
            context_starts_R1,
            max_query=longest,
            max_context=longest_context,
            scale=self.scale,
            causal=causal,
        )

    def _paged(self, query_THd: Tensor, cache: Cache, positions_T: Tensor, rows: Ragged) -> Tensor:
        """Own kernel, which takes keys by the page from position 0 on: a token's bits depend on its own sequence
        alone.
        """
        return gqa.prefill(
            query_THd,
            cache.key_PSKd,
            cache.value_PSKd,
            rows.table_RL,
            positions_T,
            rows.starts_R1,
            max_query=rows.longest,
            scale=self.scale,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
            paths_TD=rows.paths_TD,
        )


def _gather(cache: Cache, table_RL: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
    """Cached keys and values of the ragged rows, side by side: → [S, K, d] each."""
    return gqa.gather(
        cache.key_PSKd,
        cache.value_PSKd,
        table_RL,
        prefix.starts_R1,
        prefix.first_R,
        prefix.tokens,
        max_context=prefix.longest,
        key_scale=cache.key_scale,
        value_scale=cache.value_scale,
    )


class FlashInferSteps:
    """Plans each step; see `kernels.gqa.flashinfer`. The library is first loaded when there is a step."""

    def __init__(self, facts: ModelFacts, device: torch.device) -> None:
        self.facts, self.device = facts, device
        self.attention: flashinfer.Attention | None = None

    def __call__(self, batch: Batch, tokens: int, query: int) -> flashinfer.Planned:
        if self.attention is None:
            shape = self.facts.heads, self.facts.kv_heads, self.facts.head_dim
            self.attention = flashinfer.attention(*shape, shape[2] ** -0.5, self.device)
        queries = [extent.query for extent in batch.extents]
        last = (torch.tensor(queries).cumsum(0) - 1).to(self.device)
        lengths = (batch.positions_T.index_select(0, last) + 1).to("cpu", torch.int32)
        return self.attention.plan(batch.table_RP, lengths, queries, tokens // query)


def prepare_by(choice: KernelConfig, facts: ModelFacts, device: torch.device) -> Prepare:
    """What the backends share among the layers of a step."""
    if "flashinfer" in (choice.decode, choice.prefill):
        return FlashInferSteps(facts, device)
    return ragged if choice.deterministic else nothing
