"""Attention metadata for kernels over pages: a step's decode rows for split-KV kernels, its other rows as a ragged
batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from thalweg.attention.context import AttentionGroup
from thalweg.attention.selection import SelectedContexts
from thalweg.attention.tree_paths import paths_of_tree
from thalweg.batch.batch import Batch, PromptRows, no_graph_break
from thalweg.batch.slots import upload
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import (
    ContextChunk,
    DecodeRows,
    KvPlanes,
    KvWrite,
    LatentPlane,
    PagedRows,
    QueryRows,
)
from thalweg.layers import rotary
from thalweg.memory.planes import Planes

DECODE_QUERY = 4  # rows of up to so many query tokens are decoded on latents; longer ones expand their context
CHUNK = 1 << 14  # tokens of cached context that are expanded at a time

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, slots=True)
class Rest:
    """The rows after the decode rows."""

    token: int  # where they begin in the step; 0 in a captured one, whose `starts_R1` says it
    rows: PagedRows
    cached: tuple[int, ...]  # tokens of each row's context before its query tokens


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Metadata that all attention layers of a forward pass read."""

    batch: Batch
    planes: Planes
    cos_SC: Tensor
    sin_SC: Tensor
    decode: int  # tokens of the decode rows
    rows: DecodeRows
    rest: Rest | None
    # chunks of what the other rows have cached
    prefixes: tuple[ContextChunk, ...] = ()
    # or all of their context, this step's tokens included, where something is cached and it fits in one chunk: one
    # attention to what the pages hold, instead of two and a merge; or of which a mask leaves what an indexer chooses
    whole: ContextChunk | None = None
    prepared: Any = None  # what the attention backend made for the whole step
    groups: tuple[AttentionGroup, ...] = ()  # empty: only the reference cuts a step into groups
    # of a model with an indexer: whether a context is longer than it chooses; where the tokens' contexts lie; and the
    # positions that the last layer with an indexer has chosen, which it writes and the layers up to the next one read
    chooses: bool = False
    query_rows: QueryRows | None = None
    chosen_TK: list[Tensor] = field(default_factory=list)
    schedules: dict[int, Any] = field(default_factory=dict)  # see `kernels.dsa.backends.SparseKernel`
    score_metadata: dict[tuple[int, int], Any] = field(default_factory=dict)  # of index scores, by first token and end

    @property
    def scores_context(self) -> bool:
        """Whether layers with an indexer score the context: not if the first step of a draft has done so for this one,
        nor if all of it is chosen. A piece of a graph may be replayed with longer contexts.
        """
        shared = self.batch.draft_selection
        may_choose = self.chooses or self.batch.graph_break is not no_graph_break
        return may_choose and (shared is None or shared.is_first)

    def packed(self, selections: SelectedContexts, topk: int) -> Tensor:
        """See `layers.interface.ForwardMetadata`; `selections` is not read."""
        if self.batch.border_TK is not None:  # attention between pieces fills it before what is captured here sends it
            return self.batch.border_TK
        if self.chooses:
            return self.chosen_TK[0]
        return self.batch.positions_T.new_full((len(self.batch.ids_T), topk), -1, dtype=torch.int32)

    def unpacked(self, packed_TK: Tensor) -> SelectedContexts:
        """Takes what the stage before has `packed`."""
        self.keep_chosen(packed_TK)
        return ()

    def keep_chosen(self, chosen_TK: Tensor) -> Tensor:
        """For the layers up to the next one with an indexer. → where they are."""
        if self.batch.border_TK is not None:
            chosen_TK = self.batch.border_TK.copy_(chosen_TK)
        self.chosen_TK[:] = [chosen_TK]
        return chosen_TK

    def metadata_of_scores(self, tokens: slice, make: Callable[[], Metadata]) -> Metadata:
        """What all layers share of the index scores of these tokens; the first layer makes it."""
        key = tokens.start, tokens.stop
        if key not in self.score_metadata:
            self.score_metadata[key] = make()
        metadata: Metadata = self.score_metadata[key]
        return metadata

    def kv_write(self, tokens: slice) -> KvWrite:
        """Rotary tables and KV slots of these tokens."""
        return KvWrite(self.cos_SC, self.sin_SC, self.batch.positions_T[tokens], self.batch.write_T[tokens])

    def latents(self, layer: int) -> LatentPlane:
        return LatentPlane(self.planes.paged("latent", layer), self.planes.scale("latent", layer))

    def kv(self, layer: int, heads: int) -> KvPlanes:
        """Keys and values of so many heads."""
        planes = (self.planes.paged(name, layer) for name in ("key", "value"))
        key, value = (plane.view(*plane.shape[:2], heads, -1) for plane in planes)
        return KvPlanes(key, value, self.planes.scale("key", layer), self.planes.scale("value", layer))


class Prepare(Protocol):
    """Makes what an attention backend shares among the layers of a step. tokens: of the decode rows."""

    def __call__(self, batch: Batch, tokens: int, rows: DecodeRows) -> Any: ...


def nothing(batch: Batch, tokens: int, rows: DecodeRows) -> None:
    """For a backend that needs no more than the step itself."""


def ragged(batch: Batch, tokens: int, rows: DecodeRows) -> PagedRows:
    """The decode rows for the kernel of ragged rows, which computes all rows in deterministic mode."""
    device, paths_TD = batch.ids_T.device, None if batch.tree is None else paths_of_tree(batch.tree, tokens)
    lengths = [group.query for group in batch.groups if group.token_start < tokens for _ in range(group.rows)]
    longest = max(lengths, default=1)
    if len(set(lengths)) > 1:
        starts_R1 = upload([0, *accumulate(lengths)], torch.int32, device)
    else:
        starts_R1 = torch.arange(0, tokens + 1, longest, dtype=torch.int32, device=device)
    return PagedRows(batch.table_RP[: len(lengths)], batch.positions_T[:tokens], starts_R1, longest, paths_TD)


def rows_of(batch: Batch) -> Tensor:
    """The row of each token: int32 [T]."""
    device, parts = batch.ids_T.device, []
    for group in batch.groups:
        rows = torch.arange(group.row_start, group.row_start + group.rows, dtype=torch.int32, device=device)
        parts.append(rows.repeat_interleave(group.query))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _query_rows(batch: Batch) -> QueryRows:
    paths_TD = None if batch.tree is None else paths_of_tree(batch.tree, len(batch.ids_T))
    return QueryRows(rows_of(batch), batch.table_RP, batch.positions_T, paths_TD)


class PagedMetadataBuilder(nn.Module):
    """Owns the rotary table. gathers: whether attention of ragged rows gathers what they have cached; steps of a
    backend that reads pages have neither `whole` nor `prefixes`. captures: whether attention of ragged rows can be
    captured, with their lengths on the device. masked: see `kernels.dsa.backends.SparseKernel`.
    """

    cos: Tensor  # float32 [context, dim / 2]
    sin: Tensor

    def __init__(
        self,
        facts: ModelFacts,
        device: torch.device,
        prepare: Prepare = nothing,
        *,
        gathers: bool = True,
        captures: bool = False,
        masked: Sequence[tuple[int, float]] = (),
    ) -> None:
        super().__init__()
        self.prepare, self.gathers, self.captures, self.masked = prepare, gathers, captures, masked
        self.topk, self.page = None if facts.indexer is None else facts.indexer.topk, PAGE
        table = rotary.table(facts.rope, facts.context, device)
        self.register_buffer("cos", table.real.contiguous(), persistent=False)
        self.register_buffer("sin", table.imag.contiguous(), persistent=False)

    def build(self, batch: Batch, planes: Planes) -> PagedStep:
        if batch.prompts is not None:
            return self._captured(batch, batch.prompts, planes)
        stored = self.stored(batch)
        count, tokens, rows = _decode_rows(stored)
        rest = None if count == len(batch.extents) else _rest(stored, count, tokens)
        prefixes: tuple[ContextChunk, ...] = ()
        whole = None
        chooses = self.topk is not None and max(group.max_kv_len for group in batch.groups) > self.topk
        contexts = [extent.max_kv_len for extent in batch.extents[count:]]
        if self.gathers and not chooses and rest is not None and any(rest.cached):
            # with an FP8 plane a step's own tokens are attended to as they were before they were rounded
            if sum(contexts) <= CHUNK and not planes.has_fp8:
                whole = self.chunk([0] * len(contexts), contexts, batch.ids_T.device)
            else:
                chunks = _prefixes(rest.cached, self.page)
                prefixes = tuple(self.chunk(*chunk, batch.ids_T.device) for chunk in chunks)
        elif chooses and rest is not None and self._masks(batch, rest, contexts):
            whole = self.chunk([0] * len(contexts), contexts, batch.ids_T.device)
        query_rows = None if self.topk is None else _query_rows(stored)
        shared = rest, prefixes, whole, self.prepare(stored, tokens, rows), (), chooses, query_rows
        if stored is not batch:
            batch = replace(batch, write_T=stored.write_T, share=stored.share)
        # all stages decide alike whether a step chooses, so what is read there has been chosen in this step
        earlier = [] if batch.border_TK is None else [batch.border_TK]
        return PagedStep(batch, planes, self.cos, self.sin, tokens, rows, *shared, chosen_TK=earlier)

    def _masks(self, batch: Batch, rest: Rest, contexts: Sequence[int]) -> bool:
        """Whether the ragged rows attend to what a mask leaves of their contexts. A tree's tokens see paths, and those
        of a share are not in a row's order.
        """
        longest, total, tokens = max(contexts), sum(contexts), len(batch.ids_T) - rest.token
        is_plain = batch.tree is None and batch.share is None and batch.draft_selection is None
        sooner = (longest <= context and tokens >= share * total for context, share in self.masked)
        return is_plain and total <= CHUNK and any(sooner)

    def stored(self, batch: Batch) -> Batch:
        """The step with places, masks and lengths as kernels count the context that this rank stores."""
        return batch

    def chunk(self, firsts: Sequence[int], lengths: Sequence[int], device: torch.device) -> ContextChunk:
        """So many tokens of each ragged row's context, from these on."""
        return context_chunk(firsts, lengths, device)

    def captured_cached_tokens(self, wish: int, planes: Planes) -> int | None:
        """See `layers.interface.MetadataBuilder`."""
        if not self.captures:
            return None
        if not self.gathers:
            return sys.maxsize
        return 0 if planes.has_fp8 else wish

    @property
    def captured_context(self) -> int | None:
        """See `layers.interface.MetadataBuilder`. Of longer ones an indexer would choose."""
        return self.topk

    def _captured(self, batch: Batch, prompts: PromptRows, planes: Planes) -> PagedStep:
        """The rows are on the device. Rows of prompts are launched for as many tokens as the step has."""
        tokens, decode = len(batch.ids_T), len(prompts.decode_positions_D)
        table, positions = prompts.decode_table_DP, prompts.decode_positions_D
        rows = DecodeRows(table, positions, max_kv_len=batch.groups[0].max_kv_len)
        rest = Rest(0, PagedRows(prompts.table_NP, batch.positions_T, prompts.starts_N1, tokens), ())
        whole = None
        if self.gathers and prompts.cached:
            room = tokens + prompts.cached
            whole = ContextChunk(torch.zeros_like(prompts.starts_N1[1:]), prompts.context_starts_N1, room, room)
        query_rows = None
        if self.topk is not None:
            rows_D = torch.arange(decode, dtype=torch.int32, device=positions.device)
            query_rows = QueryRows(rows_D, table, positions)
        shared = rest, (), whole, self.prepare(batch, decode, rows), (), False, query_rows
        return PagedStep(batch, planes, self.cos, self.sin, decode, rows, *shared)


def _decode_rows(batch: Batch) -> tuple[int, int, DecodeRows]:
    """The leading rows that are decoded: their number, their tokens, and how kernels see them."""
    first, row_T = batch.groups[0], None
    count, query, max_kv_len = first.rows, first.query, first.max_kv_len
    if batch.tree is not None and batch.tree.rows > first.rows:
        groups = [group for group in batch.groups if group.row_start < batch.tree.rows]
        count, tokens = (sum(counts) for counts in zip(*((g.rows, g.rows * g.query) for g in groups), strict=True))
        rows = [g.row_start + i for g in groups for i in range(g.rows) for _ in range(g.query)]
        query, row_T = 1, upload(rows, torch.int32, batch.ids_T.device)
        max_kv_len = max(group.max_kv_len for group in groups)
    elif query > DECODE_QUERY and not batch.verifies and batch.tree is None:
        count, tokens, query = 0, 0, 1
    else:
        tokens = count * query
    columns_T, mask_T = batch.columns_T[:tokens], batch.tree_mask(tokens)
    return count, tokens, DecodeRows(batch.table_RP, columns_T, query, max_kv_len, row_T, mask_T)


def _rest(batch: Batch, row: int, token: int) -> Rest:
    extents = batch.extents[row:]
    starts = [0, *accumulate(extent.query for extent in extents)]
    starts_R1 = upload(starts, torch.int32, batch.ids_T.device)
    longest = max(extent.query for extent in extents)
    rows = PagedRows(batch.table_RP[row:], batch.positions_T[token:], starts_R1, longest)
    return Rest(token, rows, tuple(extent.max_kv_len - extent.query for extent in extents))


def _prefixes(cached: tuple[int, ...], page: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cuts the rows' cached contexts into chunks of about CHUNK tokens in all, each a whole number of pages of every
    row: where each begins in the rows, and how many tokens it has of them.
    """
    having = sum(length > 0 for length in cached)
    step = max(CHUNK // having // page, 1) * page
    for first in range(0, max(cached), step):
        yield [first] * len(cached), [min(max(length - first, 0), step) for length in cached]


def context_chunk(firsts: Sequence[int], lengths: Sequence[int], device: torch.device) -> ContextChunk:
    """So many tokens of each row's context, from these on."""
    first_R, starts_R1 = (upload(x, torch.int32, device) for x in (firsts, [0, *accumulate(lengths)]))
    return ContextChunk(first_R, starts_R1, sum(lengths), max(lengths))
