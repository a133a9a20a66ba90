"""`ref.verify` in one launch, a program for each row. It moves a few kB: the launch is the cost."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.build_inputs.ref import InputTensors, SlotTensors
from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.slot_columns import END, INT_COLUMNS, LENGTH, NUM_COMPUTED, NUM_DRAFTS
from thalweg.kernels.verify.ref import AcceptedPaths, Verification


@triton.jit
def _verify_drafts(
    target_ids_N, step, slots, out, paths, L, P, Q, D,
    NODES: constexpr, PAGE: constexpr, K: constexpr, BLOCK_Q: constexpr, BLOCK_D: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0)
    first = row * Q
    q_B, d_B, k_B = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D), tl.arange(0, triton.next_power_of_2(K))
    inside_Q, inside_D = q_B < Q, d_B < D
    slot, own = tl.load(step.slot_T + first), step.ints_TI + first * INT_COLUMNS
    length, at, end, drafts = (
        tl.load(own + LENGTH),
        tl.load(own + NUM_COMPUTED),
        tl.load(own + END),
        tl.load(own + NUM_DRAFTS),
    )
    target_id_B = tl.load(target_ids_N + first + q_B, mask=inside_Q, other=-2)
    draft_B = tl.load(step.ids_T + first + q_B, mask=inside_Q, other=-3)
    drafted_B = (tl.load(step.real_T + first + q_B, mask=inside_Q, other=0) != 0) & (q_B > 0) & (q_B <= drafts)
    if slots.nodes_SN3 is None:
        parent_B = q_B - 1
    else:
        parent_B = tl.load(slots.nodes_SN3 + (slot * NODES + q_B) * 3, mask=inside_Q, other=-1)
    stop_K = tl.load(slots.stop_SK + slot * K + k_B, mask=k_B < K, other=-1)
    stop_B = tl.sum((target_id_B[:, None] == stop_K[None, :]).to(tl.int32), 1) + (target_id_B < 0).to(tl.int32)
    node, going = row * 0, row * 0 + 1
    node_D = tl.zeros([BLOCK_D], tl.int32)
    token_D = tl.zeros([BLOCK_D], tl.int64)
    stop_D = tl.zeros([BLOCK_D], tl.int32)
    for d in range(D):
        token = tl.sum(tl.where(q_B == node, target_id_B, 0))
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
    tl.store(slots.tokens_SL + slot * L + length + d_B, tl.maximum(token_D, 0).to(tl.int32), mask=on_D)
    state = slots.ints_SI + slot * INT_COLUMNS
    tl.store(state + LENGTH, new)
    tl.store(state + NUM_COMPUTED, new - 1)
    tl.store(state + END, tl.where(alive, end, 0))
    tl.store(out.count_R + row, count)
    tl.store(out.done_R + row, alive == 0)
    m_D, n_D = row * D + d_B, first + node_D
    tl.store(out.tokens_RD + m_D, token_D, mask=inside_D)
    if paths is not None:
        tl.store(out.nodes_RD + m_D, node_D.to(tl.int64), mask=inside_D)
        tl.store(paths.token_M + m_D, n_D.to(tl.int64), mask=inside_D)
        tl.store(paths.ids_M + m_D, tl.load(step.ids_T + n_D, mask=on_D, other=0), mask=inside_D)
        tl.store(paths.positions_M + m_D, tl.load(step.positions_T + n_D, mask=on_D, other=0), mask=inside_D)
        tl.store(paths.real_M + m_D, on_D, mask=inside_D)
        tl.store(paths.from_M + m_D, tl.load(step.write_T + n_D, mask=on_D, other=0), mask=inside_D)
        column_D = tl.where(on_D, at + d_B, 0)
        page_D = tl.load(slots.table_SP + slot * P + column_D // PAGE).to(tl.int64)
        tl.store(paths.to_M + m_D, tl.where(on_D, page_D * PAGE + column_D % PAGE, 0), mask=inside_D)


def verify(
    target_ids_N: Tensor,
    step: InputTensors,
    slots: SlotTensors,
    page: int,
    out: Verification,
    paths: AcceptedPaths | None,
) -> None:
    """See `ref.verify`."""
    rows, deepest = out.tokens_RD.shape
    query, nodes = len(target_ids_N) // rows, 1 if slots.nodes_SN3 is None else slots.nodes_SN3.shape[1]
    _verify_drafts[(rows,)](
        target_ids_N, step, slots, out, paths, slots.tokens_SL.shape[1], slots.table_SP.shape[1], query, deepest,
        nodes, page, slots.stop_SK.shape[1], triton.next_power_of_2(query), triton.next_power_of_2(deepest),
        num_warps=1, **launch_options(target_ids_N),
    )  # fmt: skip
