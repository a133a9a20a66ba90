"""FlashAttention 3's forward pass for prefill (`fa3_fwd_interface`, tested with fa3-fwd 0.0.3): ragged rows, keys side
by side, no pages.

Of that wheel paged keys, local attention and float16 are compiled out; head sizes 64 to 256 and 192 with values of 128
are in. It needs Hopper, torch ≥ 2.10 and CUDA 13. Measured on an H100 (bf16, causal, 192/128): 666 TFLOP/s at 4,096
tokens, 751 at 8,192.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase


def available() -> bool:
    """Whether fa3-fwd is installed and the current device is a Hopper."""
    return (
        importlib.util.find_spec("fa3_fwd") is not None
        and importlib.util.find_spec("fa3_fwd_interface") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] == 9
    )


@cache
def _operation() -> Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """What the library's own function calls: that one takes Python ten times as long, for autograd and
    torch.compile.
    """
    importlib.import_module("fa3_fwd_interface")  # registers it
    return torch.ops.fa3_fwd.fwd.default


def prefill(
    query_THd: Tensor,
    key_SKd: Tensor,
    value_SKv: Tensor,
    query_starts_R1: Tensor,
    context_starts_R1: Tensor,
    *,
    max_query: int,
    max_context: int,
    scale: float,
    causal: bool = True,
    out_THv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ragged rows: → (out [T, H, v], out_THv if it is given; LSE float32 [T, H], a view of [H, T]; natural
    logarithm).

    Row i's query tokens are query_starts[i] … query_starts[i + 1] and, if causal, the last of its context,
    context_starts[i] … context_starts[i + 1]; starts: int32 [R + 1]. bfloat16; views are fine, last stride 1.
    max_query, max_context: upper bounds of a row. Tokens behind the last row are left undefined. Use with query heads a
    multiple of key heads.
    """
    made_THv, lse_HT, *_ = _operation()(
        query_THd, key_SKd, value_SKv,
        None, None, None,  # k_new, v_new, qv
        out_THv,
        query_starts_R1, context_starts_R1, None,  # cu_seqlens_q, _k, _k_new
        None, None,  # seqused_q, _k
        max_query, max_context,
        None, None, None,  # page_table, kv_batch_idx, leftpad_k
        None, None, None,  # rotary_cos, rotary_sin, seqlens_rotary
        None, None, None,  # q_descale, k_descale, v_descale
        scale, causal,
        -1, -1, 0, 0.0,  # window_size_left, _right, attention_chunk, softcap
        True, None, 1, None, 0,  # rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin
    )  # fmt: skip
    return made_THv, lse_HT.t()


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with its definition; RuntimeError if the library cannot run here or is wrong."""
    _, heads, kv_heads, dim, value_dim, *_ = case
    generator = torch.Generator(device).manual_seed(1)
    queries, contexts, scale = (70, 3), (200, 3), dim**-0.5

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    q, k, v = (
        drawn(sum(queries), heads, dim),
        drawn(sum(contexts), kv_heads, dim),
        drawn(sum(contexts), kv_heads, value_dim),
    )
    starts, begins = (torch.tensor((0, *counts), device=device).cumsum(0).int() for counts in (queries, contexts))
    try:
        out, lse = prefill(q, k, v, starts, begins, max_query=70, max_context=200, scale=scale)
        torch.cuda.synchronize(device)
    except (RuntimeError, AttributeError, TypeError, OSError, ImportError) as error:
        raise RuntimeError(
            f"fa3-fwd does not run here ({error}): it needs Hopper, torch ≥ 2.10 and CUDA 13; or use"
            " --attention-backend triton"
        ) from error
    token = context = 0
    for query, length in zip(queries, contexts, strict=True):
        own, its = slice(token, token + query), slice(context, context + length)
        key, value = (x[its].float().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,shd->qhs", q[own].float(), key) * scale
        behind = torch.arange(length, device=device) > length - query + torch.arange(query, device=device).unsqueeze(1)
        scores.masked_fill_(behind.unsqueeze(1), -torch.inf)
        exact = torch.einsum("qhs,shv->qhv", scores.softmax(-1), value)
        wrong = float((out[own].float() - exact).norm() / exact.norm())
        wrong = max(wrong, float((lse[own] - scores.logsumexp(-1)).abs().max()))
        if not wrong < 0.02:
            raise RuntimeError(f"fa3-fwd is wrong here by {wrong:.3f}: use --attention-backend triton")
        token, context = token + query, context + length
