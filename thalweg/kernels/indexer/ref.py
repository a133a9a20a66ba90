"""Scores of the lightning indexer (DeepSeek-V3.2 report §2.1): I[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s])."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q_NHD: Tensor, weights_NH: Tensor, keys_RSD: Tensor, bias_NS: Tensor, scale: float) -> Tensor:
    """→ float32 [N, S] = bias + scale · I; N query tokens, the same number of consecutive ones for each of R rows.

    weights: float32 and of either sign, hence the scores too: only -inf masks, 0 does not. bias: float32, 0 or -inf.
    """
    tokens, heads, dim = q_NHD.shape
    rows = len(keys_RSD)
    queries = q_NHD if rows == tokens else q_NHD.reshape(rows, -1, dim)
    products = torch.bmm(queries, keys_RSD.transpose(1, 2)).relu_()
    if products.dtype != torch.float32:
        products = products.float()
    if rows != tokens:
        products = products.view(tokens, heads, -1)
    return torch.baddbmm(bias_NS.unsqueeze(1), weights_NH.unsqueeze(1), products, alpha=scale).squeeze(1)
