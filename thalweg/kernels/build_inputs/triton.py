"""`ref.build_inputs` and `ref.build_ragged` in one launch each. They move a few kB: the launch is the cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.build_inputs.ref import InputTensors, RaggedInputs, SlotTensors
from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.slot_columns import END, INT_COLUMNS, LENGTH, NUM_COMPUTED, NUM_DRAFTS

ENTRIES = constexpr(1024)  # of a page table that a program copies
TOKENS = constexpr(256)  # of a row, and entries of its page table, of a program of `_ragged`


@triton.jit
def _decode(slot_R, ahead_R, slots, step, L, P, Q, pages, NODES: constexpr, PAGE: constexpr, PDL: constexpr):
    pdl_begin(PDL)
    token = tl.program_id(0)
    row = token // Q
    slot = tl.load(slot_R + row)
    if tl.program_id(1) == 0:
        own = slots.ints_SI + slot * INT_COLUMNS
        end = tl.load(own + END)
        if ahead_R is not None:
            ahead = tl.load(ahead_R + token)
            depth = ahead
            real = (tl.load(own + NUM_COMPUTED) + ahead < end).to(tl.int64)
        else:
            ahead = (token % Q).to(tl.int64)
            node = slots.nodes_SN3 + (slot * NODES + ahead) * 3
            depth = tl.load(node + 1)
            real = ((tl.load(own + NUM_COMPUTED) + ahead < end) & (ahead <= tl.load(own + NUM_DRAFTS))).to(tl.int64)
            tl.store(step.tree_mask_T + token, tl.load(node + 2))
        at, length = tl.load(own + NUM_COMPUTED) + ahead, tl.load(own + LENGTH) + depth
        i_I = tl.arange(0, INT_COLUMNS)
        ints_I = tl.load(own + i_I)
        ints_I = tl.where(i_I == LENGTH, tl.minimum(length, L - 1), tl.where(i_I == NUM_COMPUTED, at, ints_I))
        ints_I = tl.where((i_I == END) & (length >= end), 0, ints_I)
        tl.store(step.ints_TI + token * INT_COLUMNS + i_I, ints_I)
        column = at * real
        page = tl.load(slots.table_SP + slot * P + column // PAGE).to(tl.int64)
        tl.store(step.ids_T + token, tl.load(slots.tokens_SL + slot * L + column).to(tl.int64) * real)
        tl.store(step.positions_T + token, column - (ahead - depth) * real)
        tl.store(step.write_T + token, (page * PAGE + column % PAGE) * real)
        tl.store(step.real_T + token, real > 0)
        if ahead_R is None:
            tl.store(step.slot_T + token, slot)
            tl.store(step.columns_T + token, column)
    if token == row * Q:
        p_B = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
        entry_B = tl.load(slots.table_SP + slot * P + p_B, mask=p_B < pages)
        tl.store(step.table_RP + row.to(tl.int64) * pages + p_B, entry_B, mask=p_B < pages)


def build_inputs(
    slot_R: Tensor, ahead_R: Tensor | None, slots: SlotTensors, pages: int, page: int, query: int = 1
) -> InputTensors:
    """See `ref.build_inputs`."""
    rows, tokens, new = len(slot_R), len(slot_R) * query, slot_R.new_empty
    # an allocation each: kernels depend on the alignment
    tree = (slot_R,) if slots.nodes_SN3 is None else (new(tokens), new(tokens), new(tokens))
    step = InputTensors(
        new(tokens), new(tokens), new(tokens), new(tokens, dtype=torch.bool),
        slots.table_SP.new_empty(rows, pages), new(tokens, slots.ints_SI.shape[1]), *tree,
    )  # fmt: skip
    _decode[tokens, triton.cdiv(pages, ENTRIES.value)](
        slot_R, ahead_R, slots, step, slots.tokens_SL.shape[1], slots.table_SP.shape[1], query, pages,
        1 if slots.nodes_SN3 is None else slots.nodes_SN3.shape[1], page, num_warps=4, **launch_options(slot_R),
    )  # fmt: skip
    return step


@triton.jit(do_not_specialize=["rows", "L", "P", "pages"])
def _ragged(rows_2R, slots, step, rows, L, P, pages, PAGE: constexpr, PDL: constexpr):
    pdl_begin(PDL)
    row, i_B = tl.program_id(0), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(rows_2R + row)
    first, stop = tl.load(rows_2R + rows + 1 + row), tl.load(rows_2R + rows + 2 + row)
    own = slots.ints_SI + slot * INT_COLUMNS
    column_B, inside = tl.load(own + NUM_COMPUTED) + i_B, i_B < stop - first
    real = (column_B < tl.load(own + END)).to(tl.int64)
    column_B *= real
    page_B = tl.load(slots.table_SP + slot * P + column_B // PAGE, mask=inside).to(tl.int64)
    id_B = tl.load(slots.tokens_SL + slot * L + column_B, mask=inside)
    tl.store(step.ids_T + first + i_B, id_B * real, mask=inside)
    tl.store(step.positions_T + first + i_B, column_B, mask=inside)
    tl.store(step.write_T + first + i_B, (page_B * PAGE + column_B % PAGE) * real, mask=inside)
    tl.store(step.real_T + first + i_B, real > 0, mask=inside)
    entry_B = tl.load(slots.table_SP + slot * P + i_B, mask=i_B < pages)
    tl.store(step.table_RP + row.to(tl.int64) * pages + i_B, entry_B, mask=i_B < pages)
    if tl.program_id(1) == 0:
        i_I = tl.arange(0, INT_COLUMNS)
        tl.store(step.ints_RI + row * INT_COLUMNS + i_I, tl.load(own + i_I))


def build_ragged(rows_2R: Tensor, tokens: int, longest: int, slots: SlotTensors, pages: int, page: int) -> RaggedInputs:
    """See `ref.build_ragged`."""
    rows, new = rows_2R.shape[1] - 1, rows_2R.new_empty
    step = RaggedInputs(
        slots.tokens_SL.new_empty(tokens), new(tokens), new(tokens), new(tokens, dtype=torch.bool),
        slots.table_SP.new_empty(rows, pages), new(rows, slots.ints_SI.shape[1]),
    )  # fmt: skip
    _ragged[rows, triton.cdiv(max(longest, pages), TOKENS.value)](
        rows_2R, slots, step, rows, slots.tokens_SL.shape[1], slots.table_SP.shape[1], pages, page,
        num_warps=4, **launch_options(rows_2R),
    )  # fmt: skip
    return step
