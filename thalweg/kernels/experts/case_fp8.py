"""Cases of experts in FP8. The exact result rounds activations to e4m3 as the definition says, then computes in float64: a tolerance on the
unrounded result would have to allow 5 % and would hide any mistake in a scale."""

from __future__ import annotations

import importlib.util
from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Case, Run, normal, size
from thalweg.kernels.experts import fp8
from thalweg.kernels.fp8_block.ref import quantize


def cases(generator: torch.Generator) -> Iterator[Case]:
    for tokens, experts, topk, hidden, inner in ((1, 8, 4, 256, 128), (2, 8, 3, 384, 256), (40, 8, 2, 256, 384)):
        x = normal(generator, tokens, hidden, dtype=torch.bfloat16)
        out = normal(generator, tokens, hidden, dtype=torch.bfloat16)
        w13 = _blocks(normal(generator, experts, 2 * inner, hidden) * hidden**-0.5)
        w2 = _blocks(normal(generator, experts, hidden, inner) * inner**-0.5)
        ids = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])
        weights = normal(generator, tokens, topk).abs()
        used = len(set(ids.flatten().tolist()))
        yield Case(
            name=f"{tokens} tokens, {topk} of {experts} experts, {hidden} x {inner}",
            inputs={
                "out_TH": out, "x_TH": x, "ids_TK": ids, "weights_TK": weights, "w13_NIH": w13[0], "s13": w13[1], "w2_NHI": w2[0],
                "s2": w2[1],
            },
            exact=(fp8.add_experts_(out.double(), x, ids, weights, w13, w2),),
            tolerance=1e-2,  # bf16 of the sum, and of each expert's part
            flops=6 * tokens * topk * hidden * inner,
            bytes=2 * size(out) + size(x) + (size(*w13) + size(*w2)) * used // experts,
        )  # fmt: skip


def _blocks(w_NRC: Tensor) -> tuple[Tensor, Tensor]:
    pairs = [quantize(w, fp8.BLOCK, False) for w in w_NRC]
    return torch.stack([codes for codes, _ in pairs]), torch.stack([scale for _, scale in pairs])


def run(
    out_TH: Tensor,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w13_NIH: Tensor,
    s13: Tensor,
    w2_NHI: Tensor,
    s2: Tensor,
) -> tuple[Tensor, ...]:
    return (fp8.add_experts_(out_TH.float(), x_TH, ids_TK, weights_TK, (w13_NIH, s13), (w2_NHI, s2)),)


def run_triton(
    out_TH: Tensor,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w13_NIH: Tensor,
    s13: Tensor,
    w2_NHI: Tensor,
    s2: Tensor,
) -> tuple[Tensor, ...]:
    from thalweg.kernels.experts.triton import Weights, add_experts_
    from thalweg.kernels.router.triton import Routed

    out, x, ids, weights, w13, s13, w2, s2 = (
        each.cuda() for each in (out_TH, x_TH, ids_TK, weights_TK, w13_NIH, s13, w2_NHI, s2)
    )
    add_experts_(out, x, Routed(weights, ids.int()), Weights(w13, w2, s13, s2))
    return (out.to(out_TH.device),)


_GPU = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if _GPU else {})
