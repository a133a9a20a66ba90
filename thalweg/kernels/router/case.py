"""Cases of the three routers. Results are scattered over all experts: which order the chosen ones come in does not matter."""

from __future__ import annotations

import importlib.util
from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Case, Run, normal, size
from thalweg.kernels.router import ref


def cases(generator: torch.Generator) -> Iterator[Case]:
    for method in ("greedy", "group_limited_greedy", "noaux_tc"):
        for tokens, experts, topk, groups, topk_groups in ((1, 16, 4, 4, 2), (33, 64, 6, 1, 1), (9, 256, 8, 8, 4)):
            logits, scale = normal(generator, tokens, experts), 2.5
            # biases so negative that every biased score is: then a filler of 0 would win
            bias = normal(generator, experts) * 0.3 - 2.0
            exact = torch.stack([_exact(method, row, bias, topk, groups, topk_groups) for row in logits]) * scale
            yield Case(
                name=f"{method}, {tokens} tokens, {topk} of {experts}, {topk_groups} of {groups} groups",
                inputs={
                    "method": method, "logits_TE": logits, "bias_E": bias, "topk": topk, "scale": scale, "groups": groups,
                    "topk_groups": topk_groups,
                },
                exact=(exact,),
                tolerance=1e-6,
                flops=10 * tokens * experts,
                bytes=size(logits, bias) + 12 * tokens * topk,
            )  # fmt: skip


def _exact(method: str, logits: Tensor, bias: Tensor, topk: int, groups: int, topk_groups: int) -> Tensor:
    """Weights of one token over all experts, 0 where not chosen, written as the definition reads."""
    sigmoid = method == "noaux_tc"
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)
    choice = (scores + bias.double() if sigmoid else scores).tolist()
    each = len(choice) // groups
    members = [sorted(choice[g * each : (g + 1) * each], reverse=True) for g in range(groups)]
    worth = [sum(best[:2]) if sigmoid else best[0] for best in members]
    allowed = sorted(range(groups), key=lambda g: -worth[g])[: groups if method == "greedy" else topk_groups]
    chosen = sorted((e for e in range(len(choice)) if e // each in allowed), key=lambda e: -choice[e])[:topk]
    weights = torch.zeros_like(scores)
    weights[chosen] = scores[chosen] / (scores[chosen].sum() if sigmoid else 1.0)
    return weights


def run(
    method: str, logits_TE: Tensor, bias_E: Tensor, topk: int, scale: float, groups: int, topk_groups: int
) -> tuple[Tensor, ...]:
    if method == "greedy":
        weights, ids = ref.greedy(logits_TE, topk, scale)
    elif method == "group_limited_greedy":
        weights, ids = ref.group_limited_greedy(logits_TE, topk, scale, groups, topk_groups)
    else:
        weights, ids = ref.noaux_tc(logits_TE, bias_E, topk, scale, groups, topk_groups, True)
    return (torch.zeros_like(logits_TE).scatter_(1, ids, weights),)


def run_triton(
    method: str, logits_TE: Tensor, bias_E: Tensor, topk: int, scale: float, groups: int, topk_groups: int
) -> tuple[Tensor, ...]:
    """The kernel makes its logits itself: given the logits as activations and the identity as weights, it makes these."""
    from thalweg.kernels.router import triton

    rule = triton.Rule(logits_TE.shape[1], topk, scale, groups, topk_groups, method, True, 0)
    logits = logits_TE.cuda()
    routed = triton.route(logits, torch.eye(rule.experts, device=logits.device), bias_E.cuda(), rule)
    return (torch.zeros_like(logits).scatter_(1, routed.ids_TK.long(), routed.weights_TK).to(logits_TE.device),)


_GPU = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if _GPU else {})
