"""Cases of RMSNorm: few and many rows, tiny inputs where eps counts, a slice of a wider row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import (
    Inputs,
    KernelCase,
    TimedCase,
    draw_tensor,
    model_dtype,
    normal,
    size,
    tolerance_of,
    with_triton,
)
from thalweg.kernels.norm.ref import rms_norm, rms_norm_

SHAPES = {"cpu": ((1, 256), (64, 256)), "cuda": ((1, 2048), (32, 7168), (4096, 7168))}  # of models: rows, width
EPS = 1e-6


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    shapes = (1, 256, 1.0), (33, 7168, 3.0), (5, 128, 1e-3), (2, 64, 0.0)
    for (rows, dim, scale), dtype in product(shapes, (torch.float32, torch.bfloat16)):
        x = (normal(generator, rows, 2 * dim) * scale).to(dtype)[:, :dim]
        weight = normal(generator, dim)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        yield KernelCase(
            name=f"{rows} rows of {dim}, scale {scale:g}, {dtype}",
            inputs={"x_TH": x, "weight_H": weight},
            exact=(exact, exact),
            tolerance=tolerance_of(dtype),
            flops=4 * rows * dim,
            bytes=2 * size(x) + size(weight),
        )


def run(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, ...]:
    floor = torch.full((), (len(weight_H) * EPS) ** 0.5, device=x_TH.device)
    given = x_TH, weight_H, floor, torch.zeros((), device=x_TH.device)
    return rms_norm(*given), rms_norm_(*given)


def run_torch(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, ...]:
    return ((F.rms_norm(x_TH.float(), x_TH.shape[1:], weight_H, EPS)).to(x_TH.dtype),)


def run_triton(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.norm import triton

    return (triton.rms_norm(x_TH, weight_H, EPS),)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    dtype = model_dtype(device)
    backends = with_triton(lambda **inputs: run(**inputs)[:1], run_triton, device) | {"torch": run_torch}

    def case(rows: int, dim: int) -> TimedCase:
        def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
            weight = draw_tensor(generator, dim, dtype=torch.float32)
            return {"x_TH": draw_tensor(generator, rows, dim, dtype=dtype), "weight_H": weight}

        cost = 4 * rows * dim, 2 * rows * dim * dtype.itemsize + 4 * dim
        return TimedCase(f"{rows} rows of {dim}", draw, backends, lambda inputs: cost, "float32", tolerance_of(dtype))

    return (case(*shape) for shape in SHAPES[device.type])


BACKENDS = {"ref": run}
