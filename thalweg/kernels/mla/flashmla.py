"""FlashMLA's dense decode for Hopper (`flash_mla`, tested with sgl-flash-mla 1.0.0).

FlashMLA's own releases dropped Hopper; sgl-flash-mla keeps those kernels as "legacy". Pages of 64, 512 + 64 dims,
bfloat16, or e4m3 queries and keys with one scale each. A scheduler kernel (12-20 µs) cuts contexts into even parts once
a step: a schedule is made for a step and given to all its layers, the first of which fills it. Under a CUDA graph a new
one is made inside the capture, so that every replay schedules anew.

Its bf16 kernel starts as soon as the kernel before it lets others start, and does not wait for what that one still
writes. Measured on an H100, 128 heads: 64 x 4,096 tokens 124 µs (591 TFLOP/s); 16 heads, 128 x 16,384: 819 µs (2.95
TB/s), e4m3 456 µs.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import DecodeRows, LatentPlane
from thalweg.kernels.attend.check import CUDA_13, SCALE, check_latents
from thalweg.kernels.mla import triton
from thalweg.kernels.mla.backends import MlaDecodeKernel, MlaShape, TritonMlaDecode

FP8_MAX = 448.0
MIN_TOKENS, MIN_TOKENS_FP8 = 8, 32  # from so many decode tokens on FlashMLA is faster, where it is at all
Schedule = Any  # flash_mla's FlashMLASchedMeta


def available() -> bool:
    """Whether a flash_mla with the Hopper kernels is installed and the current device is a Hopper."""
    spec = importlib.util.find_spec("flash_mla")
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if spec is None or spec.origin is None or not is_hopper:
        return False
    return any(Path(spec.origin).parent.glob("_C_legacy.*.so"))


@cache
def _library() -> ModuleType:
    return importlib.import_module("flash_mla")


def schedule() -> Schedule:
    """An empty schedule for a bfloat16 step."""
    return _library().get_mla_metadata()[0]


def schedule_fp8(lengths_R: Tensor, rows: int) -> Schedule:
    """The schedule of an e4m3 step: launches its kernel. lengths_R: int32 context lengths. rows: query tokens of a row
    times heads.
    """
    empty = schedule()
    parts, splits = _library().get_mla_decoding_metadata(lengths_R, rows, 1, is_fp8_kvcache=True, use_legacy=True)
    empty.tile_scheduler_metadata, empty.num_splits = parts, splits
    return empty


def decode(
    query_THD: Tensor,
    plane_PSD: Tensor,
    table_TL: Tensor,
    lengths_T: Tensor,
    schedule: Schedule,
    *,
    scale: float,
    rank: int,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Absorbed queries over pages, each token a row: → (sums bfloat16 [T, H, r], LSE float32 [T, H]).

    query_THD: contiguous, 576 dims. lengths_T: int32 context lengths, the tokens included. scales: float32 [1] of e4m3
    queries and latents.
    """
    tokens, heads = query_THD.shape[:2]
    out, lse = _library().flash_mla_with_kvcache(
        query_THD.view(tokens, 1, heads, -1),
        plane_PSD.unsqueeze(2),
        table_TL,
        lengths_T,
        rank,
        schedule,
        softmax_scale=scale,
        causal=False,
        is_fp8_kvcache=plane_PSD.dtype == torch.float8_e4m3fn,
        use_legacy=True,
        descale_q=scales[0],
        descale_k=scales[1],
    )
    return out.view(-1, heads, rank), lse.transpose(1, 2).reshape(-1, heads)


class FlashSchedule(NamedTuple):
    """What all layers of a step share."""

    lengths_T: Tensor  # int32: of each token's context, itself included
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class FlashMlaDecode:
    """Each token is a row of its own: of a longer row the library wants the length at its last token, which is padding
    where a sequence ends. With e4m3 latents queries are e4m3 too, scaled by their largest number.
    """

    shape: MlaShape

    def prepare(self, rows: DecodeRows) -> FlashSchedule:
        lengths_T = (rows.positions_T + 1).to(torch.int32)
        return FlashSchedule(lengths_T, schedule_fp8(lengths_T, self.shape.heads) if self.shape.is_fp8 else schedule())

    def attend(
        self, query_THD: Tensor, latents: LatentPlane, uv_HRv: Tensor, rows: DecodeRows, prepared: FlashSchedule
    ) -> Tensor:
        u_THr, _ = self.attend_with_lse(query_THD, latents, rows, prepared)
        # its last kernel merges splits; where there are none it ends at once, before the one that attends does. A
        # kernel that overlaps with it, as cuBLAS's do too, waits for nothing: so the next one must not overlap
        return triton.up(u_THr, uv_HRv, overlap=False)

    def attend_with_lse(
        self, query_THD: Tensor, latents: LatentPlane, rows: DecodeRows, prepared: FlashSchedule
    ) -> tuple[Tensor, Tensor]:
        (plane_PSD, plane_scale), (_, rank, scale, is_fp8), query_scale = latents, self.shape, None
        if is_fp8:
            query_scale = (query_THD.abs().amax().float() / FP8_MAX).clamp_min(1e-12).view(1)
            query_THD = (query_THD / query_scale).to(plane_PSD.dtype)
        else:
            # a kernel that waits for the queries and latents, and lets none start early, must come before the library's
            prepared.lengths_T.add_(0)
        table_TL = rows.table_RL[: len(query_THD) // rows.query]
        if rows.query > 1:
            table_TL = table_TL.repeat_interleave(rows.query, 0)
        scales = query_scale, plane_scale
        return decode(query_THD, plane_PSD, table_TL, *prepared, scale=scale, rank=rank, scales=scales)


@dataclass(frozen=True, slots=True)
class MlaDecodeBySize:
    """Own kernels for few tokens, where FlashMLA's schedule and its merging of splits cost more than they save, and for
    trees of drafts, whose masks it does not have; FlashMLA beyond.
    """

    own: MlaDecodeKernel
    library: MlaDecodeKernel
    min_tokens: int  # from which the library attends

    def prepare(self, rows: DecodeRows) -> FlashSchedule | None:
        is_own = len(rows.positions_T) < self.min_tokens or rows.tree_mask_T is not None
        return None if is_own else self.library.prepare(rows)

    def attend(
        self, query_THD: Tensor, latents: LatentPlane, uv_HRv: Tensor, rows: DecodeRows, prepared: FlashSchedule | None
    ) -> Tensor:
        kernel = self.own if prepared is None else self.library
        return kernel.attend(query_THD, latents, uv_HRv, rows, prepared)

    def attend_with_lse(
        self, query_THD: Tensor, latents: LatentPlane, rows: DecodeRows, prepared: FlashSchedule | None
    ) -> tuple[Tensor, Tensor]:
        kernel = self.own if prepared is None else self.library
        return kernel.attend_with_lse(query_THD, latents, rows, prepared)


def by_size(shape: MlaShape) -> MlaDecodeBySize:
    least = MIN_TOKENS_FP8 if shape.is_fp8 else MIN_TOKENS
    return MlaDecodeBySize(TritonMlaDecode(shape), FlashMlaDecode(shape), least)


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with its definition; RuntimeError if the library cannot run here or is wrong."""
    heads, is_fp8 = case.heads, case.is_fp8_cache
    one = torch.ones(1, dtype=torch.float32, device=device) if is_fp8 else None

    def run(query: Tensor, plane: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        made = schedule_fp8(lengths, heads) if is_fp8 else schedule()
        return decode(query, plane, table, lengths, made, scale=SCALE, rank=512, scales=(one, one))

    check_latents("FlashMLA", CUDA_13, run, device, heads, torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
