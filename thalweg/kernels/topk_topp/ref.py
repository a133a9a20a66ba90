"""Top-k, top-p and min-p by a stable sort, in torch. Letters: E rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_topk_topp(logits_EV: Tensor, top_k_E: Tensor, top_p_E: Tensor, min_p_E: Tensor) -> Tensor:
    """-inf for what top-k, then top-p of what is left, then min-p remove. The most likely token always stays.

    Ties at a border go to the smaller token id, whatever the batch: the sort is stable.
    """
    sorted_EV, order_EV = torch.sort(logits_EV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_EV.shape[1], device=logits_EV.device)
    sorted_EV = sorted_EV.masked_fill(rank_V >= top_k_E[:, None], -torch.inf)
    prob_EV = sorted_EV.softmax(-1)
    before_EV = prob_EV.cumsum(-1) - prob_EV
    drop_EV = (before_EV >= top_p_E[:, None]) & (top_p_E < 1)[:, None] | (prob_EV < min_p_E[:, None] * prob_EV[:, :1])
    drop_EV[:, 0] = False
    return torch.empty_like(logits_EV).scatter_(1, order_EV, sorted_EV.masked_fill(drop_EV, -torch.inf))
