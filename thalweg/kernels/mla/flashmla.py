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

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import DecodeRows, LatentPlane
from thalweg.kernels.launch import hopper_has
from thalweg.kernels.mla import triton
from thalweg.kernels.mla.backends import MlaShape, TritonMlaDecode
from thalweg.kernels.mla.check import check_decode

FP8_MAX = 448.0


class Crossover(NamedTuple):
    """A point from which on FlashMLA is faster than own kernels. Both must be reached. A captured step has the longest
    context that there may be, so the context does not decide.
    """

    heads: int
    tokens: int  # decode tokens of the step


# By whether latents are e4m3, measured on an H100 (benchmarks/gpu/attention.py --only crossover). Own kernels and
# FlashMLA in us: 128 heads, 1 x 1,024 tokens 24 and 21, 4 x 1,024 66 and 22, 4 x 16,384 125 and 65; 64 heads, 1 x 4,096
# 23 and 31, 4 x 4,096 50 and 29. In e4m3: 128 heads, 1 x 1,024 29 and 41, 4 x 1,024 72 and 42, 4 x 16,384 180 and 74;
# 64 heads, 4 x 4,096 57 and 46.
CROSSOVERS = {
    False: (Crossover(128, 1), Crossover(64, 4), Crossover(1, 8)),
    True: (Crossover(64, 4), Crossover(1, 32)),
}
ALWAYS = Crossover(1, 1)


def available() -> bool:
    """Whether a flash_mla with the Hopper kernels is installed and the current device is a Hopper."""
    if not hopper_has("flash_mla"):
        return False
    spec = importlib.util.find_spec("flash_mla")
    return spec is not None and any(Path(spec.origin or "").parent.glob("_C_legacy.*.so"))


class FlashSchedule(NamedTuple):
    """The part of a step that all layers share."""

    lengths_T: Tensor  # int32: of each token's context, itself included
    schedule: Any  # flash_mla's FlashMLASchedMeta


class FlashMlaDecode:
    """Each token is a row of its own, because the library takes the length at a row's last token, which is padding
    where a sequence ends. With e4m3 latents queries are e4m3 too, scaled by their largest number.

    Own kernels compute steps that reach none of the `crossovers`: there the library's schedule and merge cost more than
    they save. They also compute trees of drafts, because the library has no tree masks.
    """

    def __init__(self, shape: MlaShape, crossovers: Sequence[Crossover] = (ALWAYS,)) -> None:
        self.shape, self.crossovers, self.own = shape, crossovers, TritonMlaDecode(shape)

    def is_faster(self, rows: DecodeRows) -> bool:
        """Whether the library is faster for this step."""
        heads, tokens = self.shape.heads, len(rows.positions_T)
        return any(heads >= point.heads and tokens >= point.tokens for point in self.crossovers)

    def prepare(self, rows: DecodeRows) -> FlashSchedule | None:
        """None for own kernels. An e4m3 step launches the library's scheduler; the first layer of others does."""
        if rows.tree_mask_T is not None or not self.is_faster(rows):
            return None
        import flash_mla

        lengths_T, schedule = (rows.positions_T + 1).to(torch.int32), flash_mla.get_mla_metadata()[0]
        if self.shape.is_fp8:
            options = {"is_fp8_kvcache": True, "use_legacy": True}
            parts, splits = flash_mla.get_mla_decoding_metadata(lengths_T, self.shape.heads, 1, **options)
            schedule.tile_scheduler_metadata, schedule.num_splits = parts, splits
        return FlashSchedule(lengths_T, schedule)

    def attend(
        self, query_THD: Tensor, latents: LatentPlane, uv_HRv: Tensor, rows: DecodeRows, prepared: FlashSchedule | None
    ) -> Tensor:
        if prepared is None:
            return self.own.attend(query_THD, latents, uv_HRv, rows, None)
        u_THr, _ = self.attend_with_lse(query_THD, latents, rows, prepared)
        # its last kernel merges splits; where there are none it ends at once, before the one that attends does. A
        # kernel that overlaps with it, as cuBLAS's do too, waits for nothing: so the next one must not overlap
        return triton.up(u_THr, uv_HRv, overlap=False)

    def attend_with_lse(
        self, query_THD: Tensor, latents: LatentPlane, rows: DecodeRows, prepared: FlashSchedule | None
    ) -> tuple[Tensor, Tensor]:
        if prepared is None:
            return self.own.attend_with_lse(query_THD, latents, rows, None)
        import flash_mla

        (plane_PSD, plane_scale), (heads, rank, scale, is_fp8), query_scale = latents, self.shape, None
        if is_fp8:
            query_scale = (query_THD.abs().amax().float() / FP8_MAX).clamp_min(1e-12).view(1)
            query_THD = (query_THD / query_scale).to(plane_PSD.dtype)
        else:
            # a kernel that waits for the queries and latents, and lets none start early, must come before the library's
            prepared.lengths_T.add_(0)
        tokens = len(query_THD)
        table_TL = rows.table_RL[: tokens // rows.query]
        if rows.query > 1:
            table_TL = table_TL.repeat_interleave(rows.query, 0)
        out, lse = flash_mla.flash_mla_with_kvcache(
            query_THD.view(tokens, 1, heads, -1),
            plane_PSD.unsqueeze(2),
            table_TL,
            prepared.lengths_T,
            rank,
            prepared.schedule,
            softmax_scale=scale,
            causal=False,
            is_fp8_kvcache=is_fp8,
            use_legacy=True,
            descale_q=query_scale,
            descale_k=plane_scale,
        )
        return out.view(-1, heads, rank), lse.transpose(1, 2).reshape(-1, heads)


def by_size(shape: MlaShape) -> FlashMlaDecode:
    return FlashMlaDecode(shape, CROSSOVERS[shape.is_fp8])


def check(device: torch.device, case: CheckCase) -> None:
    check_decode("FlashMLA", "it needs Hopper, torch ≥ 2.10 and CUDA 13", FlashMlaDecode, device, case)
