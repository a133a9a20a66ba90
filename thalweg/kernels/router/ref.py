"""Which experts a token goes to, and with which weights (DeepSeek-V2 report §2.2, V3 report §2.1.2).

Everything is float32; ids are int64. Each rule returns weights [T, topk] and ids [T, topk]. renormalize: the weights of
a token sum to `scale`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits_TE: Tensor, topk: int, scale: float, renormalize: bool = False) -> tuple[Tensor, Tensor]:
    """The largest softmax scores."""
    weights, ids = logits_TE.softmax(-1).topk(topk, -1, sorted=False)
    return _scaled(weights, scale, renormalize), ids


def group_limited_greedy(
    logits_TE: Tensor, topk: int, scale: float, groups: int, topk_groups: int, renormalize: bool = False
) -> tuple[Tensor, Tensor]:
    """V2: as `greedy` within the groups whose best expert is best."""
    scores = logits_TE.softmax(-1)
    best = scores.view(-1, groups, scores.shape[1] // groups).amax(-1)
    weights, ids = _within_groups(scores, best, topk_groups).topk(topk, -1, sorted=False)
    return _scaled(weights, scale, renormalize), ids


def noaux_tc(
    logits_TE: Tensor, bias_E: Tensor, topk: int, scale: float, groups: int, topk_groups: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """V3: chosen by sigmoid score + bias, within the groups whose two best sum highest; weighted by the score without
    the bias.
    """
    scores = logits_TE.sigmoid()
    biased = scores + bias_E
    if topk_groups < groups:
        best = biased.view(-1, groups, biased.shape[1] // groups).topk(2, -1, sorted=False).values.sum(-1)
        biased = _within_groups(biased, best, topk_groups)
    ids = biased.topk(topk, -1, sorted=False).indices
    return _scaled(scores.gather(1, ids), scale, renormalize), ids


def _scaled(weights_TK: Tensor, scale: float, renormalize: bool) -> Tensor:
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).add_(1e-20)
    return weights_TK.mul_(scale)


def _within_groups(scores_TE: Tensor, best_TG: Tensor, topk_groups: int) -> Tensor:
    """Scores with -inf outside the `topk_groups` best groups: with negative biased scores, 0 would win."""
    chosen = best_TG.topk(topk_groups, -1, sorted=False).indices
    bar = torch.full_like(best_TG, -torch.inf).scatter_(1, chosen, 0.0)
    groups = best_TG.shape[1]
    return (scores_TE.view(-1, groups, scores_TE.shape[1] // groups) + bar.unsqueeze(-1)).view_as(scores_TE)
