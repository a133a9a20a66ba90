"""Grouped-query attention on pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.attention.exchange import exchange_stored
from thalweg.batch.batch import Batch
from thalweg.config.backends import DECODE, PREFILL
from thalweg.config.entry_point import load_entry
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.attend.args import DecodeRows, RaggedRows
from thalweg.kernels.attend.triton import merge_state_
from thalweg.kernels.gqa.backends import ContiguousGqa, GqaKernel, GqaShape, StepRows
from thalweg.kernels.gqa.triton import NewTokens, gather
from thalweg.kernels.rope import triton as rope
from thalweg.layers.factory import LayerFactory
from thalweg.layers.gqa import GqaProjections
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.paged import PagedStep, Prepare, Rest, ragged


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
        qk_norm: bool = False,
        inputs: int = 0,
    ) -> None:
        super().__init__(layers, facts, layer, name, qk_norm, inputs)
        self.scale, self.is_deterministic = self.dim**-0.5, layers.kernels.deterministic
        self.kernels = gqa_kernels(layers.kernels, GqaShape(self.heads, self.kv_heads, self.dim))

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
        stores_new = self.kernels.decode.stores_new and not self.is_deterministic
        # rows of one request would read each other's keys while the same launch stores them
        is_apart = step.rows.query == 1 and step.rows.tree_mask_T is None and not step.batch.shares_slots
        new = step.decode if stores_new and is_apart else 0
        if new < len(qkv_THd):
            self._write(qkv_THd, step, new)
        parts = []
        if step.decode:
            parts.append(self._decode(qkv_THd[: step.decode], step, new > 0))
        if step.rest is not None:
            parts.append(self._ragged(qkv_THd[step.rest.token :], step, step.rest))
        if step.batch.prompts is not None:
            return _merged(parts, step.batch.real_T, step.batch.prompts.starts_N1[:1]).flatten(1)
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
        exchange_stored(step.batch, step.planes, ("key", "value"), self.layer)  # of a share all are stored here

    def _decode(self, qkv_THd: Tensor, step: PagedStep, is_new: bool) -> Tensor:
        """Rows of one length, split: → [T, H, d]. is_new: their keys are not stored yet."""
        (query, key, value), kv = self._split(qkv_THd), step.kv(self.layer, self.kv_heads)
        if self.is_deterministic:
            return self.kernels.paged.ragged(query, kv, step.prepared, None)[0]
        new = NewTokens(key, value, step.kv_write(slice(0, step.decode)), self._norms()) if is_new else None
        return self.kernels.decode.decode(query, kv, step.rows, step.prepared.decode, new)[0]

    def _ragged(self, qkv_THd: Tensor, step: PagedStep, rest: Rest) -> Tensor:
        """Rows of any length: → [T, H, d]."""
        (query, key, value), kv = self._split(qkv_THd), step.kv(self.layer, self.kv_heads)
        contiguous, whole, (table, _, starts, longest, _) = self.kernels.contiguous, step.whole, rest.rows
        if contiguous is None:
            prepared = None if self.is_deterministic else step.prepared.ragged
            return self.kernels.paged.ragged(query, kv, rest.rows, prepared)[0]
        if whole is not None:
            rows = RaggedRows(starts, whole.starts_R1, longest, whole.max_tokens)
            return contiguous(query, *gather(kv, table, whole), rows, scale=self.scale)[0]
        out, lse = contiguous(query, key, value, RaggedRows(starts, starts, longest, longest), scale=self.scale)
        for prefix in step.prefixes:
            rows = RaggedRows(starts, prefix.starts_R1, longest, prefix.max_tokens, is_causal=False)
            merge_state_(out, lse, *contiguous(query, *gather(kv, table, prefix), rows, scale=self.scale))
        return out


def _merged(parts: list[Tensor], real_T: Tensor, decode_1: Tensor) -> Tensor:
    """Results of a captured step: of as many decode rows as there are, then of the prompts; 0 for padding, so that it
    stays finite. parts: of the decode rows that the graph has, if any, and of all tokens.
    """
    *decoded, out_THd = parts
    out_THd = out_THd.masked_fill(~real_T.view(-1, 1, 1), 0)
    for part_DHd in decoded:
        is_decode_D = torch.arange(len(part_DHd), device=decode_1.device) < decode_1
        first_DHd = out_THd[: len(part_DHd)]
        first_DHd.copy_(torch.where(is_decode_D.view(-1, 1, 1), part_DHd, first_DHd))
    return out_THd


class GqaKernels(NamedTuple):
    """Kernels for decode rows and for other rows: over pages, or over contiguous keys."""

    decode: GqaKernel
    paged: GqaKernel
    contiguous: ContiguousGqa | None


def gqa_kernels(choice: KernelConfig, shape: GqaShape) -> GqaKernels:
    decode, prefill = load_entry(DECODE[choice.decode].gqa)(shape), PREFILL[choice.prefill]
    entry = load_entry(prefill.gqa)
    return GqaKernels(decode, decode, entry) if prefill.gathers_keys else GqaKernels(decode, entry(shape), None)


class PreparedGqa(NamedTuple):
    """State of a step's kernels that all layers share."""

    decode: Any = None
    ragged: Any = None


def prepare_by(choice: KernelConfig, shape: GqaShape) -> Prepare:
    """State of a step's backends that all layers share."""
    if choice.deterministic:
        return ragged
    kernels = gqa_kernels(choice, shape)

    def prepare(batch: Batch, tokens: int, rows: DecodeRows) -> PreparedGqa:
        if not kernels.decode.plans and not kernels.paged.plans:
            return PreparedGqa()
        queries = tuple(extent.query for extent in batch.extents)
        step = StepRows(batch.table_RP, batch.positions_T, queries, tokens // rows.query)
        return PreparedGqa(kernels.decode.prepare(step), kernels.paged.prepare(step))

    return prepare
