"""Cases of the three routers. Results are scattered over all experts: which order the chosen ones come in does not
matter.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size
from thalweg.kernels.launch import supports_triton, triton_available
from thalweg.kernels.router import ref

# of models: (name, method, hidden, experts, chosen, groups, groups chosen, numbers of tokens)
SHAPES = {
    "cpu": (("tiny", "noaux_tc", 256, 16, 4, 4, 2, (1, 64)),),
    "cuda": (
        ("v2-lite", "greedy", 2048, 64, 6, 1, 1, (1, 32, 4096)),
        ("v3", "noaux_tc", 7168, 256, 8, 8, 4, (1, 32, 4096)),
    ),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for method in ("greedy", "group_limited_greedy", "noaux_tc"):
        for tokens, experts, topk, groups, topk_groups in ((1, 16, 4, 4, 2), (33, 64, 6, 1, 1), (9, 256, 8, 8, 4)):
            logits, scale = normal(generator, tokens, experts), 2.5
            # biases so negative that every biased score is: then a filler of 0 would win
            bias = normal(generator, experts) * 0.3 - 2.0
            exact = torch.stack([_exact(method, row, bias, topk, groups, topk_groups) for row in logits]) * scale
            yield KernelCase(
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
    """The kernel makes its logits itself: given the logits as activations and the identity as weights, it makes
    these.
    """
    from thalweg.kernels.router import triton

    rule = triton.RouterConfig(logits_TE.shape[1], topk, scale, groups, topk_groups, method, True, 0)
    logits = logits_TE.cuda()
    routed = triton.route(logits, torch.eye(rule.experts, device=logits.device), bias_E.cuda(), rule)
    return (torch.zeros_like(logits).scatter_(1, routed.ids_TK.long(), routed.weights_TK).to(logits_TE.device),)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, method, hidden, experts, topk, groups, topk_groups, counts in SHAPES[device.type]:
        for tokens in counts:
            fixed = {"method": method, "topk": topk, "groups": groups, "topk_groups": topk_groups}
            yield _sized(f"{name}, {tokens} tokens", tokens, hidden, experts, fixed, device)


def _sized(name: str, tokens: int, hidden: int, experts: int, fixed: Inputs, device: torch.device) -> TimedCase:
    """Logits and choice, as a layer has them. A near tie may go either way, so results are the weights in their order,
    the mean over tokens.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        return fixed | {
            "x_TH": draw_tensor(generator, tokens, hidden, dtype=dtype), "bias_E": draw_tensor(generator, experts, dtype=torch.float32),
            "weight_EH": draw_tensor(generator, experts, hidden, dtype=dtype).mul_(hidden**-0.5),
        }  # fmt: skip

    backends: dict[str, Run] = {"ref": _run_whole}
    if supports_triton(device):
        backends["triton"] = _run_whole_triton
    moved = (experts + tokens) * hidden * dtype.itemsize + 8 * tokens * fixed["topk"]
    math = "bf16" if dtype == torch.bfloat16 else "float32"
    return TimedCase(name, draw, backends, lambda given: (2 * tokens * experts * hidden, moved), math, 1e-3)


def _run_whole(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor, **fixed: Any) -> tuple[Tensor, ...]:
    logits_TE = x_TH.float() @ weight_EH.float().t()
    return (run(logits_TE=logits_TE, bias_E=bias_E, scale=2.5, **fixed)[0].topk(fixed["topk"]).values.mean(0),)


def _run_whole_triton(
    x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor, method: str, topk: int, groups: int, topk_groups: int
) -> tuple[Tensor, ...]:
    from thalweg.kernels.router import triton

    rule = triton.RouterConfig(len(weight_EH), topk, 2.5, groups, topk_groups, method, method == "noaux_tc", 0)
    return (triton.route(x_TH, weight_EH, bias_E, rule).weights_TK.sort(1, descending=True).values.mean(0),)


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
