"""`ref.build_inputs` in one launch, a program for each token. It moves a few kB: the launch is the cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.build_inputs.ref import InputTensors, SlotTensors
from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin

ENTRIES = 1024  # of a page table that a program copies


@triton.jit
def _decode(
    slot_R,
    ahead_R,
    tokens_SL,
    ints_SI,
    table_SP,
    nodes_SN3,
    ids_T,
    positions_T,
    write_T,
    real_T,
    table_RP,
    ints_TI,
    slot_T,
    columns_T,
    tree_mask_T,
    L,
    P,
    Q,
    pages,
    NODES: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    token = tl.program_id(0)
    row = token if nodes_SN3 is None else token // Q
    slot = tl.load(slot_R + row)
    if tl.program_id(1) == 0:
        i_B = tl.arange(0, BLOCK_I)
        own = ints_SI + slot * COLUMNS
        end = tl.load(own + 2)
        if nodes_SN3 is None:
            ahead = tl.load(ahead_R + token)
            depth = ahead
            real = (tl.load(own + 1) + ahead < end).to(tl.int64)
        else:
            ahead = (token % Q).to(tl.int64)
            node = nodes_SN3 + (slot * NODES + ahead) * 3
            depth = tl.load(node + 1)
            real = ((tl.load(own + 1) + ahead < end) & (ahead <= tl.load(own + 7))).to(tl.int64)
            tl.store(tree_mask_T + token, tl.load(node + 2))
        at, length = tl.load(own + 1) + ahead, tl.load(own) + depth
        ints_B = tl.load(own + i_B, mask=i_B < COLUMNS)
        ints_B = tl.where(i_B == 0, tl.minimum(length, L - 1), tl.where(i_B == 1, at, ints_B))
        ints_B = tl.where((i_B == 2) & (length >= end), 0, ints_B)
        tl.store(ints_TI + token * COLUMNS + i_B, ints_B, mask=i_B < COLUMNS)
        column = at * real
        page = tl.load(table_SP + slot * P + column // PAGE).to(tl.int64)
        tl.store(ids_T + token, tl.load(tokens_SL + slot * L + column).to(tl.int64) * real)
        tl.store(positions_T + token, column - (ahead - depth) * real)
        tl.store(write_T + token, (page * PAGE + column % PAGE) * real)
        tl.store(real_T + token, real > 0)
        if slot_T is not None:
            tl.store(slot_T + token, slot)
            tl.store(columns_T + token, column)
    if token == row * Q:
        p_B = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
        entry_B = tl.load(table_SP + slot * P + p_B, mask=p_B < pages)
        tl.store(table_RP + row.to(tl.int64) * pages + p_B, entry_B, mask=p_B < pages)


def build_inputs(
    slot_R: Tensor, ahead_R: Tensor | None, slots: SlotTensors, pages: int, page: int, query: int = 1
) -> InputTensors:
    """See `ref.build_inputs`."""
    rows, device = len(slot_R), slot_R.device
    tokens, columns = rows * query, slots.ints_SI.shape[1]

    def empty(dtype: torch.dtype = torch.int64) -> Tensor:  # an allocation each: kernels depend on the alignment
        return torch.empty(tokens, dtype=dtype, device=device)

    ids, positions, write, real = empty(), empty(), empty(), empty(torch.bool)
    table = torch.empty(rows, pages, dtype=slots.table_SP.dtype, device=device)
    ints = torch.empty(tokens, columns, dtype=torch.int64, device=device)
    tree = (None, None, None) if ahead_R is not None else (empty(), empty(), empty())
    nodes = None if ahead_R is not None else slots.nodes_SN3
    _decode[tokens, triton.cdiv(pages, ENTRIES)](
        slot_R,
        ahead_R,
        slots.tokens_SL,
        slots.ints_SI,
        slots.table_SP,
        nodes,
        ids,
        positions,
        write,
        real,
        table,
        ints,
        *tree,
        slots.tokens_SL.shape[1],
        slots.table_SP.shape[1],
        query,
        pages,
        1 if nodes is None else nodes.shape[1],
        page,
        columns,
        triton.next_power_of_2(columns),
        ENTRIES,
        num_warps=4,
        **launch_options(slot_R),
    )
    slot, *own = tree
    return InputTensors(ids, positions, write, real, table, ints, slot_R if slot is None else slot, *own)
