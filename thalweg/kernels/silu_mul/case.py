"""Cases of silu(gate) · up, plain and as FP8 codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, TimedCase, draw_tensor, model_dtype, normal, size, with_triton
from thalweg.kernels.silu_mul import ref

SHAPES = {"cpu": ((1, 512), (64, 512)), "cuda": ((32, 18432), (4096, 18432))}  # of models: rows, inner width


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, inner in ((1, 384), (70, 128), (5, 1408)):
        gate_up = normal(generator, rows, 2 * inner, dtype=torch.bfloat16) * 3
        gate, up = gate_up.double().chunk(2, 1)
        exact = F.silu(gate) * up
        scale = exact.view(rows, -1, 128).abs().amax(-1) / 448
        cost = 4 * exact.numel(), size(gate_up) + 3 * exact.numel()
        yield KernelCase(f"{rows} x {inner}", {"gate_up_MI": gate_up}, (exact, scale), 4e-3, *cost)


def run(gate_up_MI: Tensor) -> tuple[Tensor, ...]:
    return ref.silu_mul(gate_up_MI), ref.silu_mul_quantize(gate_up_MI)[1]


def run_triton(gate_up_MI: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.silu_mul import triton

    return triton.silu_mul(gate_up_MI), triton.silu_mul_quantize(gate_up_MI)[1]


def run_plain(gate_up_MI: Tensor) -> tuple[Tensor, ...]:
    return (ref.silu_mul(gate_up_MI),)


def run_plain_triton(gate_up_MI: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.silu_mul import triton

    return (triton.silu_mul(gate_up_MI),)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    dtype = model_dtype(device)
    backends = with_triton(run_plain, run_plain_triton, device)

    def case(rows: int, inner: int) -> TimedCase:
        def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
            return {"gate_up_MI": draw_tensor(generator, rows, 2 * inner, dtype=dtype)}

        cost = 4 * rows * inner, 3 * rows * inner * dtype.itemsize
        return TimedCase(f"{rows} x {inner}", draw, backends, lambda inputs: cost, "float32", 8e-3)

    return (case(*shape) for shape in SHAPES[device.type])


BACKENDS = with_triton(run, run_triton)
