"""Dispatch of rows to other ranks, and the combination of their results. All ranks are on one device here: R ranks, N
rows of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = -1  # in the first words of a row that no rank sent
MAX_ROWS = 512  # of a rank, that memory is set aside for


def bytes_for(ranks: int, rows: int, words: int) -> int:
    """Memory of a rank, of both sets: a word for each rank's number of rows, and its rows."""
    return 2 * ranks * (1 + rows * words) * 8


def row_words(row_bytes: int, hidden: int) -> tuple[int, int]:
    """Words of a row that is sent, and of a result in bf16."""
    return -(-row_bytes // 4), hidden // 2


def bf16_row(experts: int, hidden: int) -> int:
    """Bytes of a row with the slots and weights of its experts, the most that is sent."""
    return 8 * experts + 2 * hidden


def dispatch(rows_RNW: Tensor, goes_RRN: Tensor, marked: int) -> Tensor:
    """int32 [R, R, N, W]: the rows that each rank has received from each, in order. rows: int32. goes: whether a row of
    the first rank goes to the second. marked: how many words of the remaining rows are EMPTY; their others are 0.
    """
    ranks, rows, width = rows_RNW.shape
    out = rows_RNW.new_zeros(ranks, ranks, rows, width)
    out[..., :marked] = EMPTY
    for sender in range(ranks):
        for receiver in range(ranks):
            mine = rows_RNW[sender][goes_RRN[sender, receiver]]
            out[receiver, sender, : len(mine)] = mine
    return out


def combine(results_RRNH: Tensor, goes_RRN: Tensor) -> Tensor:
    """float32 [R, N, H]: the sum of each row's results over the ranks that it went to, in rank order. results [R, R, N,
    H]: those of each rank for the rows of each, rounded to bf16 before they are sent.
    """
    ranks, _, rows, width = results_RRNH.shape
    out = torch.zeros(ranks, rows, width, dtype=torch.float32, device=results_RRNH.device)
    for home in range(ranks):
        for rank in range(ranks):
            goes_N = goes_RRN[home, rank]
            out[home, goes_N] += results_RRNH[rank, home, : int(goes_N.sum())].bfloat16().float()
    return out
