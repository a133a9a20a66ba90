"""Cases of experts in FP8. The exact result rounds activations to e4m3 as the definition says, then computes in
float64: a tolerance on the unrounded result would have to allow 5 % and would hide any mistake in a scale.
"""

from __future__ import annotations

import importlib
from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size
from thalweg.kernels.experts import fp8
from thalweg.kernels.experts.case import chosen
from thalweg.kernels.fp8_block.ref import quantize
from thalweg.kernels.gemm import deep_gemm
from thalweg.kernels.launch import triton_available

# of models: (name, hidden, inner, experts, chosen, shared ones of both, numbers of tokens)
SHAPES = {
    "cpu": (("small", 256, 128, 8, 4, 0, (1, 4)),),
    "cuda": (("v3", 7168, 2048, 257, 9, 1, (1, 4, 32, 128, 4096)),),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for tokens, experts, topk, hidden, inner in ((1, 8, 4, 256, 128), (2, 8, 3, 384, 256), (40, 8, 2, 256, 384)):
        x = normal(generator, tokens, hidden, dtype=torch.bfloat16)
        out = normal(generator, tokens, hidden, dtype=torch.bfloat16)
        w13 = _blocks(normal(generator, experts, 2 * inner, hidden) * hidden**-0.5)
        w2 = _blocks(normal(generator, experts, hidden, inner) * inner**-0.5)
        ids = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])
        weights = normal(generator, tokens, topk).abs()
        used = len(set(ids.flatten().tolist()))
        yield KernelCase(
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
    from thalweg.kernels.experts.triton import ExpertWeights, add_experts_
    from thalweg.kernels.router.triton import RouterOutput

    out, x, ids, weights, w13, s13, w2, s2 = (
        each.cuda() for each in (out_TH, x_TH, ids_TK, weights_TK, w13_NIH, s13, w2_NHI, s2)
    )
    add_experts_(out, x, RouterOutput(weights, ids.int()), ExpertWeights(w13, w2, s13, s2))
    return (out.to(out_TH.device),)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, hidden, inner, experts, topk, shared, counts in SHAPES[device.type]:
        for tokens in counts:
            yield _sized(
                f"{name}, {tokens} tokens", tokens, (experts, hidden, inner), topk, shared, device.type == "cuda"
            )


def _sized(name: str, tokens: int, stack: tuple[int, int, int], topk: int, shared: int, gpu: bool) -> TimedCase:
    experts, hidden, inner = stack

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        held = before or stacks(generator, hidden, inner, experts)
        own = {"out_TH": draw_tensor(generator, tokens, hidden), "x_TH": draw_tensor(generator, tokens, hidden)}
        return (
            own
            | chosen(generator, tokens, experts, topk, shared)
            | {n: held[n] for n in ("w13_NIH", "s13", "w2_NHI", "s2")}
        )

    def cost(given: Inputs) -> tuple[float, float]:
        read = 3 * hidden * inner * given["ids_TK"].unique().numel() + 6 * tokens * hidden
        return 6 * tokens * topk * hidden * inner, read

    backends = dict(BACKENDS)
    if gpu and triton_available():
        backends["triton"] = _by("triton", shared)
        if deep_gemm.available():
            backends["deep_gemm"] = _by("ext", shared)
    # bf16 between the product and silu moves one code in twenty
    return TimedCase(name, draw, backends, cost, "fp8" if gpu else "float32", 4e-2)


def _by(module: str, shared: int) -> Run:
    """A module of this folder, with x to be quantized first."""

    def run_by(
        out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_NIH: Tensor, s13: Tensor, w2_NHI: Tensor, s2: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        from thalweg.kernels.experts.triton import ExpertWeights
        from thalweg.kernels.router.triton import RouterOutput

        add = importlib.import_module(f"thalweg.kernels.experts.{module}").add_experts_
        add(out_TH, x_TH, RouterOutput(weights_TK, ids_TK, shared=shared), ExpertWeights(w13_NIH, w2_NHI, s13, s2))
        return (out_TH,)

    return run_by


def stacks(generator: torch.Generator, hidden: int, inner: int, experts: int) -> Inputs:
    """Random codes with multipliers that keep what comes out near 1: beside the residual it must show when it is
    wrong.
    """

    def scales(rows: int, columns: int) -> Tensor:
        shape = experts, rows // 128, columns // 128
        return torch.rand(*shape, generator=generator, device=generator.device).mul_(3 * columns**-0.5)  # codes: 0.6

    codes = torch.float8_e4m3fn
    return {
        "w13_NIH": draw_tensor(generator, experts, 2 * inner, hidden, dtype=codes), "s13": scales(2 * inner, hidden),
        "w2_NHI": draw_tensor(generator, experts, hidden, inner, dtype=codes), "s2": scales(hidden, inner),
    }  # fmt: skip


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
