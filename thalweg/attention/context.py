"""Attention metadata of one step in plain torch: pages, masks and tiles of each group of rows, made once and read by
every layer.

Letters: R rows of a group, q query tokens a row, N = R * q of them, S context tokens (whole pages), T tokens of the
step. A bias is additive: about 0 (see TIE) where a query may see a context token, -inf elsewhere. Every query sees at
least one context token, but of a part of the context (`attention.context_shard`) maybe none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.attention.context_shard import ContextShard
from thalweg.attention.selection import SelectedContext, SelectedContexts
from thalweg.batch.batch import Batch, Group
from thalweg.core.plan import PAGE
from thalweg.memory.planes import Planes
from thalweg.parallel.axis import SINGLE, Axis

# Taken from the bias once per position, far below the rounding of any score. relu makes index scores of exactly 0
# frequent, and the first of equal scores wins, as in `kernels.dsa`: the selection depends neither on the chunks of a
# prompt nor on the order of a top-k, and no token that comes later changes it among equal ones.
TIE = 1e-20
# Most elements of a tile's scores or gathered latents: 64 MiB in float32; 512 MiB on a GPU, where each tile costs
# launches.
TILE_ELEMENTS, TILE_ELEMENTS_ON_GPU = 1 << 24, 1 << 27


class QueryTile(NamedTuple):
    """Query tokens [start, stop) of every row of a group."""

    start: int
    stop: int
    pages: int  # of context that these tokens can see


class WorkspaceNeed(NamedTuple):
    """Elements of the largest intermediate tensor of a model's attention layers."""

    per_pair: int  # of a query token and a context token
    per_token: int = 0  # of a query token, whatever its context

    def elements(self, kv_len: int) -> int:
        """For one query token and the whole pages of its context."""
        return self.per_pair * -(-kv_len // PAGE) * PAGE


class ContextPositions(NamedTuple):
    """Which tokens of a context lie behind its page table."""

    positions_S: Tensor  # of those in the first page, then those in the second, …
    page_tokens: int  # in each page
    page_size: int  # tokens that a page has on all ranks that share it
    every_S: Tensor  # 0, 1, 2, …


class AttentionGroup:
    """The rows of one rectangle of a batch and their context, cut into tiles that bound the memory of scores."""

    def __init__(self, batch: Batch, group: Group, context: ContextPositions, workspace: WorkspaceNeed) -> None:
        self.group, self.rows, self.query, self.max_kv_len = group, group.rows, group.query, group.max_kv_len
        self._batch, self._context, self._workspace = batch, context, workspace
        self.pages = -(-group.max_kv_len // context.page_size)
        self._is_whole_step = group.rows * group.query == len(batch.ids_T)
        self.columns_N = self.take(batch.columns_T)
        self.tree_mask_N = None if batch.tree is None else self.take(batch.tree.tree_mask_T)
        self.table_RP = batch.table_RP[group.row_slice, : self.pages]
        self._table_N = self.table_RP.reshape(-1)
        self.tiles = tuple(self._make_tiles())
        self._bias = self._make_bias(self.tiles[0]) if len(self.tiles) == 1 else None

    def _make_tiles(self) -> Iterator[QueryTile]:
        per_token = max(self._workspace.elements(self.max_kv_len), self._workspace.per_token)
        step = max(_max_elements(self.table_RP) // (self.rows * per_token), 1)
        for start in range(0, self.query, step):
            stop = min(start + step, self.query)
            # columns are consecutive: a query token sees neither the tokens after it nor their pages
            pages = -(-(self.max_kv_len - self.query + stop) // self._context.page_size)
            yield QueryTile(start, stop, min(pages, self.pages))

    @cached_property
    def whole(self) -> AttentionGroup:
        """The same rows and tiles with the context of all ranks, as `ContextShard.gather_context` has it."""
        _, page_tokens, page_size, every_S = self._context
        if page_tokens == page_size:
            return self
        every = ContextPositions(every_S, page_size, page_size, every_S)
        return AttentionGroup(self._batch, self.group, every, self._workspace)

    def take(self, x: Tensor) -> Tensor:
        """The group's tokens [N, ...] of a tensor of all tokens [T, ...]."""
        return x if self._is_whole_step else x[self.group.token_slice]

    def take_tile(self, x_N: Tensor, tile: QueryTile) -> Tensor:
        """The tile's tokens [R * (stop - start), ...] of the group's tokens."""
        if len(self.tiles) == 1:
            return x_N
        return x_N.view(self.rows, self.query, *x_N.shape[1:])[:, tile.start : tile.stop].flatten(0, 1)

    def join_tiles(self, tiles: list[Tensor]) -> Tensor:
        """Inverse of `take_tile`: [N, ...] from the tokens of all tiles."""
        if len(tiles) == 1:
            return tiles[0]
        return torch.cat([tile.view(self.rows, -1, *tile.shape[1:]) for tile in tiles], 1).flatten(0, 1)

    def bias(self, tile: QueryTile) -> Tensor:
        """float32 [tokens of the tile, S] of the causal mask, or of the tree mask."""
        return self._make_bias(tile) if self._bias is None else self._bias

    def _make_bias(self, tile: QueryTile) -> Tensor:
        positions_S = self._context.positions_S[: self._width(tile)]
        columns_N1 = self.take_tile(self.columns_N, tile).unsqueeze(-1)
        unseen = positions_S > columns_N1
        if self.tree_mask_N is not None:
            # the highest bit is that of all columns further away
            before = (columns_N1 - positions_S).clamp(0, 63)
            unseen |= (self.take_tile(self.tree_mask_N, tile).unsqueeze(-1) >> before) & 1 == 0
        return torch.where(unseen, -torch.inf, positions_S * -TIE)

    def _width(self, tile: QueryTile) -> int:
        """Context tokens of a tile. For a whole row it follows the table: a traced step has tables of any width."""
        return (self.table_RP.shape[1] if tile.pages == self.pages else tile.pages) * self._context.page_tokens

    def selected_bias(self, tile: QueryTile, index_NK: Tensor, bias_NK: Tensor) -> Tensor:
        """float32 [tokens of the tile, S]: the given bias at the selected positions, -inf elsewhere."""
        nothing = torch.full((len(index_NK), self._width(tile)), -torch.inf, device=index_NK.device)
        return nothing.scatter_(1, index_NK, bias_NK)

    def columns(self, tile: QueryTile) -> int:
        """Columns of a tile's context on all ranks."""
        return tile.pages * self._context.page_size

    def gather(self, paged: Tensor, pages: int) -> Tensor:
        """[R, S, dim]: the first `pages` pages of every row's context, contiguous."""
        table = self._table_N if pages == self.pages else self.table_RP[:, :pages].reshape(-1)
        return paged.index_select(0, table).view(self.rows, -1, paged.shape[-1])

    def plane_rows(self, index_NK: Tensor) -> Tensor:
        """Plane rows of stored context tokens. Every row has the same number of query tokens."""
        return self._plane_rows_RS.gather(1, index_NK.view(self.rows, -1)).view_as(index_NK)

    @cached_property
    def _plane_rows_RS(self) -> Tensor:
        return torch.add(self._context.every_S[:PAGE], self.table_RP.unsqueeze(-1), alpha=PAGE).view(self.rows, -1)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The metadata that every attention layer of a forward reads."""

    batch: Batch
    planes: Planes
    cos_sin_T1c: Tensor  # complex64: the rotation of each token
    groups: tuple[AttentionGroup, ...]
    max_kv_len: int

    def contexts(self, columns_TK: Tensor) -> tuple[SelectedContext, ...]:
        """Columns of each token's context, int64 [T, K], as every group takes them; ~column for a filler. A tile whose
        context has fewer columns takes as many.
        """
        is_filler_TK = columns_TK < 0
        parts = (
            torch.where(is_filler_TK, ~columns_TK, columns_TK),
            torch.where(is_filler_TK, -torch.inf, columns_TK * -TIE),
        )
        return tuple(
            SelectedContext(
                *(
                    tuple(group.take_tile(group.take(x), tile)[:, : group.columns(tile)] for tile in group.tiles)
                    for x in parts
                )
            )
            for group in self.groups
        )

    def packed(self, selections: SelectedContexts, topk: int) -> Tensor:
        """See `layers.interface.ForwardMetadata`."""
        packed_TK = self.batch.positions_T.new_full((len(self.batch.ids_T), topk), -1)
        for group, selected in zip(self.groups, selections, strict=True):
            if selected is not None:
                tiles = (torch.where(bias == -torch.inf, ~p, p) for p, bias in zip(*selected, strict=True))
                padded = [F.pad(tile, (0, topk - tile.shape[1]), value=-1) for tile in tiles]
                packed_TK[group.group.token_slice] = group.join_tiles(padded)
        return packed_TK.to(torch.int32)

    def unpacked(self, packed_TK: Tensor) -> SelectedContexts:
        """Inverse of `packed`."""
        is_whole = (group.max_kv_len <= packed_TK.shape[1] for group in self.groups)
        contexts = self.contexts(packed_TK.to(torch.int64))
        return tuple(None if whole else context for whole, context in zip(is_whole, contexts, strict=True))


class AttentionMetadataBuilder(nn.Module):
    """Makes the metadata of each step. Owns the rotary table."""

    cos_sin: Tensor
    positions_S: Tensor  # 0, 1, 2, … of a context's whole pages
    stored_S: Tensor  # the positions that this rank stores

    def __init__(self, cos_sin: Tensor, workspace: WorkspaceNeed, dcp: Axis = SINGLE) -> None:
        """cos_sin: complex64 [context, dim / 2]. dcp: the ranks that share each context."""
        super().__init__()
        self.workspace, self.page_size = workspace, PAGE * dcp.size
        self.shard = ContextShard(dcp) if dcp.size > 1 else None
        pages = -(-len(cos_sin) // self.page_size)
        every_S = torch.arange(pages * self.page_size)  # made on meta, it loads sympy
        positions_S = stored_S = every_S.to(cos_sin.device)
        if self.shard is not None:
            stored_S = self.shard.positions(every_S[: pages * PAGE]).to(cos_sin.device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.register_buffer("positions_S", positions_S, persistent=False)
        self.register_buffer("stored_S", stored_S, persistent=False)

    def build(self, batch: Batch, planes: Planes) -> AttentionMetadata:
        cos_sin_T1c = self.cos_sin.index_select(0, batch.positions_T).unsqueeze(1)
        if self.shard is not None:
            batch = self.shard.written(batch)
        context = ContextPositions(self.stored_S, PAGE, self.page_size, self.positions_S)
        parts = (part for group in batch.groups for part in _split_rows(batch, group, self.workspace))
        groups = tuple(AttentionGroup(batch, part, context, self.workspace) for part in parts)
        return AttentionMetadata(batch, planes, cos_sin_T1c, groups, max(group.max_kv_len for group in groups))

    captured_context = None

    def captured_cached_tokens(self, wish: int, planes: Planes) -> None:
        """Masks and tiles are cut by lengths on the host."""


def _max_elements(x: Tensor) -> int:
    return TILE_ELEMENTS_ON_GPU if x.is_cuda else TILE_ELEMENTS


def _split_rows(batch: Batch, group: Group, workspace: WorkspaceNeed) -> Iterator[Group]:
    """Splits a group into consecutive rows whose tiles of one query token stay within the bound, each part with the
    longest context of its own rows. A step without extents is being captured, for contexts of any length: not split.
    """
    most = _max_elements(batch.table_RP)
    if not batch.extents or group.rows * workspace.elements(group.max_kv_len) <= most:
        yield group
        return
    first, stop, longest = group.row_start, group.row_start + group.rows, 0
    for row in range(first, stop):
        own = batch.extents[row].max_kv_len
        if row > first and (row + 1 - first) * workspace.elements(max(longest, own)) > most:
            yield _subgroup(group, first, row, longest)
            first, longest = row, 0
        longest = max(longest, own)
    yield _subgroup(group, first, stop, longest)


def _subgroup(group: Group, first: int, stop: int, max_kv_len: int) -> Group:
    token = group.token_start + (first - group.row_start) * group.query
    return Group(first, stop - first, token, group.query, max_kv_len)


def concat_groups(parts: list[Tensor]) -> Tensor:
    """All tokens of the step, from the tokens of each group."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
