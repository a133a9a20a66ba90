"""Cases of the three routers, with renormalized weights and without. Results are scattered over all experts: the order
of the chosen ones does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, TimedCase, draw_tensor, model_dtype, normal, size, with_triton
from thalweg.kernels.router.ref import RouterConfig, choose_experts

METHODS = ("greedy", False), ("greedy", True), ("group_limited_greedy", False), ("noaux_tc", False), ("noaux_tc", True)
SCALE = 2.5
# of models: name, hidden, rule, numbers of tokens
SHAPES = {
    "cpu": (("tiny", 256, RouterConfig(16, 4, SCALE, 4, 2, "noaux_tc", True), (1, 64)),),
    "cuda": (
        ("v2-lite", 2048, RouterConfig(64, 6, SCALE, 1, 1, "greedy", False), (1, 32, 4096)),
        ("v3", 7168, RouterConfig(256, 8, SCALE, 8, 4, "noaux_tc", True), (1, 32, 4096)),
    ),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    shapes = (1, 16, 4, 4, 2), (33, 64, 6, 1, 1), (9, 256, 8, 8, 4)
    for (method, renormalize), (tokens, experts, topk, groups, topk_groups) in product(METHODS, shapes):
        rule = RouterConfig(experts, topk, SCALE, groups, topk_groups, method, renormalize)
        logits = normal(generator, tokens, experts)
        # biases so negative that every biased score is: then a filler of 0 would win
        bias = normal(generator, experts) * 0.3 - 2.0 if rule.is_sigmoid else None
        yield KernelCase(
            name=f"{method}, {tokens} tokens, {topk} of {experts}, {topk_groups} of {groups} groups"
            + ", renormalized" * renormalize,
            inputs={"logits_TE": logits, "bias_E": bias, "rule": rule},
            exact=(torch.stack([_exact(row, bias, rule) for row in logits]),),
            tolerance=1e-6,
            flops=10 * tokens * experts,
            bytes=size(logits) + 4 * experts * rule.is_sigmoid + 12 * tokens * topk,
        )


def _exact(logits: Tensor, bias: Tensor | None, rule: RouterConfig) -> Tensor:
    """Weights of one token over all experts, 0 where not chosen, written as the definition reads."""
    scores = logits.double().sigmoid() if rule.is_sigmoid else logits.double().softmax(-1)
    choice, each = (scores if bias is None else scores + bias.double()).tolist(), rule.experts // rule.groups
    members = [sorted(choice[g * each : (g + 1) * each], reverse=True) for g in range(rule.groups)]
    worth = [sum(best[: 1 + rule.is_sigmoid]) for best in members]
    groups = rule.groups if rule.method == "greedy" else rule.topk_groups
    allowed = sorted(range(rule.groups), key=lambda g: -worth[g])[:groups]
    chosen = sorted((e for e in range(rule.experts) if e // each in allowed), key=lambda e: -choice[e])[: rule.topk]
    weights = torch.zeros_like(scores)
    weights[chosen] = scores[chosen] / (scores[chosen].sum() if rule.renormalize else 1.0) * rule.scale
    return weights


def run(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterConfig) -> tuple[Tensor, ...]:
    weights, ids = choose_experts(logits_TE, bias_E, rule)
    return (torch.zeros_like(logits_TE).scatter_(1, ids, weights),)


def run_triton(logits_TE: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """The kernel computes logits itself: with the logits as activations and the identity as weights, it gets these."""
    routed = _route(logits_TE, torch.eye(logits_TE.shape[1], device=logits_TE.device), **given)
    return (torch.zeros_like(logits_TE).scatter_(1, routed.ids_TK.long(), routed.weights_TK),)


def _route(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, rule: RouterConfig) -> Any:
    from thalweg.kernels.router import triton

    return triton.route(x_TH, weight_EH, bias_E, rule)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, hidden, rule, counts in SHAPES[device.type]:
        for tokens in counts:
            yield _timed(f"{name}, {tokens} tokens", tokens, hidden, rule, device)


def _timed(name: str, tokens: int, hidden: int, rule: RouterConfig, device: torch.device) -> TimedCase:
    """Logits and choice, as a layer has them. A near tie may go either way, so results are the weights in their order,
    the mean over tokens.
    """
    dtype = model_dtype(device)

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        weight_EH = draw_tensor(generator, rule.experts, hidden, dtype=dtype).mul_(hidden**-0.5)
        bias_E = draw_tensor(generator, rule.experts, dtype=torch.float32) if rule.is_sigmoid else None
        x_TH = draw_tensor(generator, tokens, hidden, dtype=dtype)
        return {"x_TH": x_TH, "weight_EH": weight_EH, "bias_E": bias_E, "rule": rule}

    def run_whole(x_TH: Tensor, weight_EH: Tensor, **given: Any) -> tuple[Tensor, ...]:
        weights, _ = choose_experts(x_TH.float() @ weight_EH.float().t(), **given)
        return (weights.sort(1, descending=True).values.mean(0),)

    def run_whole_triton(**inputs: Any) -> tuple[Tensor, ...]:
        return (_route(**inputs).weights_TK.sort(1, descending=True).values.mean(0),)

    flops, moved = 2 * tokens * rule.experts * hidden, (rule.experts + tokens) * hidden * dtype.itemsize
    cost = flops, moved + 8 * tokens * rule.topk
    backends = with_triton(run_whole, run_whole_triton, device)
    return TimedCase(name, draw, backends, lambda inputs: cost, "bf16" if device.type == "cuda" else "float32", 1e-3)


BACKENDS = with_triton(run, run_triton)
