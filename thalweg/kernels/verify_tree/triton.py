"""What `ref` says, in a launch each, a program a row; torch takes some thirty for the inputs and some sixty for the
path. They move a few kB; the launch is all that it takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options
from thalweg.kernels.verify_tree.ref import AcceptedPaths, SlotTensors, TreeInputs, TreeVerification

ENTRIES = 1024  # of a page table that a program copies


@triton.jit
def _spread(
    slot_R, tokens_SL, ints_SI, table_SP, nodes_SN3, ids_N, positions_N, columns_N, tree_mask_N, write_N, real_N, table_RP, slot_N,
    ints_NI, L, P, Q, pages, NODES: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slot_R + row)
    if tl.program_id(1) == 0:
        q_B = tl.arange(0, BLOCK_Q)
        inside, n_B = q_B < Q, row * Q + q_B
        own = ints_SI + slot * COLUMNS
        length, at, end, made = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 7)
        node_B = nodes_SN3 + (slot * NODES + q_B) * 3
        depth_B = tl.load(node_B + 1, mask=inside, other=0)
        mask_B = tl.load(node_B + 2, mask=inside, other=0)
        real_B = (at + q_B < end) & (q_B <= made) & inside
        column_B = tl.where(real_B, at + q_B, 0)
        page_B = tl.load(table_SP + slot * P + column_B // PAGE).to(tl.int64)
        token_B = tl.load(tokens_SL + slot * L + column_B).to(tl.int64)
        tl.store(ids_N + n_B, tl.where(real_B, token_B, 0), mask=inside)
        tl.store(positions_N + n_B, tl.where(real_B, at + depth_B, 0), mask=inside)
        tl.store(columns_N + n_B, column_B, mask=inside)
        tl.store(tree_mask_N + n_B, mask_B, mask=inside)
        tl.store(write_N + n_B, tl.where(real_B, page_B * PAGE + column_B % PAGE, 0), mask=inside)
        tl.store(real_N + n_B, real_B, mask=inside)
        tl.store(slot_N + n_B, slot + q_B * 0, mask=inside)
        for i in tl.static_range(COLUMNS):
            int_B = tl.load(own + i) + q_B * 0
            if i == 0:
                int_B = tl.minimum(length + depth_B, L - 1)
            if i == 1:
                int_B = at + q_B
            if i == 2:
                int_B = tl.where(length + depth_B < end, end, 0)
            tl.store(ints_NI + n_B * COLUMNS + i, int_B, mask=inside)
    p_B = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside_P = p_B < pages
    tl.store(
        table_RP + row.to(tl.int64) * pages + p_B, tl.load(table_SP + slot * P + p_B, mask=inside_P), mask=inside_P
    )


def build_tree_inputs(slot_R: Tensor, fields: SlotTensors, query: int, pages: int, page: int) -> TreeInputs:
    """See `ref.build_tree_inputs`."""
    rows, device = len(slot_R), slot_R.device
    tokens = rows * query
    # an allocation each: kernels are compiled for how their arguments are aligned
    ids, positions, columns, masks, write, slot_N = (
        torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(6)
    )
    real = torch.empty(tokens, dtype=torch.bool, device=device)
    table = torch.empty(rows, pages, dtype=fields.table_SP.dtype, device=device)
    columns_I = fields.ints_SI.shape[1]
    ints = torch.empty(tokens, columns_I, dtype=torch.int64, device=device)
    _spread[rows, triton.cdiv(pages, ENTRIES)](
        slot_R, *fields[1:], ids, positions, columns, masks, write, real, table, slot_N, ints, fields.tokens_SL.shape[1],
        fields.table_SP.shape[1], query, pages, fields.nodes_SN3.shape[1], page, columns_I, triton.next_power_of_2(query),
        ENTRIES, num_warps=4, **launch_options(slot_R),
    )  # fmt: skip
    return TreeInputs(ids, positions, columns, masks, write, real, table, slot_N, ints)


@triton.jit
def _climb(
    drawn_N, ids_N, positions_N, write_N, real_N, slot_N, ints_NI, stop_SK, tokens_SL, ints_SI, table_SP, nodes_SN3, tokens_RD,
    nodes_RD, count_R, done_R, token_M, ids_M, positions_M, real_M, from_M, to_M, L, P, Q, D, NODES: tl.constexpr,
    PAGE: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    first = row * Q
    q_B, d_B, k_B = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    inside_Q, inside_D = q_B < Q, d_B < D
    slot, own = tl.load(slot_N + first), ints_NI + first * COLUMNS
    length, at, end = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    drawn_B = tl.load(drawn_N + first + q_B, mask=inside_Q, other=-2)
    draft_B = tl.load(ids_N + first + q_B, mask=inside_Q, other=-3)
    drafted_B = (tl.load(real_N + first + q_B, mask=inside_Q, other=0) != 0) & (q_B > 0)
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
    tl.store(nodes_RD + m_D, node_D.to(tl.int64), mask=inside_D)
    tl.store(token_M + m_D, n_D.to(tl.int64), mask=inside_D)
    tl.store(ids_M + m_D, tl.load(ids_N + n_D, mask=on_D, other=0), mask=inside_D)
    tl.store(positions_M + m_D, tl.load(positions_N + n_D, mask=on_D, other=0), mask=inside_D)
    tl.store(real_M + m_D, on_D, mask=inside_D)
    tl.store(from_M + m_D, tl.load(write_N + n_D, mask=on_D, other=0), mask=inside_D)
    column_D = tl.where(on_D, at + d_B, 0)
    page_D = tl.load(table_SP + slot * P + column_D // PAGE).to(tl.int64)
    tl.store(to_M + m_D, tl.where(on_D, page_D * PAGE + column_D % PAGE, 0), mask=inside_D)


def verify_tree(
    drawn_N: Tensor, step: TreeInputs, fields: SlotTensors, page: int, out: TreeVerification, paths: AcceptedPaths
) -> None:
    """See `ref.verify_tree`."""
    rows, deepest = out.tokens_RD.shape
    query, stops = len(drawn_N) // rows, fields.stop_SK.shape[1]
    _climb[(rows,)](
        drawn_N, step.ids_N, step.positions_N, step.write_N, step.real_N, step.slot_N, step.ints_NI, *fields, *out, *paths,
        fields.tokens_SL.shape[1], fields.table_SP.shape[1], query, deepest, fields.nodes_SN3.shape[1], page,
        fields.ints_SI.shape[1], stops, triton.next_power_of_2(query), triton.next_power_of_2(deepest),
        triton.next_power_of_2(stops), num_warps=1, **launch_options(drawn_N),
    )  # fmt: skip
