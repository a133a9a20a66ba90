"""Scores of the lightning indexer (facts §2.6): I[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s])."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q_NHD: Tensor, weights_NH: Tensor, keys_RSD: Tensor) -> Tensor:
    """→ float32 [N, S], N query tokens, the same number of consecutive ones for each of R rows.

    weights: float32 and of either sign, hence the scores too: 0 is no safe filler for what is masked.
    """
    tokens, heads, dim = q_NHD.shape
    products = torch.bmm(q_NHD.reshape(len(keys_RSD), -1, dim), keys_RSD.transpose(1, 2)).relu_().float()
    return torch.bmm(weights_NH.view(tokens, 1, heads), products.view(tokens, heads, -1)).view(tokens, -1)
