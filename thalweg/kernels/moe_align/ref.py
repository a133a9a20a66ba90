"""Sorting pairs by expert and summing their results by token, in plain torch."""

from __future__ import annotations

from torch import Tensor


def order(ids_TK: Tensor, experts: int) -> Tensor:
    """Pairs t · K + k by expert, stably, without those of no expert (ids of `experts` or more)."""
    ids = ids_TK.flatten()
    by = ids.argsort(stable=True)
    return by[ids[by] < experts]


def combine_(out_TH: Tensor, y_PH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Tensor:
    """out[t] += Σ_k weights[t, k] · y[t · K + k] over the k that have an expert; in place, returns out."""
    tokens, columns = ids_TK.shape
    y = y_PH.view(tokens, columns, -1).masked_fill((ids_TK >= experts).unsqueeze(-1), 0.0)
    return out_TH.add_((y * weights_TK.unsqueeze(-1)).sum(1))
