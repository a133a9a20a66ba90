"""Which experts a token goes to, and with which weights (DeepSeek-V2 report §2.2, V3 report §2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The rule by which a router chooses experts."""

    experts: int
    topk: int
    scale: float  # of the weights
    groups: int
    topk_groups: int
    # greedy: by softmax score; group_limited_greedy (V2): within the groups whose best expert is best;
    # noaux_tc (V3): by sigmoid score + bias, within the groups whose two best sum highest, weighted by the score alone
    method: str
    renormalize: bool  # the weights of a token sum to `scale`
    shared: int = 0  # experts that every token chooses besides

    @property
    def is_sigmoid(self) -> bool:
        return self.method == "noaux_tc"

    @property
    def limits_groups(self) -> bool:
        return self.method != "greedy" and self.topk_groups < self.groups


def choose_experts(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterConfig) -> tuple[Tensor, Tensor]:
    """Weights float32 [T, topk] and ids int64 [T, topk], of float32 logits. bias_E: of noaux_tc."""
    scores = choice = logits_TE.sigmoid() if rule.is_sigmoid else logits_TE.softmax(-1)
    if bias_E is not None:
        choice = scores + bias_E
    if rule.limits_groups:
        members = choice.view(-1, rule.groups, rule.experts // rule.groups)
        best = members.topk(2, -1, sorted=False).values.sum(-1) if rule.is_sigmoid else members.amax(-1)
        choice = _within_groups(choice, best, rule.topk_groups)
    weights, ids = choice.topk(rule.topk, -1, sorted=False)
    if choice is not scores:
        weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
    return weights.mul_(rule.scale), ids


def _within_groups(scores_TE: Tensor, best_TG: Tensor, topk_groups: int) -> Tensor:
    """Scores with -inf outside the `topk_groups` best groups: with negative biased scores, 0 would win."""
    chosen = best_TG.topk(topk_groups, -1, sorted=False).indices
    bar = torch.full_like(best_TG, -torch.inf).scatter_(1, chosen, 0.0)
    groups = best_TG.shape[1]
    return (scores_TE.view(-1, groups, scores_TE.shape[1] // groups) + bar.unsqueeze(-1)).view_as(scores_TE)
