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
from thalweg.kernels.router import ref

METHODS = ("greedy", False), ("greedy", True), ("group_limited_greedy", False), ("noaux_tc", False), ("noaux_tc", True)
# of models: (name, method, hidden, experts, chosen, groups, groups chosen, numbers of tokens)
SHAPES = {
    "cpu": (("tiny", "noaux_tc", 256, 16, 4, 4, 2, (1, 64)),),
    "cuda": (
        ("v2-lite", "greedy", 2048, 64, 6, 1, 1, (1, 32, 4096)),
        ("v3", "noaux_tc", 7168, 256, 8, 8, 4, (1, 32, 4096)),
    ),
}
SCALE = 2.5


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    shapes = (1, 16, 4, 4, 2), (33, 64, 6, 1, 1), (9, 256, 8, 8, 4)
    for (method, renormalize), (tokens, experts, topk, groups, topk_groups) in product(METHODS, shapes):
        logits = normal(generator, tokens, experts)
        # biases so negative that every biased score is: then a filler of 0 would win
        bias = normal(generator, experts) * 0.3 - 2.0
        choice: Inputs = {"topk": topk, "groups": groups, "topk_groups": topk_groups, "renormalize": renormalize}
        exact = torch.stack([_exact(method, row, bias, **choice) for row in logits]) * SCALE
        yield KernelCase(
            name=f"{method}, {tokens} tokens, {topk} of {experts}, {topk_groups} of {groups} groups"
            + ", renormalized" * renormalize,
            inputs={"method": method, "logits_TE": logits, "bias_E": bias} | choice,
            exact=(exact,),
            tolerance=1e-6,
            flops=10 * tokens * experts,
            bytes=size(logits, bias) + 12 * tokens * topk,
        )


def _exact(
    method: str, logits: Tensor, bias: Tensor, topk: int, groups: int, topk_groups: int, renormalize: bool
) -> Tensor:
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
    weights[chosen] = scores[chosen] / (scores[chosen].sum() if renormalize else 1.0)
    return weights


def run(
    method: str, logits_TE: Tensor, bias_E: Tensor, topk: int, groups: int, topk_groups: int, renormalize: bool
) -> tuple[Tensor, ...]:
    if method == "greedy":
        weights, ids = ref.greedy(logits_TE, topk, SCALE, renormalize)
    elif method == "group_limited_greedy":
        weights, ids = ref.group_limited_greedy(logits_TE, topk, SCALE, groups, topk_groups, renormalize)
    else:
        weights, ids = ref.noaux_tc(logits_TE, bias_E, topk, SCALE, groups, topk_groups, renormalize)
    return (torch.zeros_like(logits_TE).scatter_(1, ids, weights),)


def run_triton(logits_TE: Tensor, bias_E: Tensor, **choice: Any) -> tuple[Tensor, ...]:
    """The kernel computes logits itself: with the logits as activations and the identity as weights, it gets these."""
    routed = _route(logits_TE, torch.eye(logits_TE.shape[1], device=logits_TE.device), bias_E, **choice)
    return (torch.zeros_like(logits_TE).scatter_(1, routed.ids_TK.long(), routed.weights_TK),)


def _route(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor, **choice: Any) -> Any:
    from thalweg.kernels.router import triton

    config = triton.RouterConfig(experts=len(weight_EH), scale=SCALE, shared=0, **choice)
    return triton.route(x_TH, weight_EH, bias_E, config)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, method, hidden, experts, topk, groups, topk_groups, counts in SHAPES[device.type]:
        choice = {"method": method, "topk": topk, "groups": groups, "topk_groups": topk_groups}
        for tokens in counts:
            yield _timed(f"{name}, {tokens} tokens", (tokens, hidden, experts), choice, device)


def _timed(name: str, shape: tuple[int, int, int], choice: Inputs, device: torch.device) -> TimedCase:
    """Logits and choice, as a layer has them. A near tie may go either way, so results are the weights in their order,
    the mean over tokens.
    """
    (tokens, hidden, experts), dtype = shape, model_dtype(device)

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        weight_EH = draw_tensor(generator, experts, hidden, dtype=dtype).mul_(hidden**-0.5)
        bias_E = draw_tensor(generator, experts, dtype=torch.float32)
        x_TH = draw_tensor(generator, tokens, hidden, dtype=dtype)
        return choice | {
            "renormalize": choice["method"] == "noaux_tc", "x_TH": x_TH, "bias_E": bias_E, "weight_EH": weight_EH,
        }  # fmt: skip

    def run_whole(x_TH: Tensor, weight_EH: Tensor, **given: Any) -> tuple[Tensor, ...]:
        (weights,) = run(logits_TE=x_TH.float() @ weight_EH.float().t(), **given)
        return (weights.topk(choice["topk"]).values.mean(0),)

    def run_whole_triton(**inputs: Any) -> tuple[Tensor, ...]:
        return (_route(**inputs).weights_TK.sort(1, descending=True).values.mean(0),)

    cost = 2 * tokens * experts * hidden, (experts + tokens) * hidden * dtype.itemsize + 8 * tokens * choice["topk"]
    backends = with_triton(run_whole, run_whole_triton, device)
    return TimedCase(name, draw, backends, lambda inputs: cost, "bf16" if device.type == "cuda" else "float32", 1e-3)


BACKENDS = with_triton(run, run_triton)
