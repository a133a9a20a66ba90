"""Latent attention behind one interface for all backends: decode rows on latents, ragged rows on expanded latents.

A backend is a file with the classes or functions that `config` names for it. The model picks it when it is made. Its
`prepare` runs once a step, for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thalweg.kernels.attend.args import DecodeRows, LatentPlane, RaggedRows
from thalweg.kernels.attend.triton import merge, merge_with_lse
from thalweg.kernels.mla import triton


class MlaShape(NamedTuple):
    """The facts of a model that a decode kernel needs."""

    heads: int
    rank: int
    scale: float  # of scores
    is_fp8: bool  # whether latents are e4m3


class MlaDecodeKernel(Protocol):
    """Attention of decode rows."""

    def prepare(self, rows: DecodeRows) -> Any:
        """Makes what all layers of a step share. A CUDA graph captures it."""

    def attend(
        self, query_THD: Tensor, latents: LatentPlane, uv_HRv: Tensor, rows: DecodeRows, prepared: Any
    ) -> Tensor:
        """Absorbed queries over pages, times W_UV: → bfloat16 [T, H * v]."""

    def attend_with_lse(
        self, query_THD: Tensor, latents: LatentPlane, rows: DecodeRows, prepared: Any
    ) -> tuple[Tensor, Tensor]:
        """Absorbed queries over pages, for `merge_states`: → (sums of latents before W_UV [T, H, r], LSE [T, H])."""


class MlaPrefillKernel(Protocol):
    """Attention of ragged rows to keys and values made of latents."""

    def __call__(
        self,
        query_THq: Tensor,
        latents_SD: Tensor,
        uk_HnR: Tensor,
        uv_HRv: Tensor,
        rows: RaggedRows,
        *,
        scale: float,
        out_THv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """→ (out [T, H, v], LSE [T, H]). latents_SD: with their rotated keys. uv_HRv: a view of [H, v, r]. out_THv: a
        contiguous tensor for the result.
        """


def project_values(u_THr: Tensor, uv_HRv: Tensor) -> Tensor:
    """Sums of latents times W_UV: → [T, H * v]."""
    out_THv = u_THr.new_empty(*u_THr.shape[:2], uv_HRv.shape[2])
    torch.bmm(u_THr.transpose(0, 1), uv_HRv, out=out_THv.transpose(0, 1))
    return out_THv.flatten(1)


def values_of_splits(partial_THsr: Tensor, lse_THs: Tensor, uv_HRv: Tensor) -> Tensor:
    """The splits of `triton.decode`, merged, times W_UV: → [T, H * v]."""
    if triton.merges_up(*partial_THsr.shape[:3]):
        return triton.merge_up(partial_THsr, lse_THs, uv_HRv)
    if triton.merges_many(*partial_THsr.shape):
        return triton.merge_up_many(partial_THsr, lse_THs, uv_HRv)
    return project_values(merge(partial_THsr, lse_THs, partial_THsr.dtype), uv_HRv)


def values_of(latent_Sr: Tensor, uv_HvR: Tensor) -> Tensor:
    """[S, H, v], of all heads by one product."""
    heads, width, rank = uv_HvR.shape
    return torch.mm(latent_Sr, uv_HvR.view(-1, rank).t()).view(-1, heads, width)


@dataclass(frozen=True, slots=True)
class TritonMlaDecode:
    """The project's own kernels."""

    shape: MlaShape

    def prepare(self, rows: DecodeRows) -> None:
        return None

    def attend(
        self, query_THD: Tensor, latents: LatentPlane, uv_HRv: Tensor, rows: DecodeRows, prepared: None
    ) -> Tensor:
        return values_of_splits(*self._splits(query_THD, latents, rows), uv_HRv)

    def attend_with_lse(
        self, query_THD: Tensor, latents: LatentPlane, rows: DecodeRows, prepared: None
    ) -> tuple[Tensor, Tensor]:
        return merge_with_lse(*self._splits(query_THD, latents, rows), query_THD.dtype)

    def _splits(self, query_THD: Tensor, latents: LatentPlane, rows: DecodeRows) -> tuple[Tensor, Tensor]:
        heads, rank, scale, _ = self.shape
        splits = triton.splits_for(len(query_THD), heads, rows.max_kv_len, rows.query)
        return triton.decode(query_THD, latents, rows, scale=scale, rank=rank, splits=splits)


def triton_prefill(
    query_THq: Tensor,
    latents_SD: Tensor,
    uk_HnR: Tensor,
    uv_HRv: Tensor,
    rows: RaggedRows,
    *,
    scale: float,
    out_THv: Tensor | None = None,
    chosen_TS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The project's own kernel, which takes the key that all heads share as it is. chosen_TS: see `triton.prefill`."""
    heads, nope, rank = uk_HnR.shape
    latent_Sr, rope_Sc = latents_SD[:, :rank], latents_SD[:, rank:]
    key_SHn = torch.mm(latent_Sr, uk_HnR.view(-1, rank).t()).view(-1, heads, nope)
    value_SHv = values_of(latent_Sr, uv_HRv.transpose(1, 2))
    of = query_THq, key_SHn, rope_Sc, value_SHv, rows
    return triton.prefill(*of, scale=scale, out_THv=out_THv, chosen_TS=chosen_TS)
