"""Rows that ranks send each other, and what comes back. Here all ranks are on one device: R ranks, N rows of each."""

from __future__ import annotations

import torch
from torch import Tensor

NOBODY = -1  # in the first words of a row that nobody sent


def send_rows(rows_RNW: Tensor, goes_RRN: Tensor, marked: int) -> Tensor:
    """int32 [R, R, N, W]: what each rank has received of each. rows: int32. goes: whether a row of the first rank goes
    to the second. marked: words that are NOBODY in the places that are left; others are 0 there.
    """
    ranks, rows, width = rows_RNW.shape
    out = rows_RNW.new_zeros(ranks, ranks, rows, width)
    out[..., :marked] = NOBODY
    for sender in range(ranks):
        for receiver in range(ranks):
            mine = rows_RNW[sender][goes_RRN[sender, receiver]]
            out[receiver, sender, : len(mine)] = mine
    return out


def bring_back(results_RRNH: Tensor, goes_RRN: Tensor) -> Tensor:
    """float32 [R, N, H]: of each row the sum over the ranks that it went to, in their order. results [R, R, N, H]: what
    each rank has computed for the rows of each; rounded to bf16 on the way.
    """
    ranks, _, rows, width = results_RRNH.shape
    out = torch.zeros(ranks, rows, width, dtype=torch.float32, device=results_RRNH.device)
    for home in range(ranks):
        for rank in range(ranks):
            goes_N = goes_RRN[home, rank]
            out[home, goes_N] += results_RRNH[rank, home, : int(goes_N.sum())].bfloat16().float()
    return out
