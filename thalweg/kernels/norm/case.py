"""Cases of RMSNorm: few and many rows, tiny inputs where eps counts, a slice of a wider row."""

from __future__ import annotations

from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size, tolerance_of
from thalweg.kernels.launch import triton_available
from thalweg.kernels.norm.ref import rms_norm, rms_norm_

SHAPES = {"cpu": ((1, 256), (64, 256)), "cuda": ((1, 2048), (32, 7168), (4096, 7168))}  # of models: rows, width
EPS = 1e-6


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, dim, scale in ((1, 256, 1.0), (33, 7168, 3.0), (5, 128, 1e-3), (2, 64, 0.0)):
        for dtype in (torch.float32, torch.bfloat16):
            x = (normal(generator, rows, 2 * dim) * scale).to(dtype)[:, :dim]
            weight, eps = normal(generator, dim), 1e-6
            exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
            yield KernelCase(
                name=f"{rows} rows of {dim}, scale {scale:g}, {dtype}",
                inputs={
                    "x": x,
                    "weight": weight,
                    "floor": torch.tensor((dim * eps) ** 0.5),
                    "zero": torch.tensor(0.0),
                },
                exact=(exact, exact),
                tolerance=tolerance_of(dtype),
                flops=4 * rows * dim,
                bytes=2 * size(x) + size(weight),
            )


def run(x: Tensor, weight: Tensor, floor: Tensor, zero: Tensor) -> tuple[Tensor, ...]:
    return rms_norm(x, weight, floor, zero), rms_norm_(x, weight, floor, zero)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for rows, dim in SHAPES[device.type]:
        yield _sized(rows, dim, torch.bfloat16 if device.type == "cuda" else torch.float32)


def _sized(rows: int, dim: int, dtype: torch.dtype) -> TimedCase:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        weight = draw_tensor(generator, dim, dtype=torch.float32)
        return {"x_TH": draw_tensor(generator, rows, dim, dtype=dtype), "weight_H": weight}

    backends: dict[str, Run] = {"ref": _run_plain, "torch": _run_torch}
    if triton_available():
        backends["triton"] = _run_triton
    moved = 2 * rows * dim * dtype.itemsize + 4 * dim
    return TimedCase(
        f"{rows} rows of {dim}", draw, backends, lambda given: (4 * rows * dim, moved), "float32", tolerance_of(dtype)
    )


def _run_plain(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, ...]:
    floor = torch.full((), (len(weight_H) * EPS) ** 0.5, device=x_TH.device)
    return (rms_norm(x_TH, weight_H, floor, torch.zeros((), device=x_TH.device)),)


def _run_torch(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, ...]:
    return ((F.rms_norm(x_TH.float(), x_TH.shape[1:], weight_H, EPS)).to(x_TH.dtype),)


def _run_triton(x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.norm import triton

    return (triton.rms_norm(x_TH, weight_H, EPS),)


BACKENDS = {"ref": run}
