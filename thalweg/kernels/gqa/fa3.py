"""FlashAttention 3's forward pass for prefill (`fa3_fwd_interface`, tested with fa3-fwd 0.0.3): ragged rows, contiguous
keys, no pages.

That wheel is built without paged keys, local attention and float16; it has head sizes 64 to 256, and 192 with values of
128. It needs Hopper, torch ≥ 2.10 and CUDA 13. Measured on an H100 (bf16, causal, 192/128): 666 TFLOP/s at 4,096
tokens, 751 at 8,192.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import RaggedRows, RowLengths
from thalweg.kernels.attend.case import exact_rows, starts_of
from thalweg.kernels.case import normal
from thalweg.kernels.check import check_results
from thalweg.kernels.launch import hopper_has


def available() -> bool:
    """Whether fa3-fwd is installed and the current device is a Hopper."""
    return hopper_has("fa3_fwd", "fa3_fwd_interface")


@cache
def _operation() -> Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """The operator below the library's Python function, which takes ten times as long (autograd, torch.compile)."""
    importlib.import_module("fa3_fwd_interface")  # registers it
    return torch.ops.fa3_fwd.fwd.default


def prefill(
    query_THd: Tensor,
    key_SKd: Tensor,
    value_SKv: Tensor,
    rows: RaggedRows,
    *,
    scale: float,
    out_THv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ragged rows: → (out [T, H, v], out_THv if given; LSE float32 [T, H], a view of [H, T]).

    bfloat16; views are fine, last stride 1. Tokens after the last row are left undefined. Query heads are a multiple of
    key heads.
    """
    out, lse_HT, *_ = _operation()(
        query_THd, key_SKd, value_SKv,
        None, None, None,  # k_new, v_new, qv
        out_THv,
        *rows[:2], None,  # cu_seqlens_q, _k, _k_new
        None, None,  # seqused_q, _k
        rows.max_query, rows.max_context,
        None, None, None,  # page_table, kv_batch_idx, leftpad_k
        None, None, None,  # rotary_cos, rotary_sin, seqlens_rotary
        None, None, None,  # q_descale, k_descale, v_descale
        scale, rows.is_causal,
        -1, -1, 0, 0.0,  # window_size_left, _right, attention_chunk, softcap
        True, None, 1, None, 0,  # rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin
    )  # fmt: skip
    return out, lse_HT.t()


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with its definition; RuntimeError if the library cannot run here or is wrong."""
    generator, lengths, scale = torch.Generator().manual_seed(1), RowLengths((70, 3), (200, 3)), case.head_dim**-0.5
    shapes = (73, case.heads, case.head_dim), (203, case.kv_heads, case.head_dim), (203, case.kv_heads, case.value_dim)
    query, key, value = (normal(generator, *shape, dtype=torch.bfloat16) for shape in shapes)
    keys, values = (torch.split(x, list(lengths.contexts)) for x in (key, value))
    exact = exact_rows(query, keys, values, lengths, scale)

    def run() -> tuple[Tensor, Tensor]:
        starts, context_starts = (starts_of(counts).to(device) for counts in lengths)
        rows = RaggedRows(starts, context_starts, 70, 200)
        return prefill(query.to(device), key.to(device), value.to(device), rows, scale=scale)

    needs = "it needs Hopper, torch ≥ 2.10 and CUDA 13; or use --attention-backend triton"
    check_results("fa3-fwd", needs, run, exact, 0.02)
