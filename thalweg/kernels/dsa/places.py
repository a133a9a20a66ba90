"""Where the chosen tokens of sparse attention lie in a plane, as libraries take a choice.

Letters: T query tokens, K chosen tokens of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.attend.triton import path_rows


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table", "positions", "rows"])
def _places(chosen, rows, table, positions, paths, out, lengths, table_row, K: constexpr, BLOCK: constexpr):
    """Program t: token t. chosen: None is all that it sees, K at most."""
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    position = tl.load(positions + token).to(tl.int32)
    column = lane
    if chosen is not None:
        column = tl.load(chosen + token * K + lane, mask=lane < K, other=-1)
    seen = (lane < K) & (column >= 0) & (column <= position)
    column = tl.where(seen, column, 0)
    row_pages = table + tl.load(rows + token).to(tl.int64) * table_row
    if paths is None:
        place = tl.load(row_pages + column // 64).to(tl.int64) * 64 + column % 64
    else:
        place = path_rows(paths, row_pages, token, position, column)
    tl.store(out + token * K + lane, tl.where(seen, place, -1).to(tl.int32), mask=lane < K)
    tl.store(lengths + token, tl.minimum(position + 1, K))


def places(chosen_TK: Tensor | None, rows: QueryRows, topk: int) -> tuple[Tensor, Tensor]:
    """Where the chosen tokens lie in a plane: → (page * 64 + offset int32 [T, topk], -1 for none; how many each query
    token has, int32 [T]).

    An ordinary launch, without overlap: a library's kernel that begins early and waits for nothing may follow.
    """
    tokens, device = len(rows.rows_T), rows.rows_T.device
    out = torch.empty(tokens, topk, dtype=torch.int32, device=device)
    lengths = torch.empty(tokens, dtype=torch.int32, device=device)
    _places[(tokens,)](
        chosen_TK, *rows, out, lengths, rows.table_RL.stride(0), K=topk, BLOCK=triton.next_power_of_2(topk), num_warps=8
    )
    return out, lengths
