"""The inputs of a step out of its slots, in one launch: what `batch.inputs` makes of rows that compute one token each.
See ref.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.build_inputs.ref import DecodeInputs
from thalweg.kernels.launch import launch_options


@triton.jit
def _decode(
    slot_R, ahead_R, ints_SI, tokens_SL, table_SP, ids_R, positions_R, write_R, real_R, table_RP, ints_RI, L, P, pages,
    PAGE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slot_R + row)
    if tl.program_id(1) == 0:
        i_B = tl.arange(0, BLOCK_I)
        ahead = tl.load(ahead_R + row)
        at = tl.load(ints_SI + slot * COLUMNS + 1) + ahead
        end = tl.load(ints_SI + slot * COLUMNS + 2)
        ints_B = tl.load(ints_SI + slot * COLUMNS + i_B, mask=i_B < COLUMNS)
        length = tl.load(ints_SI + slot * COLUMNS) + ahead
        ints_B = tl.where(i_B == 0, tl.minimum(length, L - 1), ints_B)
        ints_B = tl.where((i_B == 2) & (length >= end), 0, ints_B)
        tl.store(ints_RI + row * COLUMNS + i_B, ints_B, mask=i_B < COLUMNS)
        real = (at < end).to(tl.int64)
        position = at * real
        page = tl.load(table_SP + slot * P + position // PAGE).to(tl.int64)
        tl.store(ids_R + row, tl.load(tokens_SL + slot * L + position).to(tl.int64) * real)
        tl.store(positions_R + row, position)
        tl.store(write_R + row, (page * PAGE + position % PAGE) * real)
        tl.store(real_R + row, real > 0)
    p_B = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = p_B < pages
    tl.store(table_RP + row.to(tl.int64) * pages + p_B, tl.load(table_SP + slot * P + p_B, mask=inside), mask=inside)


def build_decode_inputs(
    slot_R: Tensor, ahead_R: Tensor, ints_SI: Tensor, tokens_SL: Tensor, table_SP: Tensor, pages: int, page: int
) -> DecodeInputs:
    """See `ref.build_decode_inputs`."""
    rows, device = len(slot_R), slot_R.device
    ids, positions, write = torch.empty(3, rows, dtype=torch.int64, device=device)
    real = torch.empty(rows, dtype=torch.bool, device=device)
    table = torch.empty(rows, pages, dtype=table_SP.dtype, device=device)
    ints = torch.empty(rows, ints_SI.shape[1], dtype=torch.int64, device=device)
    _decode[rows, triton.cdiv(pages, 1024)](
        slot_R, ahead_R, ints_SI, tokens_SL, table_SP, ids, positions, write, real, table, ints, tokens_SL.shape[1],
        table_SP.shape[1], pages, page, ints_SI.shape[1], triton.next_power_of_2(ints_SI.shape[1]), 1024,
        num_warps=4, **launch_options(ints_SI),
    )  # fmt: skip
    return ids, positions, write, real, table, ints
