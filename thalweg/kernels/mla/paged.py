"""Latent attention by each backend behind one signature: decode rows on latents, and ragged rows on decompressed keys.

A backend is chosen once, when a model is made; what it needs to know of a step it prepares once for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thalweg.kernels.expand_latents.triton import expand_latents, fits
from thalweg.kernels.gqa import ext as fa3
from thalweg.kernels.mla import ext, triton

FP8_MAX = 448.0
FLASHMLA_TOKENS, FLASHMLA_TOKENS_FP8 = 8, 32  # from so many decode tokens on FlashMLA is faster, where it is at all


class MlaDecodeRows(NamedTuple):
    """Decode rows. table_RL int32: pages of each row (more rows may follow). positions_T int64: of their `query` tokens
    each, the last of their contexts. max_kv_len: upper bound of a context, in tokens. rows_T, tree_mask_T: of drafts
    that branch, see `layers.paged.PagedStep`.
    """

    table_RL: Tensor
    positions_T: Tensor
    query: int
    max_kv_len: int
    rows_T: Tensor | None = None
    tree_mask_T: Tensor | None = None


class MlaDecodeKernel(Protocol):
    """Decode rows."""

    def prepare(self, rows: MlaDecodeRows) -> Any:
        """What all layers of a step share. Under a CUDA graph it is called inside the recording."""

    def attend(
        self,
        query_THD: Tensor,
        plane_PSD: Tensor,
        plane_scale: Tensor | None,
        uv_HRv: Tensor,
        rows: MlaDecodeRows,
        prepared: Any,
    ) -> Tensor:
        """Absorbed queries [T, H, r + c] over pages [P, 64, r + c], times W_UV: → bfloat16 [T, H * v]. plane_scale: of
        an e4m3 plane.
        """


class MlaPrefillKernel(Protocol):
    """Ragged rows, on keys and values that are made of latents."""

    def __call__(
        self,
        query_THq: Tensor,
        latents_SD: Tensor,
        uk_HnR: Tensor,
        uv_HRv: Tensor,
        query_starts_R1: Tensor,
        context_starts_R1: Tensor,
        *,
        max_query: int,
        max_context: int,
        scale: float,
        causal: bool,
        out_THv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """→ (out [T, H, v], LSE [T, H]). Row i's query tokens are query_starts[i] … query_starts[i + 1], its context
        tokens context_starts[i] … context_starts[i + 1]: latents with their rotated keys, [S, r + c]. causal: its
        queries are the last of its context; else every query sees all of it. uv_HRv: a view of [H, v, r]. max_query,
        max_context: upper bounds of a row. out_THv: where the result is put if it is given, contiguous.
        """


def project_values(u_THr: Tensor, uv_HRv: Tensor) -> Tensor:
    """Sums of latents times W_UV: → [T, H * v]."""
    out_THv = u_THr.new_empty(*u_THr.shape[:2], uv_HRv.shape[2])
    torch.bmm(u_THr.transpose(0, 1), uv_HRv, out=out_THv.transpose(0, 1))
    return out_THv.flatten(1)


@dataclass(frozen=True, slots=True)
class TritonMlaDecode:
    """Own kernels."""

    heads: int
    rank: int
    scale: float
    fp8: bool

    def prepare(self, rows: MlaDecodeRows) -> None:
        return None

    def attend(
        self,
        query_THD: Tensor,
        plane_PSD: Tensor,
        plane_scale: Tensor | None,
        uv_HRv: Tensor,
        rows: MlaDecodeRows,
        prepared: None,
    ) -> Tensor:
        tokens = len(query_THD)
        partial, lse = triton.decode(
            query_THD,
            plane_PSD,
            rows.table_RL,
            rows.positions_T,
            scale=self.scale,
            rank=self.rank,
            splits=triton.splits_for(tokens, self.heads, rows.max_kv_len, rows.query),
            query=rows.query,
            plane_scale=plane_scale,
            rows_T=rows.rows_T,
            tree_mask_T=rows.tree_mask_T,
        )
        if tokens <= triton.MERGE_UP_TOKENS:
            return triton.merge_up(partial, lse, uv_HRv)
        if triton.merges_many(tokens, self.heads, *partial.shape[2:]):
            return triton.merge_up_many(partial, lse, uv_HRv)
        return project_values(triton.merge(partial, lse, query_THD.dtype), uv_HRv)


class FlashSchedule(NamedTuple):
    """lengths_T int32: of each token's context, itself included. made: the library's."""

    lengths_T: Tensor
    made: ext.Schedule


@dataclass(frozen=True, slots=True)
class FlashMlaDecode:
    """FlashMLA. Of an e4m3 plane it takes e4m3 queries too: they are scaled by their largest number. Each token is a
    row of its own: of a longer row it wants the length at its last token, which is padding where a sequence ends.
    """

    heads: int
    rank: int
    scale: float
    fp8: bool

    def prepare(self, rows: MlaDecodeRows) -> FlashSchedule:
        lengths_T = (rows.positions_T + 1).to(torch.int32)
        made = ext.schedule_fp8(lengths_T, self.heads) if self.fp8 else ext.schedule()
        return FlashSchedule(lengths_T, made)

    def attend(
        self,
        query_THD: Tensor,
        plane_PSD: Tensor,
        plane_scale: Tensor | None,
        uv_HRv: Tensor,
        rows: MlaDecodeRows,
        prepared: FlashSchedule,
    ) -> Tensor:
        query_scale = None
        if plane_scale is None:
            # its bf16 kernel starts when the one before it lets others start, and does not wait for what that still
            # writes, queries and latents: a kernel that does wait, and lets nobody start, must stand between
            prepared.lengths_T.add_(0)
        else:
            query_scale = (query_THD.abs().amax().float() / FP8_MAX).clamp_min(1e-12).view(1)
            query_THD = (query_THD / query_scale).to(plane_PSD.dtype)
        table_TL = rows.table_RL[: len(query_THD) // rows.query]
        if rows.query > 1:
            table_TL = table_TL.repeat_interleave(rows.query, 0)
        u_THr, _ = ext.decode(
            query_THD,
            plane_PSD,
            table_TL,
            prepared.lengths_T,
            prepared.made,
            scale=self.scale,
            rank=self.rank,
            query=1,
            query_scale=query_scale,
            plane_scale=plane_scale,
        )
        # its last kernel joins splits; where there are none it ends at once, before the one that attends does. Who
        # overlaps with it, as cuBLAS does too, waits for nothing: so what comes next must not
        return triton.up(u_THr, uv_HRv, overlap=False)


@dataclass(frozen=True, slots=True)
class MlaDecodeBySize:
    """Own kernels for few tokens, where FlashMLA's schedule and its joining of splits cost more than they save, and for
    drafts that part ways, since it sees all that stands before a token; FlashMLA beyond.
    """

    own: TritonMlaDecode
    library: FlashMlaDecode

    def prepare(self, rows: MlaDecodeRows) -> FlashSchedule | None:
        enough = FLASHMLA_TOKENS_FP8 if self.library.fp8 else FLASHMLA_TOKENS
        few = len(rows.positions_T) < enough
        return None if few or rows.tree_mask_T is not None else self.library.prepare(rows)

    def attend(
        self,
        query_THD: Tensor,
        plane_PSD: Tensor,
        plane_scale: Tensor | None,
        uv_HRv: Tensor,
        rows: MlaDecodeRows,
        prepared: FlashSchedule | None,
    ) -> Tensor:
        given = query_THD, plane_PSD, plane_scale, uv_HRv, rows
        return self.own.attend(*given, None) if prepared is None else self.library.attend(*given, prepared)


def triton_prefill(
    query_THq: Tensor,
    latents_SD: Tensor,
    uk_HnR: Tensor,
    uv_HRv: Tensor,
    query_starts_R1: Tensor,
    context_starts_R1: Tensor,
    *,
    max_query: int,
    max_context: int,
    scale: float,
    causal: bool,
    out_THv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Own kernel, which takes the key that all heads share as it is, and needs no bound of the context."""
    heads, nope, rank = uk_HnR.shape
    latent_Sr, rope_Sc = latents_SD[:, :rank], latents_SD[:, rank:]
    key_SHn = torch.mm(latent_Sr, uk_HnR.view(-1, rank).t()).view(-1, heads, nope)
    given = query_THq, key_SHn, rope_Sc, _values(latent_Sr, uv_HRv.transpose(1, 2)), query_starts_R1, context_starts_R1
    return triton.prefill(*given, max_query=max_query, scale=scale, causal=causal, out_THv=out_THv)


def fa3_prefill(
    query_THq: Tensor,
    latents_SD: Tensor,
    uk_HnR: Tensor,
    uv_HRv: Tensor,
    query_starts_R1: Tensor,
    context_starts_R1: Tensor,
    *,
    max_query: int,
    max_context: int,
    scale: float,
    causal: bool,
    out_THv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention 3, which wants each head's key in one piece."""
    (heads, nope, rank), v = uk_HnR.shape, uv_HRv.shape[2]
    make = expand_latents if fits(heads, nope, v, latents_SD.shape[1] - rank, rank) else _by_products
    return fa3.prefill(
        query_THq,
        *make(latents_SD, uk_HnR, uv_HRv.transpose(1, 2)),
        query_starts_R1,
        context_starts_R1,
        max_query=max_query,
        max_context=max_context,
        scale=scale,
        causal=causal,
        out_THv=out_THv,
    )


def _by_products(latents_SD: Tensor, uk_HnR: Tensor, uv_HvR: Tensor) -> tuple[Tensor, Tensor]:
    """As `expand_latents`: the keys' product is written where it belongs, the shared key beside it."""
    heads, nope, rank = uk_HnR.shape
    latent_Sr, rope_Sc = latents_SD[:, :rank], latents_SD[:, rank:]
    key_SHq = latents_SD.new_empty(len(latents_SD), heads, nope + rope_Sc.shape[1])
    every_head = latent_Sr.unsqueeze(0).expand(heads, -1, -1)
    torch.bmm(every_head, uk_HnR.transpose(1, 2), out=key_SHq[..., :nope].transpose(0, 1))
    key_SHq[..., nope:] = rope_Sc.unsqueeze(1)
    return key_SHq, _values(latent_Sr, uv_HvR)


def _values(latent_Sr: Tensor, uv_HvR: Tensor) -> Tensor:
    """[S, H, v], of all heads by one product."""
    heads, width, rank = uv_HvR.shape
    return torch.mm(latent_Sr, uv_HvR.view(-1, rank).t()).view(-1, heads, width)


def by_size(heads: int, rank: int, scale: float, fp8: bool) -> MlaDecodeBySize:
    return MlaDecodeBySize(TritonMlaDecode(heads, rank, scale, fp8), FlashMlaDecode(heads, rank, scale, fp8))
