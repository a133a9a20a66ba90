"""What `ref.follow` says, in one launch: a program a row. It moves a few hundred bytes of each; the launch is all that
it takes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options
from thalweg.kernels.verify_chain.ref import Out


@triton.jit
def _follow(
    drawn_N, ids_N, slot_N, ints_NI, stop_SK, tokens_SL, ints_SI, tokens_EQ, count_E, done_E, L, Q,
    COLUMNS: tl.constexpr, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    q_B, k_B = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    first = row * Q
    slot = tl.load(slot_N + first)
    length, end = tl.load(ints_NI + first * COLUMNS), tl.load(ints_NI + first * COLUMNS + 2)
    made = tl.load(ints_NI + first * COLUMNS + 7)
    token_B = tl.load(drawn_N + first + q_B, mask=q_B < Q, other=-2)
    draft_B = tl.load(ids_N + first + 1 + q_B, mask=q_B < Q - 1, other=-3)
    computed_B = tl.load(ints_NI + (first + 1 + q_B) * COLUMNS + 2, mask=q_B < Q - 1, other=0) > 0
    stop_K = tl.load(stop_SK + slot * K + k_B, mask=k_B < K, other=-1)
    stop_B = tl.sum((token_B[:, None] == stop_K[None, :]).to(tl.int32), 1) + (token_B < 0).to(tl.int32)
    on_B = (token_B == draft_B) & (q_B < made) & computed_B & (stop_B == 0)
    right = tl.min(tl.where(on_B, BLOCK_Q, q_B), 0)  # the last position has no draft, so that one is not on
    left = tl.maximum(end - length, 0)
    count = tl.where(end > 0, tl.minimum(1 + right.to(tl.int64), left), 0)
    new = length + count
    stopped = tl.sum(tl.where(q_B == tl.maximum(count - 1, 0), stop_B, 0))
    going = (new < end) & (stopped == 0)
    tl.store(tokens_SL + slot * L + length + q_B, tl.maximum(token_B, 0).to(tl.int32), mask=q_B < count)
    tl.store(ints_SI + slot * COLUMNS, new)
    tl.store(ints_SI + slot * COLUMNS + 1, new - 1)
    tl.store(ints_SI + slot * COLUMNS + 2, tl.where(going, end, 0))
    tl.store(tokens_EQ + first + q_B, token_B, mask=q_B < Q)
    tl.store(count_E + row, count)
    tl.store(done_E + row, going == 0)


def verify_chain(
    drawn_N: Tensor, ids_N: Tensor, slot_N: Tensor, ints_NI: Tensor, stop_SK: Tensor, tokens_SL: Tensor, ints_SI: Tensor, out: Out
) -> None:  # fmt: skip
    """See `ref.verify_chain`."""
    rows, query = out[0].shape
    _follow[(rows,)](
        drawn_N, ids_N, slot_N, ints_NI, stop_SK, tokens_SL, ints_SI, *out, tokens_SL.shape[1], query, ints_SI.shape[1],
        stop_SK.shape[1], triton.next_power_of_2(query), triton.next_power_of_2(stop_SK.shape[1]),
        num_warps=1, **launch_options(ints_SI),
    )  # fmt: skip
