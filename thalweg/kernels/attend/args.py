"""Arguments that attention kernels share.

Letters: T query tokens, R rows, L columns of the page table, P pages of 64, H heads, K key heads, d head dim, D latent
and rope dims, S context tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LatentPlane(NamedTuple):
    """The latents of an MLA layer, each with its rotated key."""

    paged_PSD: Tensor  # [P, 64, D], bfloat16 or e4m3; or records, uint8 [P, 64, bytes], see `memory.records`
    scale: Tensor | None = None  # of e4m3: float32 [1]


class KvPlanes(NamedTuple):
    """The keys and values of a layer."""

    key: Tensor  # [P, 64, K, d], bfloat16 or e4m3
    value: Tensor
    key_scale: Tensor | None = None  # of e4m3: float32 [1]
    value_scale: Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.key_scale is not None


class KvWrite(NamedTuple):
    """Rotary tables and KV slots of a step's tokens."""

    cos_SC: Tensor  # float32 [context, rope dims / 2]
    sin_SC: Tensor
    positions_T: Tensor  # int64
    write_T: Tensor  # int64: rows of the planes


class DecodeRows(NamedTuple):
    """Rows with equally many query tokens, the last of their contexts.

    A token sees context positions 0 to positions_T[t]. For a part of the context, pass the table from the part's first
    page on and count positions from there: -1 sees nothing.
    """

    table_RL: Tensor  # int32: pages of each row; more rows may follow
    positions_T: Tensor  # int64; columns where drafts form a tree
    query: int = 1  # tokens of a row
    max_kv_len: int = 0  # upper bound of a context
    rows_T: Tensor | None = None  # int32: the row of each token, where it is not t // query
    tree_mask_T: Tensor | None = None  # int64: what each token sees of a tree, see `batch.TreeMask`
    paths_TD: Tensor | None = None  # int32: columns of the last positions, own first; `attention.tree_paths`


class PagedRows(NamedTuple):
    """Rows with any number of query tokens, whose context is read page by page."""

    table_RL: Tensor  # int32
    positions_T: Tensor  # int64, not decreasing within a row; a token sees 0 to its own, -1 sees nothing
    starts_R1: Tensor  # int32 [R + 1]: row i has query tokens starts[i] to starts[i + 1]; padding follows the last
    max_query: int  # upper bound of a row's query tokens
    paths_TD: Tensor | None = None  # int32: columns of the last positions, where drafts form a tree


class QueryRows(NamedTuple):
    """Query tokens whose contexts are read by tokens, not by rows. A token sees positions 0 to its own."""

    rows_T: Tensor  # int32: the row of each token in the table
    table_RL: Tensor  # int32
    positions_T: Tensor  # int64
    paths_TD: Tensor | None = None  # int32, where drafts form a tree: see `attention.tree_paths`

    def some(self, tokens: slice) -> QueryRows:
        """Of these tokens."""
        paths_TD = None if self.paths_TD is None else self.paths_TD[tokens]
        return QueryRows(self.rows_T[tokens], self.table_RL, self.positions_T[tokens], paths_TD)


class RaggedRows(NamedTuple):
    """Rows with any number of query tokens, whose keys and values are contiguous."""

    query_starts_R1: Tensor  # int32 [R + 1]
    context_starts_R1: Tensor  # int32 [R + 1]
    max_query: int  # upper bounds of a row's tokens
    max_context: int
    is_causal: bool = True  # a row's queries are the last of its context; else each sees all of it


class RowLengths(NamedTuple):
    """Tokens of each row, on the host."""

    queries: tuple[int, ...]  # the last of the row's context
    contexts: tuple[int, ...]


class SharedChunk(NamedTuple):
    """What each of the ranks that share a context gathers of a chunk, whole pages; and which of all that they gather,
    one rank behind the other, are the chunk's tokens: int64 [S].
    """

    stored: ContextChunk
    order_S: Tensor


class ContextChunk(NamedTuple):
    """A part of the cached context of ragged rows, to be gathered."""

    first_R: Tensor  # int32: where it begins in each row
    starts_R1: Tensor  # int32 [R + 1]: where each row's tokens lie in the chunk
    tokens: int  # of all rows
    max_tokens: int  # of a row
    shared: SharedChunk | None = None  # where several ranks hold it
