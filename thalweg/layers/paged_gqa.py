"""Grouped-query attention on pages."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.attend.args import DecodeRows, RaggedRows
from thalweg.kernels.attend.triton import merge, merge_state_
from thalweg.kernels.gqa import fa3, flashinfer
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.rope import triton as rope
from thalweg.layers.factory import LayerFactory
from thalweg.layers.gqa import GqaProjections
from thalweg.layers.paged import PagedStep, Prepare, Rest, nothing, ragged
from thalweg.layers.residual import Activation, ResidualStream


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
        fresh = step.decode if own and step.rows.query == 1 and step.rows.tree_mask_T is None else 0
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

    def _norms(self) -> rope.QkNorms:
        if self.query_norm is None or self.key_norm is None:
            return rope.QkNorms(eps=self.eps)
        return rope.QkNorms(self.query_norm.weight, self.key_norm.weight, self.eps)

    def _write(self, qkv_THd: Tensor, step: PagedStep, first: int) -> None:
        """Norms and rotates queries and keys in place, from the first of these tokens on, and stores keys and
        values.
        """
        write, kv = step.kv_write(slice(first, None)), step.kv(self.layer, self.kv_heads)
        rope.gqa_write(*self._split(qkv_THd[first:]), self._norms(), write, kv)

    def _decode(self, qkv_THd: Tensor, step: PagedStep, is_new: bool) -> Tensor:
        """Rows of one length, split: → [T, H, d]. is_new: their keys are not stored yet."""
        (query, key, value), kv = self._split(qkv_THd), step.kv(self.layer, self.kv_heads)
        if self.kernels.decode == "flashinfer":
            return flashinfer.run(step.prepared.decode, query, kv)
        if self.kernels.deterministic:
            return gqa.prefill(query, kv, step.prepared, scale=self.scale)
        new = gqa.NewTokens(key, value, step.kv_write(slice(0, step.decode)), self._norms()) if is_new else None
        splits = gqa.splits_for(step.decode, self.heads, self.kv_heads, step.rows.max_kv_len, step.rows.query)
        return merge(*gqa.decode(query, kv, step.rows, scale=self.scale, splits=splits, new=new))

    def _ragged(self, qkv_THd: Tensor, step: PagedStep, rest: Rest) -> Tensor:
        """Rows of any length: → [T, H, d]."""
        (query, key, value), kv = self._split(qkv_THd), step.kv(self.layer, self.kv_heads)
        if self.kernels.prefill == "flashinfer":
            return flashinfer.run(step.prepared.ragged, query, kv)
        if self.kernels.prefill == "triton":
            # keys by the page from position 0 on: a token's bits depend on its own sequence alone
            return gqa.prefill(query, kv, rest.rows, scale=self.scale)
        (table, _, starts, longest, _), whole = rest.rows, step.whole
        if whole is not None:
            rows = RaggedRows(starts, whole.starts_R1, longest, whole.max_tokens)
            return fa3.prefill(query, *gqa.gather(kv, table, whole), rows, scale=self.scale)[0]
        out, lse = fa3.prefill(query, key, value, RaggedRows(starts, starts, longest, longest), scale=self.scale)
        for prefix in step.prefixes:
            rows = RaggedRows(starts, prefix.starts_R1, longest, prefix.max_tokens, is_causal=False)
            merge_state_(out, lse, *fa3.prefill(query, *gqa.gather(kv, table, prefix), rows, scale=self.scale))
        return out


class FlashInferSteps:
    """Plans each step; see `kernels.gqa.flashinfer`. The library is first loaded when there is a step."""

    def __init__(self, facts: ModelFacts, device: torch.device) -> None:
        self.facts, self.device = facts, device
        self.attention: flashinfer.FlashInferGqa | None = None

    def __call__(self, batch: Batch, tokens: int, rows: DecodeRows) -> flashinfer.PlannedStep:
        if self.attention is None:
            shape = self.facts.heads, self.facts.kv_heads, self.facts.head_dim
            self.attention = flashinfer.attention(*shape, shape[2] ** -0.5, self.device)
        queries = [extent.query for extent in batch.extents]
        last = (torch.tensor(queries).cumsum(0) - 1).to(self.device)
        lengths = (batch.positions_T.index_select(0, last) + 1).to("cpu", torch.int32)
        return self.attention.plan(batch.table_RP, lengths, queries, tokens // rows.query)


def prepare_by(choice: KernelConfig, facts: ModelFacts, device: torch.device) -> Prepare:
    """What the backends share among the layers of a step."""
    if "flashinfer" in (choice.decode, choice.prefill):
        return FlashInferSteps(facts, device)
    return ragged if choice.deterministic else nothing
