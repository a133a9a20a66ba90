"""`ref.verify` in one launch, a program for each row. It moves a few kB: the launch is the cost."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.build_inputs.ref import InputTensors, SlotTensors
from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.verify.ref import AcceptedPaths, Verification


@triton.jit
def _verify_drafts(
    drawn_N,
    ids_N,
    positions_N,
    write_N,
    real_N,
    slot_N,
    ints_NI,
    stop_SK,
    tokens_SL,
    ints_SI,
    table_SP,
    nodes_SN3,
    tokens_RD,
    nodes_RD,
    count_R,
    done_R,
    token_M,
    ids_M,
    positions_M,
    real_M,
    from_M,
    to_M,
    L,
    P,
    Q,
    D,
    NODES: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0)
    first = row * Q
    q_B, d_B, k_B = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    inside_Q, inside_D = q_B < Q, d_B < D
    slot, own = tl.load(slot_N + first), ints_NI + first * COLUMNS
    length, at, end, drafts = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 7)
    drawn_B = tl.load(drawn_N + first + q_B, mask=inside_Q, other=-2)
    draft_B = tl.load(ids_N + first + q_B, mask=inside_Q, other=-3)
    drafted_B = (tl.load(real_N + first + q_B, mask=inside_Q, other=0) != 0) & (q_B > 0) & (q_B <= drafts)
    if nodes_SN3 is None:
        parent_B = q_B - 1
    else:
        parent_B = tl.load(nodes_SN3 + (slot * NODES + q_B) * 3, mask=inside_Q, other=-1)
    stop_K = tl.load(stop_SK + slot * K + k_B, mask=k_B < K, other=-1)
    stop_B = tl.sum((drawn_B[:, None] == stop_K[None, :]).to(tl.int32), 1) + (drawn_B < 0).to(tl.int32)
    node, going = row * 0, row * 0 + 1
    node_D = tl.zeros([BLOCK_D], tl.int32)
    token_D = tl.zeros([BLOCK_D], tl.int64)
    stop_D = tl.zeros([BLOCK_D], tl.int32)
    for d in range(D):
        token = tl.sum(tl.where(q_B == node, drawn_B, 0))
        stop = tl.sum(tl.where(q_B == node, stop_B, 0))
        node_D = tl.where(d_B == d, node, node_D)
        token_D = tl.where(d_B == d, token, token_D)
        stop_D = tl.where(d_B == d, stop, stop_D)
        child = tl.max(tl.where(drafted_B & (parent_B == node) & (draft_B == token), q_B, 0), 0)
        going = going * ((stop == 0) & (child > 0)).to(tl.int32)
        node = child * going
    right = tl.sum((node_D > 0).to(tl.int64))
    count = tl.where(end > 0, tl.minimum(1 + right, tl.maximum(end - length, 0)), 0)
    new = length + count
    stopped = tl.sum(tl.where(d_B == tl.maximum(count - 1, 0), stop_D, 0))
    alive = (new < end) & (stopped == 0)
    on_D = d_B < count
    tl.store(tokens_SL + slot * L + length + d_B, tl.maximum(token_D, 0).to(tl.int32), mask=on_D)
    tl.store(ints_SI + slot * COLUMNS, new)
    tl.store(ints_SI + slot * COLUMNS + 1, new - 1)
    tl.store(ints_SI + slot * COLUMNS + 2, tl.where(alive, end, 0))
    tl.store(count_R + row, count)
    tl.store(done_R + row, alive == 0)
    m_D, n_D = row * D + d_B, first + node_D
    tl.store(tokens_RD + m_D, token_D, mask=inside_D)
    if token_M is not None:
        tl.store(nodes_RD + m_D, node_D.to(tl.int64), mask=inside_D)
        tl.store(token_M + m_D, n_D.to(tl.int64), mask=inside_D)
        tl.store(ids_M + m_D, tl.load(ids_N + n_D, mask=on_D, other=0), mask=inside_D)
        tl.store(positions_M + m_D, tl.load(positions_N + n_D, mask=on_D, other=0), mask=inside_D)
        tl.store(real_M + m_D, on_D, mask=inside_D)
        tl.store(from_M + m_D, tl.load(write_N + n_D, mask=on_D, other=0), mask=inside_D)
        column_D = tl.where(on_D, at + d_B, 0)
        page_D = tl.load(table_SP + slot * P + column_D // PAGE).to(tl.int64)
        tl.store(to_M + m_D, tl.where(on_D, page_D * PAGE + column_D % PAGE, 0), mask=inside_D)


def verify(
    drawn_N: Tensor, step: InputTensors, slots: SlotTensors, page: int, out: Verification, paths: AcceptedPaths | None
) -> None:
    """See `ref.verify`."""
    rows, deepest = out.tokens_RD.shape
    query, stops = len(drawn_N) // rows, slots.stop_SK.shape[1]
    nodes = 1 if slots.nodes_SN3 is None else slots.nodes_SN3.shape[1]
    _verify_drafts[(rows,)](
        drawn_N, step.ids_T, step.positions_T, step.write_T, step.real_T, step.slot_T, step.ints_TI, *slots, *out,
        *(paths or (None,) * 6), slots.tokens_SL.shape[1], slots.table_SP.shape[1], query, deepest, nodes, page,
        slots.ints_SI.shape[1], stops, triton.next_power_of_2(query), triton.next_power_of_2(deepest),
        triton.next_power_of_2(stops), num_warps=1, **launch_options(drawn_N),
    )  # fmt: skip
