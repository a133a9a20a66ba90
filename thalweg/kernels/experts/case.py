"""Cases of routed experts, with plain or FP8 weights: one token, a few, many; experts that nobody chose; a sum that is
added to a residual, and one that is stored.

The exact result of FP8 rounds activations to e4m3 as the definition says, then computes in float64. A tolerance on the
unrounded result would have to allow 5 %, and would hide any mistake in a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import (
    Inputs,
    KernelCase,
    Operation,
    Run,
    TimedCase,
    draw_tensor,
    fp8_weight,
    model_dtype,
    tolerance_of,
    with_triton,
)
from thalweg.kernels.experts import fp8
from thalweg.kernels.experts.ref import SCRIPTABLE, add_experts_, scripted
from thalweg.kernels.gemm import deep_gemm
from thalweg.kernels.launch import triton_available

E4M3 = torch.float8_e4m3fn


class Shape(NamedTuple):
    """A mixture of experts and a number of tokens."""

    tokens: int
    experts: int  # with the shared ones, which are the last of the stack
    topk: int  # with the shared ones
    hidden: int
    inner: int
    shared: int = 0


# of models: (name, shape of one token, numbers of tokens)
Shapes = dict[str, tuple[str, Shape, tuple[int, ...]]]
SHAPES: Shapes = {
    "cpu": ("tiny", Shape(1, 16, 4, 256, 128), (1, 4, 64)),
    "cuda": ("v2-lite", Shape(1, 66, 8, 2048, 1408, 2), (1, 8, 32, 128, 4096)),
}
SHAPES_FP8: Shapes = {
    "cpu": ("small", Shape(1, 8, 4, 256, 128), (1, 4)),
    "cuda": ("v3", Shape(1, 257, 9, 7168, 2048, 1), (1, 4, 32, 128, 4096)),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for shape in ((1, 16, 4, 64, 32), (3, 16, 4, 48, 20), (70, 8, 2, 64, 24), (5, 4, 4, 16, 8)):
        for dtype in (torch.float32, torch.bfloat16):
            case = small_case(generator, Shape(*shape), dtype)
            yield case
            yield _stored(case)


def cases_fp8(generator: torch.Generator) -> Iterator[KernelCase]:
    for shape in ((1, 8, 4, 256, 128), (2, 8, 3, 384, 256), (40, 8, 2, 256, 384)):
        case = small_case(generator, Shape(*shape), E4M3)
        yield case
        yield _stored(case)


def small_case(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> KernelCase:
    """dtype: of the weights."""
    inputs = draw_inputs(generator, None, shape, dtype)
    x, ids, weights, w13, w2 = (inputs[name] for name in ("x_TH", "ids_TK", "weights_TK", "w13_NIH", "w2_NHI"))
    exact = inputs["out_TH"].double()
    if dtype == E4M3:
        fp8.add_experts_(exact, x, ids, weights, (w13, inputs["s13"]), (w2, inputs["s2"]))
    else:
        for token, k in product(range(shape.tokens), range(shape.topk)):
            gate, up = (w13[ids[token, k]].double() @ x[token].double()).chunk(2)
            exact[token] += weights[token, k] * (w2[ids[token, k]].double() @ (F.silu(gate) * up))
    return KernelCase(
        name=f"{shape.tokens} tokens, {shape.topk} of {shape.experts} experts, {shape.hidden} x {shape.inner}, {dtype}",
        inputs=inputs,
        exact=(exact,),
        tolerance=1e-2 if dtype == E4M3 else tolerance_of(dtype),  # bf16 of the sum, and of each expert's part
    )


def _stored(case: KernelCase) -> KernelCase:
    """The sum alone, which replaces the contents of out_TH."""
    exact = (case.exact[0] - case.inputs["out_TH"].double(),)
    return replace(case, name=f"{case.name}, stored", inputs=case.inputs | {"accumulate": False}, exact=exact)


def _start(out_TH: Tensor, accumulate: bool) -> Tensor:
    """The float32 tensor to which a reference adds."""
    return out_TH.float() if accumulate else torch.zeros_like(out_TH, dtype=torch.float32)


def run(
    out_TH: Tensor, x_TH: Tensor, accumulate: bool = True, function: Run = add_experts_, **inputs: Any
) -> tuple[Tensor]:
    stacks = inputs["w13_NIH"], inputs["w2_NHI"]
    gate_up, down = ([weight.t() for weight in stack] for stack in stacks)
    memory = [weight.flatten() for weight in stacks[0]], torch.zeros((), device=x_TH.device)
    start = _start(out_TH, accumulate)
    return (function(start, x_TH, inputs["ids_TK"].long(), inputs["weights_TK"], gate_up, down, *memory),)


def run_script(**inputs: Any) -> tuple[Tensor]:
    return run(function=scripted(), **inputs)


def run_fp8(out_TH: Tensor, x_TH: Tensor, accumulate: bool = True, **inputs: Any) -> tuple[Tensor]:
    pairs = (inputs["w13_NIH"], inputs["s13"]), (inputs["w2_NHI"], inputs["s2"])
    return (fp8.add_experts_(_start(out_TH, accumulate), x_TH, inputs["ids_TK"], inputs["weights_TK"], *pairs),)


def run_kernels(
    out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, accumulate: bool = True, shared: int = 0,
    backend: str = "triton", **stacks: Tensor,
) -> tuple[Tensor]:  # fmt: skip
    from thalweg.kernels.experts.backends import RUNNERS
    from thalweg.kernels.experts.triton import ExpertWeights
    from thalweg.kernels.router.triton import RouterOutput

    routed = RouterOutput(weights_TK, ids_TK.int(), shared=shared)
    RUNNERS[backend](out_TH, x_TH, routed, ExpertWeights(**stacks), accumulate)
    return (out_TH,)


def draw_inputs(generator: torch.Generator, before: Inputs | None, shape: Shape, dtype: torch.dtype) -> Inputs:
    """dtype: of the weights. before: earlier inputs, whose weights are used again."""
    tokens, experts, topk, hidden, inner, shared = shape
    if before is not None:
        stacks = {name: before[name] for name in ("w13_NIH", "w2_NHI", "s13", "s2") if name in before}
    elif dtype == E4M3:  # multipliers that keep results near 1: beside the residual a wrong one must show
        w13, s13 = fp8_weight(generator, experts, 2 * inner, hidden, scale=3 * hidden**-0.5)
        w2, s2 = fp8_weight(generator, experts, hidden, inner, scale=3 * inner**-0.5)
        stacks = {"w13_NIH": w13, "w2_NHI": w2, "s13": s13, "s2": s2}
    else:
        stacks = {
            "w13_NIH": draw_tensor(generator, experts, 2 * inner, hidden, dtype=dtype).mul_(hidden**-0.5),
            "w2_NHI": draw_tensor(generator, experts, hidden, inner, dtype=dtype).mul_(inner**-0.5),
        }
    device, routed = generator.device, experts - shared
    ids = torch.rand(tokens, routed, generator=generator, device=device).topk(topk - shared).indices
    always = torch.arange(routed, experts, device=device).expand(tokens, -1)
    weights = torch.rand(tokens, topk, generator=generator, device=device)
    weights[:, topk - shared :] = 1.0
    activations = torch.bfloat16 if dtype == E4M3 else dtype
    rows = {name: draw_tensor(generator, tokens, hidden, dtype=activations) for name in ("out_TH", "x_TH")}
    return rows | {"ids_TK": torch.cat((ids, always), 1).int(), "weights_TK": weights} | stacks


def _timed(shapes: Shapes, device: torch.device, dtype: torch.dtype, ref: Run) -> Iterator[TimedCase]:
    name, one_token, counts = shapes[device.type]
    backends = {"ref": ref}
    is_gpu, is_fp8 = device.type == "cuda", dtype == E4M3
    if not is_gpu and not is_fp8 and SCRIPTABLE:
        backends["script"] = run_script
    if is_gpu and triton_available():
        for backend in ("triton", *(["deep_gemm"] if deep_gemm.available() else [])):
            backends[backend] = partial(run_kernels, shared=one_token.shared, backend=backend)
    math = "float32" if not is_gpu else "fp8" if is_fp8 else "bf16"

    def case(shape: Shape) -> TimedCase:
        def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
            return draw_inputs(generator, before, shape, dtype)

        def cost(inputs: Inputs) -> tuple[float, float]:
            weights = 3 * shape.hidden * shape.inner
            read = weights * inputs["ids_TK"].unique().numel() * dtype.itemsize
            moved = 3 * shape.tokens * shape.hidden * inputs["x_TH"].itemsize
            return 2 * weights * shape.tokens * shape.topk, read + moved

        # FP8: bf16 between the product and silu moves one code in twenty
        return TimedCase(f"{name}, {shape.tokens} tokens", draw, backends, cost, math, 4e-2 if is_fp8 else 2e-2)

    for tokens in counts:
        yield case(one_token._replace(tokens=tokens))


def sizes(device: torch.device) -> Iterator[TimedCase]:
    return _timed(SHAPES, device, model_dtype(device), run)


def sizes_fp8(device: torch.device) -> Iterator[TimedCase]:
    return _timed(SHAPES_FP8, device, E4M3, run_fp8)


BACKENDS = with_triton(run, run_kernels) | ({"script": run_script} if SCRIPTABLE else {})
FP8 = Operation(cases_fp8, with_triton(run_fp8, run_kernels), sizes_fp8)
