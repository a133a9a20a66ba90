"""FlashMLA's dense decode for Hopper (`flash_mla`, tested with sgl-flash-mla 1.0.0), and FlashAttention 3 for the
decompressed prefill.

FlashMLA's own releases dropped Hopper; sgl-flash-mla keeps those kernels as "legacy". Pages of 64, 512 + 64 dims,
bfloat16, or e4m3 queries and keys with one scale each. A scheduler kernel (12-20 µs) cuts contexts to even parts once a
step: a `Schedule` is made for a step and given to all its layers, the first of which fills it; under a CUDA graph make
a new one inside the capture, so that every replay schedules anew. Its bf16 kernel is launched to start as soon as the
one before it lets others start, and does not wait for what that still writes; `paged.py` puts a kernel between.
Measured on an H100, 128 heads: 64 x 4,096 tokens 124 µs (591 TFLOP/s); 16 heads, 128 x 16,384: 819 µs (2.95 TB/s), e4m3
456 µs.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.gqa import ext as fa3

Schedule = Any  # flash_mla's FlashMLASchedMeta


def available() -> bool:
    """Whether a flash_mla with the Hopper kernels is installed and the current device is a Hopper."""
    spec = importlib.util.find_spec("flash_mla")
    if (
        spec is None
        or spec.origin is None
        or not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9)
    ):
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
    empty = _library().get_mla_metadata()[0]
    parts, splits = _library().get_mla_decoding_metadata(lengths_R, rows, 1, is_fp8_kvcache=True, use_legacy=True)
    empty.tile_scheduler_metadata, empty.num_splits = parts, splits
    return empty


def decode(
    query_THD: Tensor,
    plane_PSD: Tensor,
    table_RL: Tensor,
    lengths_R: Tensor,
    schedule: Schedule,
    *,
    scale: float,
    rank: int,
    query: int = 1,
    query_scale: Tensor | None = None,
    plane_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed queries over pages: → (sums bfloat16 [T, H, r], LSE float32 [T, H]; natural logarithm).

    query_THD: [R * query, H, 576], contiguous; the row of token t is t // query, and its tokens are the last of its
    context. lengths_R: int32 context lengths, these tokens included. table_RL: int32. e4m3: queries too are e4m3 of
    value / query_scale, scales float32 [1].
    """
    rows, heads = table_RL.shape[0], query_THD.shape[1]
    fp8 = plane_PSD.dtype == torch.float8_e4m3fn
    out, lse = _library().flash_mla_with_kvcache(
        query_THD.view(rows, query, heads, -1),
        plane_PSD.unsqueeze(2),
        table_RL,
        lengths_R,
        rank,
        schedule,
        softmax_scale=scale,
        causal=query > 1,
        is_fp8_kvcache=fp8,
        use_legacy=True,
        descale_q=query_scale,
        descale_k=plane_scale,
    )
    return out.view(-1, heads, rank), lse.transpose(1, 2).reshape(-1, heads)


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with its definition; RuntimeError if the library cannot run here or is wrong."""
    heads, fp8 = case.heads, case.is_fp8_cache
    generator = torch.Generator(device).manual_seed(1)
    contexts, scale = (1, 200), 192**-0.5
    kept = torch.float8_e4m3fn if fp8 else torch.bfloat16
    plane = torch.randn(6, 64, 576, generator=generator, device=device).to(kept)
    q = torch.randn(2, heads, 576, generator=generator, device=device).to(kept)
    table = torch.tensor([[3, 0, 0, 0], [5, 1, 4, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.float32, device=device) if fp8 else None
    try:
        made = schedule_fp8(lengths, heads) if fp8 else schedule()
        out, lse = decode(q, plane, table, lengths, made, scale=scale, rank=512, query_scale=one, plane_scale=one)
        torch.cuda.synchronize(device)
    except (RuntimeError, AttributeError, TypeError, OSError, ImportError, AssertionError) as error:
        raise RuntimeError(
            f"FlashMLA does not run here ({error}): it needs Hopper, torch ≥ 2.10 and CUDA 13; or use"
            " --attention-backend triton"
        ) from error
    for row, context in enumerate(contexts):
        kv = plane[table[row].long()].flatten(0, 1)[:context].float()
        scores = q[row].float() @ kv.T * scale
        exact = scores.softmax(-1) @ kv[:, :512]
        wrong = float((out[row].float() - exact).norm() / exact.norm())
        wrong = max(wrong, float((lse[row] - scores.logsumexp(-1)).abs().max()))
        if not wrong < (0.05 if fp8 else 0.02):  # of e4m3 the weights of the keys are e4m3 too
            raise RuntimeError(f"FlashMLA is wrong here by {wrong:.3f}: use --attention-backend triton")


def check_prefill(device: torch.device, case: CheckCase) -> None:
    """Compares a small case of 192-dim keys and 128-dim values with its definition; RuntimeError if it cannot run here
    or is wrong.
    """
    fa3.check(device, CheckCase(heads=4, kv_heads=4, head_dim=192))
