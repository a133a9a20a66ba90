"""What attention on pages is given: a step's decode rows for split-KV kernels, its other rows as one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from thalweg.attention.context import AttentionGroup, paths_of_tree
from thalweg.batch.batch import Batch
from thalweg.batch.upload import upload
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.layers import rotary
from thalweg.memory.planes import Planes

DECODE_QUERY = 4  # rows of up to so many query tokens are decoded on latents; longer ones decompress their context
CHUNK = 1 << 14  # tokens of cached context that are decompressed at a time


@dataclass(frozen=True, slots=True)
class Rest:
    """The rows behind the decode rows, ragged. token: where they begin in the step. row: their first. starts_R1 int32:
    offsets of their query tokens. longest: most query tokens of a row. cached: tokens of each row's context before its
    query tokens.
    """

    token: int
    row: int
    starts_R1: Tensor
    longest: int
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """A chunk of the context of the ragged rows. first_R, starts_R1 int32: where it begins in each row, and where in
    the chunk the row's tokens lie. tokens: of all rows. longest: of a row.
    """

    first_R: Tensor
    starts_R1: Tensor
    tokens: int
    longest: int


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What the layers of a forward are given. decode: tokens of the decode rows; query: of each of them; max_kv_len:
    upper bound of their context. prefixes: chunks of what the ragged rows have cached. whole: all of their context, this
    step's tokens with it, where something is cached and it fits in one chunk; there are no prefixes then: one attention
    to what the pages hold, in place of two and a merge. hides_T: of drafts that part ways what the decode rows' tokens
    do not see (`batch.Tree`), else None; rows_T int32: the row of each of them, where these rows are not of one length.
    prepared: what the backend of attention made for the whole step. groups is empty: the reference's idea.
    """

    batch: Batch
    planes: Planes
    cos_SC: Tensor
    sin_SC: Tensor
    decode: int
    query: int
    max_kv_len: int
    rest: Rest | None
    prefixes: tuple[Prefix, ...]
    whole: Prefix | None = None
    rows_T: Tensor | None = None
    tree_mask_T: Tensor | None = None
    prepared: Any = None
    groups: tuple[AttentionGroup, ...] = ()


class Prepare(Protocol):
    """Makes what a backend of attention shares among the layers of a step. tokens: of the decode rows; query: of each
    of them.
    """

    def __call__(self, batch: Batch, tokens: int, query: int) -> Any: ...


def nothing(batch: Batch, tokens: int, query: int) -> None:
    """Of a backend that needs to know no more than the step itself."""


class Ragged(NamedTuple):
    """Decode rows as the kernel of ragged rows takes them, which deterministic mode has for all: arguments of
    `kernels.gqa.triton.prefill`, `longest` being its max_query. paths_TD: where drafts part ways.
    """

    table_RL: Tensor
    starts_R1: Tensor
    longest: int
    paths_TD: Tensor | None = None


def ragged(batch: Batch, tokens: int, query: int) -> Ragged:
    """A `Prepare`."""
    device, paths_TD = batch.ids_T.device, None if batch.tree is None else paths_of_tree(batch.tree, tokens)
    lengths = [group.query for group in batch.groups if group.token_start < tokens for _ in range(group.rows)]
    if len(set(lengths)) > 1:
        starts_R1 = upload([0, *accumulate(lengths)], torch.int32, device)
    else:
        starts_R1 = torch.arange(0, tokens + 1, max(lengths, default=1), dtype=torch.int32, device=device)
    return Ragged(batch.table_RP[: len(lengths)], starts_R1, max(lengths, default=1), paths_TD)


def rows_of(batch: Batch) -> Tensor:
    """The row of each token: int32 [T]."""
    device, parts = batch.ids_T.device, []
    for group in batch.groups:
        rows = torch.arange(group.row_start, group.row_start + group.rows, dtype=torch.int32, device=device)
        parts.append(rows.repeat_interleave(group.query))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class PagedMetadataBuilder(nn.Module):
    """Owns the rotary table: float32 [context, dim / 2] cosines and sines. gathers: whether attention of ragged rows
    gathers what they have cached; steps of a backend that reads pages have neither `whole` nor `prefixes`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, facts: ModelFacts, device: torch.device, prepare: Prepare = nothing, *, gathers: bool = True
    ) -> None:
        super().__init__()
        self.prepare, self.gathers = prepare, gathers
        table = rotary.table(facts.rope, facts.context, device)
        self.register_buffer("cos", table.real.contiguous(), persistent=False)
        self.register_buffer("sin", table.imag.contiguous(), persistent=False)

    def build(self, batch: Batch, planes: Planes) -> PagedStep:
        rows, tokens, query, max_kv_len, rows_T = _decoded(batch)
        rest = None if rows == len(batch.extents) else _rest(batch, rows, tokens)
        prefixes: tuple[Prefix, ...] = ()
        whole = None
        if self.gathers and rest is not None and any(rest.cached):
            reaches = [extent.max_kv_len for extent in batch.extents[rows:]]
            # of an FP8 plane a step's own tokens are attended to as they were before they were rounded
            if sum(reaches) <= CHUNK and not planes.has_fp8:
                whole = _prefix([0] * len(reaches), reaches, batch.ids_T.device)
            else:
                prefixes = _prefixes(rest.cached, batch.ids_T.device)
        prepared = self.prepare(batch, tokens, query)
        tree_mask_T = batch.tree_mask(tokens)
        return PagedStep(
            batch,
            planes,
            self.cos,
            self.sin,
            tokens,
            query,
            max_kv_len,
            rest,
            prefixes,
            whole,
            rows_T,
            tree_mask_T,
            prepared,
        )


class _Decoded(NamedTuple):
    """The leading rows that are decoded: as of `PagedStep`."""

    rows: int
    tokens: int
    query: int
    max_kv_len: int
    rows_T: Tensor | None = None


def _decoded(batch: Batch) -> _Decoded:
    first = batch.groups[0]
    if batch.tree is None or batch.tree.rows <= first.rows:
        decoded = first.query <= DECODE_QUERY or batch.verifies or batch.tree is not None
        rows = first.rows if decoded else 0
        return _Decoded(rows, rows * first.query, first.query if rows else 1, first.max_kv_len)
    groups = [group for group in batch.groups if group.row_start < batch.tree.rows]
    rows, tokens = (sum(counts) for counts in zip(*((g.rows, g.rows * g.query) for g in groups), strict=True))
    row_T = [g.row_start + i for g in groups for i in range(g.rows) for _ in range(g.query)]
    max_kv_len = max(group.max_kv_len for group in groups)
    return _Decoded(rows, tokens, 1, max_kv_len, upload(row_T, torch.int32, batch.ids_T.device))


def _rest(batch: Batch, row: int, token: int) -> Rest:
    extents = batch.extents[row:]
    starts = [0, *accumulate(extent.query for extent in extents)]
    return Rest(
        token,
        row,
        upload(starts, torch.int32, batch.ids_T.device),
        max(extent.query for extent in extents),
        tuple(extent.max_kv_len - extent.query for extent in extents),
    )


def _prefixes(cached: tuple[int, ...], device: torch.device) -> tuple[Prefix, ...]:
    """Cuts the rows' cached contexts into chunks of about CHUNK tokens in all, each a whole number of pages of every
    row.
    """
    having = sum(length > 0 for length in cached)
    step, chunks = max(CHUNK // having // PAGE, 1) * PAGE, []
    for first in range(0, max(cached), step):
        lengths = [min(max(length - first, 0), step) for length in cached]
        chunks.append(_prefix([first] * len(cached), lengths, device))
    return tuple(chunks)


def _prefix(firsts: list[int], lengths: list[int], device: torch.device) -> Prefix:
    starts = [0, *accumulate(lengths)]
    return Prefix(upload(firsts, torch.int32, device), upload(starts, torch.int32, device), sum(lengths), max(lengths))
