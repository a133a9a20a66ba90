"""Grouped-query attention behind one interface for all backends that read pages.

A backend is a file with the class that `config.backends` names for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thalweg.kernels.attend.args import DecodeRows, KvPlanes, PagedRows, RaggedRows
from thalweg.kernels.attend.triton import merge, merge_with_lse
from thalweg.kernels.gqa import triton
from thalweg.kernels.gqa.triton import NewTokens


class GqaShape(NamedTuple):
    """The facts of a model that a kernel needs; scores are scaled by dim^-1/2."""

    heads: int
    kv_heads: int
    dim: int


class StepRows(NamedTuple):
    """The rows of a step, for a backend that plans on the host."""

    table_RL: Tensor  # int32
    positions_T: Tensor  # int64
    queries: tuple[int, ...]  # tokens of each row, the last of its context
    decoding: int  # leading rows that are decode rows


States = tuple[Tensor, Tensor | None]  # [T, H, d], and the LSE [T, H] where it is asked for


class GqaKernel(Protocol):
    """Attention over pages. prepared: of `prepare`. with_lse: whether to return the LSE, for `merge_states`."""

    @property
    def plans(self) -> bool:
        """Whether `prepare` does anything."""

    @property
    def stores_new(self) -> bool:
        """Whether `decode` can store new tokens."""

    def prepare(self, step: StepRows) -> Any:
        """Makes what all layers of a step share."""

    def decode(
        self,
        query_THd: Tensor,
        kv: KvPlanes,
        rows: DecodeRows,
        prepared: Any,
        new: NewTokens | None = None,
        with_lse: bool = False,
    ) -> States:
        """Decode rows."""

    def ragged(self, query_THd: Tensor, kv: KvPlanes, rows: PagedRows, prepared: Any, with_lse: bool = False) -> States:
        """The other rows."""


class ContiguousGqa(Protocol):
    """Attention of ragged rows to contiguous keys and values: → ([T, H, d], LSE [T, H])."""

    def __call__(
        self, query_THd: Tensor, key_SKd: Tensor, value_SKd: Tensor, rows: RaggedRows, *, scale: float
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class TritonGqa:
    """The project's own kernels. Ragged rows read keys by the page from position 0 on: a token's bits depend on its own
    sequence alone.
    """

    shape: GqaShape
    plans: bool = False
    stores_new: bool = True

    def prepare(self, step: StepRows) -> None:
        return None

    def decode(
        self,
        query_THd: Tensor,
        kv: KvPlanes,
        rows: DecodeRows,
        prepared: None,
        new: NewTokens | None = None,
        with_lse: bool = False,
    ) -> States:
        heads, kv_heads, dim = self.shape
        splits = triton.splits_for(len(query_THd), heads, kv_heads, rows.max_kv_len, rows.query)
        partial, lse = triton.decode(query_THd, kv, rows, scale=dim**-0.5, splits=splits, new=new)
        if with_lse:
            return merge_with_lse(partial, lse, query_THd.dtype)
        return merge(partial, lse, query_THd.dtype), None

    def ragged(
        self, query_THd: Tensor, kv: KvPlanes, rows: PagedRows, prepared: None, with_lse: bool = False
    ) -> States:
        lse_TH = query_THd.new_empty(query_THd.shape[:2], dtype=torch.float32) if with_lse else None
        return triton.prefill(query_THd, kv, rows, scale=self.shape.dim**-0.5, lse_TH=lse_TH), lse_TH
