"""Cases of silu(gate) · up, plain and as FP8 codes."""

from __future__ import annotations

from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size
from thalweg.kernels.launch import triton_available
from thalweg.kernels.silu_mul import ref

SHAPES = {"cpu": ((1, 512), (64, 512)), "cuda": ((32, 18432), (4096, 18432))}  # of models: rows, inner width


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, inner in ((1, 384), (70, 128), (5, 1408)):
        gate_up = normal(generator, rows, 2 * inner, dtype=torch.bfloat16) * 3
        gate, up = gate_up.double().chunk(2, 1)
        exact = F.silu(gate) * up
        scale = exact.view(rows, -1, 128).abs().amax(-1) / 448
        yield KernelCase(
            name=f"{rows} x {inner}",
            inputs={"gate_up_MI": gate_up},
            exact=(exact, scale),
            tolerance=4e-3,
            flops=4 * exact.numel(),
            bytes=size(gate_up) + 3 * exact.numel(),
        )


def run(gate_up_MI: Tensor) -> tuple[Tensor, ...]:
    return ref.silu_mul(gate_up_MI), ref.silu_mul_quantize(gate_up_MI)[1]


def run_triton(gate_up_MI: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.silu_mul import triton

    given = gate_up_MI.cuda()
    return triton.silu_mul(given).to(gate_up_MI.device), triton.silu_mul_quantize(given)[1].to(gate_up_MI.device)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for rows, inner in SHAPES[device.type]:
        yield _sized(rows, inner, torch.bfloat16 if device.type == "cuda" else torch.float32)


def _sized(rows: int, inner: int, dtype: torch.dtype) -> TimedCase:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        return {"gate_up_MI": draw_tensor(generator, rows, 2 * inner, dtype=dtype)}

    backends: dict[str, Run] = {"ref": lambda gate_up_MI: (ref.silu_mul(gate_up_MI),)}
    if triton_available() and dtype == torch.bfloat16:
        backends["triton"] = _run_one
    moved = 3 * rows * inner * dtype.itemsize
    return TimedCase(f"{rows} x {inner}", draw, backends, lambda given: (4 * rows * inner, moved), "float32", 8e-3)


def _run_one(gate_up_MI: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.silu_mul import triton

    return (triton.silu_mul(gate_up_MI),)


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
