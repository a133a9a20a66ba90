"""Cases of routed experts: one token, a few, many; experts that nobody chose."""

from __future__ import annotations

import importlib.util
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import Case, Run, normal, precision, size
from thalweg.kernels.experts import script
from thalweg.kernels.experts.ref import add_experts_


def cases(generator: torch.Generator) -> Iterator[Case]:
    for tokens, experts, topk, hidden, inner in (
        (1, 16, 4, 64, 32),
        (3, 16, 4, 48, 20),
        (70, 8, 2, 64, 24),
        (5, 4, 4, 16, 8),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            x, out = normal(generator, tokens, hidden, dtype=dtype), normal(generator, tokens, hidden)
            w13 = (normal(generator, experts, 2 * inner, hidden) * hidden**-0.5).to(dtype)
            w2 = (normal(generator, experts, hidden, inner) * inner**-0.5).to(dtype)
            ids = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])
            weights = normal(generator, tokens, topk).abs()
            exact = out.double()
            for token in range(tokens):
                for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                    gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
                    exact[token] += weight * (w2[expert].double() @ (F.silu(gate) * up))
            used = len(set(ids.view(-1).tolist()))
            yield Case(
                name=f"{tokens} tokens, {topk} of {experts} experts, {hidden} x {inner}, {dtype}",
                inputs={"out_TH": out, "x_TH": x, "ids_TK": ids, "weights_TK": weights, "w13_EIH": w13, "w2_EHI": w2},
                exact=(exact,),
                tolerance=precision(dtype),
                flops=6 * tokens * topk * hidden * inner,
                bytes=size(x, out) + (size(w13) + size(w2)) * used // experts,
            )


def run(
    out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_EIH: Tensor, w2_EHI: Tensor
) -> tuple[Tensor, ...]:
    return (add_experts_(out_TH, x_TH, ids_TK, weights_TK, *_lists(w13_EIH, w2_EHI)),)


def run_script(
    out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_EIH: Tensor, w2_EHI: Tensor
) -> tuple[Tensor, ...]:
    return (script.compiled()(out_TH, x_TH, ids_TK, weights_TK, *_lists(w13_EIH, w2_EHI)),)


def run_triton(
    out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_EIH: Tensor, w2_EHI: Tensor
) -> tuple[Tensor, ...]:
    from thalweg.kernels.experts.triton import Weights
    from thalweg.kernels.experts.triton import add_experts_ as add
    from thalweg.kernels.router.triton import Routed

    out, x, ids, weights, w13, w2 = (each.cuda() for each in (out_TH, x_TH, ids_TK, weights_TK, w13_EIH, w2_EHI))
    add(out, x, Routed(weights, ids.int()), Weights(w13, w2))
    return (out.to(out_TH.device),)


def _lists(w13_EIH: Tensor, w2_EHI: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    gate_up, down = ([weight.t() for weight in stack] for stack in (w13_EIH, w2_EHI))
    return gate_up, down, [weight.flatten() for weight in w13_EIH], torch.zeros(())


_GPU = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
BACKENDS: dict[str, Run] = (
    {"ref": run} | ({"script": run_script} if script.AVAILABLE else {}) | ({"triton": run_triton} if _GPU else {})
)
