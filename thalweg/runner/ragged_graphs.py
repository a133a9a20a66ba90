"""Prefill and mixed steps as one CUDA graph for each bucket of tokens, attention included.

A graph has a fixed number of rows: decode rows first, then rows of prompts. Their number, their lengths and those of
their contexts are on the device. A kernel is launched for the longest row that the bucket allows, and
ends at once where there is nothing to do. Steps with more rows or longer contexts run in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, PromptRows
from thalweg.batch.slots import upload
from thalweg.core.plan import PAGE
from thalweg.memory.planes import Planes
from thalweg.models.interface import Model
from thalweg.runner.graph_pool import GraphPool, capture, view_of
from thalweg.runner.step_buffers import StepBuffers

PROMPTS = 16  # rows of prompts that a graph has
# Tokens from which rows that are padding take longer than what the host does between pieces. H100, V2-Lite, one step
# after the other, in one graph with 129 decode rows and in pieces: 8 decode rows and 512 tokens 16.1 and 16.1 ms, and
# 1,024 19.7 and 18.6; 32 rows and 1,024 19.2 and 19.1; the host is busy for 2 ms instead of 11.
MANY = 512
ALONE = 256  # tokens from which there is a graph without decode rows
MIN_CACHED = 512  # cached tokens of all prompts that a graph has room for, or as many as it has tokens


class CapturedRows:
    """What the graphs of all buckets read of the rows: pages and lengths."""

    def __init__(self, decode: int, context: int, device: torch.device) -> None:
        """decode: the most decode rows of a graph. context: the longest, in tokens."""
        pages = -(-context // PAGE)
        self.decode_table_DP = torch.zeros(decode, pages, dtype=torch.int32, device=device)
        self.decode_positions_D = torch.zeros(decode, dtype=torch.int64, device=device)
        self.table_NP = torch.zeros(PROMPTS, pages, dtype=torch.int32, device=device)
        self.starts_N1, self.context_starts_N1 = self.starts_2N = torch.zeros(
            2, PROMPTS + 1, dtype=torch.int32, device=device
        )
        self.context = context

    def of(self, decode: int, cached: int) -> PromptRows:
        """As a graph with so many decode rows, and room for so many cached tokens, reads them."""
        table, positions = self.decode_table_DP[:decode], self.decode_positions_D[:decode]
        return PromptRows(table, positions, self.table_NP, self.starts_N1, self.context_starts_N1, cached)

    def bind(self, batch: Batch, decode: int, most: int) -> None:
        """Takes the rows of a step, of which the first `decode` are decode rows. most: decode rows of the graph; those
        that are left see one token of the null page.
        """
        prompts = batch.extents[decode:]
        starts = accumulate((row.query for row in prompts), initial=decode)
        contexts = accumulate((row.max_kv_len for row in prompts), initial=0)
        lines = [self._filled(list(starts)), self._filled(list(contexts))]
        self.starts_2N.copy_(upload(lines, torch.int32, self.starts_2N.device))
        width = batch.table_RP.shape[1]
        self.table_NP[: len(prompts), :width] = batch.table_RP[decode : decode + len(prompts)]
        self.decode_table_DP[:most].zero_()
        self.decode_positions_D[:most].zero_()
        self.decode_table_DP[:decode, :width] = batch.table_RP[:decode]
        self.decode_positions_D[:decode] = batch.positions_T[:decode]

    def pad(self, tokens: int) -> None:
        """So many tokens of prompts that are padding, none longer than the context, behind no cached ones."""
        starts = [min(row * self.context, tokens) for row in range(PROMPTS + 1)]
        self.starts_2N.copy_(upload([starts, starts], torch.int32, self.starts_2N.device))

    def _filled(self, starts: list[int]) -> list[int]:
        """With empty rows behind these."""
        return starts + starts[-1:] * (PROMPTS + 1 - len(starts))


class RaggedGraph:
    """The captured forward of up to `tokens` tokens, of which up to `decode` are decode rows."""

    def __init__(self, tokens: int, decode: int, cached: int, model: Model, shared: StepBuffers, rows: CapturedRows):
        """cached: tokens that prompts may have cached, all together."""
        self.tokens, self.decode, self.cached = tokens, decode, cached
        self.model, self.shared, self.rows = model, shared, rows

    def capture(self, planes: Planes, pool: GraphPool, thin: Model) -> None:
        """The eager run before it, in which kernels compile, is of padding. thin: the model with one layer of each
        kind.
        """
        self.rows.pad(self.tokens)
        forward, warm_up = (partial(model.forward, self.batch(), planes) for model in (self.model, thin))
        self.graph, hidden_TH = capture(pool, forward, warm_up=warm_up)
        self.hidden_TH = view_of(hidden_TH)

    def batch(self) -> Batch:
        """The step, in the memory that `forward` fills."""
        shared, rows, tokens = self.shared, self.rows, self.tokens
        groups = (Group(0, self.decode, 0, 1, rows.context),)
        tensors = shared.ids_T, shared.positions_T, shared.write_T, rows.table_NP, shared.real_T, shared.ids_T[:1]
        ids, positions, write, table, real, sampled = tensors
        return Batch(
            ids[:tokens], positions[:tokens], write[:tokens], table, real[:tokens], sampled, groups,
            shares_slots=True, prompts=rows.of(self.decode, self.cached),
        )  # fmt: skip

    def fits(self, batch: Batch) -> bool:
        """Whether it has room for the rows; as to its tokens the caller looks."""
        if batch.tree is not None or batch.verifies:
            return False
        if max(row.max_kv_len for row in batch.extents) > self.rows.context:
            return False
        decode = decode_rows(batch)
        if decode > self.decode or (4 * decode < self.decode and self.tokens > MANY):
            return False
        prompts = batch.extents[decode:]
        return len(prompts) <= PROMPTS and sum(row.max_kv_len - row.query for row in prompts) <= self.cached

    def forward(self, batch: Batch) -> Tensor:
        self.shared.fill(batch, self.tokens)
        self.rows.bind(batch, decode_rows(batch), self.decode)
        self.graph.replay()
        return self.hidden_TH[: len(batch.ids_T)]


def decode_rows(batch: Batch) -> int:
    """The rows of one token with which the step begins."""
    first = batch.groups[0]
    return first.rows if first.query == 1 else 0


def ragged_graphs(
    model: Model, planes: Planes, tokens: Sequence[int], decode: int, context: int, shared: StepBuffers
) -> list[RaggedGraph]:
    """Of each bucket one with decode rows, and of large ones one without, to be captured in this order; none where the
    model's attention needs lengths on the host. context: the longest, in tokens.
    """
    context = min(context, model.metadata.captured_context or context)
    rows, graphs = CapturedRows(decode, context, planes.device), list[RaggedGraph]()
    for many in sorted(tokens, reverse=True):
        cached = model.metadata.captured_cached_tokens(max(many, MIN_CACHED), planes)
        if cached is not None:
            beside = {min(decode, many)} | ({0} if many >= ALONE else set())
            graphs += [RaggedGraph(many, n, cached, model, shared, rows) for n in sorted(beside)]
    return graphs
