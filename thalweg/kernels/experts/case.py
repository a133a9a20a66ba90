"""Cases of routed experts: one token, a few, many; experts that nobody chose."""

from __future__ import annotations

import importlib
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size, tolerance_of
from thalweg.kernels.experts import script
from thalweg.kernels.experts.ref import add_experts_
from thalweg.kernels.gemm import deep_gemm
from thalweg.kernels.launch import triton_available

# of models: (name, hidden, inner, experts, chosen, shared ones of both, numbers of tokens)
SHAPES = {
    "cpu": (("tiny", 256, 128, 16, 4, 0, (1, 4, 64)),),
    "cuda": (("v2-lite", 2048, 1408, 66, 8, 2, (1, 8, 32, 128, 4096)),),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
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
            yield KernelCase(
                name=f"{tokens} tokens, {topk} of {experts} experts, {hidden} x {inner}, {dtype}",
                inputs={"out_TH": out, "x_TH": x, "ids_TK": ids, "weights_TK": weights, "w13_EIH": w13, "w2_EHI": w2},
                exact=(exact,),
                tolerance=tolerance_of(dtype),
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
    from thalweg.kernels.experts.triton import ExpertWeights
    from thalweg.kernels.experts.triton import add_experts_ as add
    from thalweg.kernels.router.triton import RouterOutput

    out, x, ids, weights, w13, w2 = (each.cuda() for each in (out_TH, x_TH, ids_TK, weights_TK, w13_EIH, w2_EHI))
    add(out, x, RouterOutput(weights, ids.int()), ExpertWeights(w13, w2))
    return (out.to(out_TH.device),)


def _lists(w13_EIH: Tensor, w2_EHI: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    gate_up, down = ([weight.t() for weight in stack] for stack in (w13_EIH, w2_EHI))
    return gate_up, down, [weight.flatten() for weight in w13_EIH], torch.zeros((), device=w13_EIH.device)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, hidden, inner, experts, topk, shared, counts in SHAPES[device.type]:
        for tokens in counts:
            yield _sized(
                f"{name}, {tokens} tokens", tokens, (experts, hidden, inner), topk, shared, device.type == "cuda"
            )


def _sized(name: str, tokens: int, stack: tuple[int, int, int], topk: int, shared: int, gpu: bool) -> TimedCase:
    dtype, (experts, hidden, inner) = torch.bfloat16 if gpu else torch.float32, stack

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        stacks = before or {
            "w13_EIH": draw_tensor(generator, experts, 2 * inner, hidden, dtype=dtype).mul_(hidden**-0.5),
            "w2_EHI": draw_tensor(generator, experts, hidden, inner, dtype=dtype).mul_(inner**-0.5),
        }
        picked = chosen(generator, tokens, experts, topk, shared)
        if not gpu:
            picked["ids_TK"] = picked["ids_TK"].long()
        return picked | {
            "out_TH": draw_tensor(generator, tokens, hidden, dtype=dtype), "x_TH": draw_tensor(generator, tokens, hidden, dtype=dtype),
            "w13_EIH": stacks["w13_EIH"], "w2_EHI": stacks["w2_EHI"],
        }  # fmt: skip

    def cost(given: Inputs) -> tuple[float, float]:
        read = 3 * hidden * inner * given["ids_TK"].unique().numel() + 3 * tokens * hidden
        return 6 * tokens * topk * hidden * inner, read * dtype.itemsize

    backends: dict[str, Run] = dict(BACKENDS)
    if gpu:
        backends = {"ref": _run_wide}
        if triton_available():
            backends["triton"] = _by("triton", shared)
        if triton_available() and deep_gemm.available():
            backends["deep_gemm"] = _by("ext", shared)
    return TimedCase(name, draw, backends, cost, "bf16" if gpu else "float32", 2e-2)


def chosen(generator: torch.Generator, tokens: int, experts: int, topk: int, shared: int) -> Inputs:
    """ids int32 and weights of uniform choices; the shared ones are the last of the stack, with weight 1."""
    device = generator.device
    ids = torch.rand(tokens, experts - shared, generator=generator, device=device).topk(topk - shared).indices
    always = torch.arange(experts - shared, experts, device=device).expand(tokens, -1)
    weights = torch.rand(tokens, topk, generator=generator, device=device)
    weights[:, topk - shared :] = 1.0
    return {"ids_TK": torch.cat((ids, always), 1).to(torch.int32), "weights_TK": weights}


def _run_wide(
    out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_EIH: Tensor, w2_EHI: Tensor
) -> tuple[Tensor, ...]:
    """The reference, which sums in float32, beside kernels that add to a residual in bf16."""
    return (run(out_TH.float(), x_TH, ids_TK, weights_TK, w13_EIH, w2_EHI)[0].to(out_TH.dtype),)


def _by(module: str, shared: int) -> Run:
    """A module of this folder, as a layer calls it."""

    def run_by(
        out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_EIH: Tensor, w2_EHI: Tensor
    ) -> tuple[Tensor, ...]:
        from thalweg.kernels.experts.triton import ExpertWeights
        from thalweg.kernels.router.triton import RouterOutput

        add = importlib.import_module(f"thalweg.kernels.experts.{module}").add_experts_
        add(out_TH, x_TH, RouterOutput(weights_TK, ids_TK, shared=shared), ExpertWeights(w13_EIH, w2_EHI))
        return (out_TH,)

    return run_by


BACKENDS: dict[str, Run] = (
    {"ref": run}
    | ({"script": run_script} if script.AVAILABLE else {})
    | ({"triton": run_triton} if triton_available() else {})
)
