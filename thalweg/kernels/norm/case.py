"""Cases of RMSNorm: few and many rows, tiny inputs where eps counts, a slice of a wider row."""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Case, normal, precision, size
from thalweg.kernels.norm.ref import rms_norm, rms_norm_


def cases(generator: torch.Generator) -> Iterator[Case]:
    for rows, dim, scale in ((1, 256, 1.0), (33, 7168, 3.0), (5, 128, 1e-3), (2, 64, 0.0)):
        for dtype in (torch.float32, torch.bfloat16):
            x = (normal(generator, rows, 2 * dim) * scale).to(dtype)[:, :dim]
            weight, eps = normal(generator, dim), 1e-6
            exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
            yield Case(
                name=f"{rows} rows of {dim}, scale {scale:g}, {dtype}",
                inputs={
                    "x": x,
                    "weight": weight,
                    "floor": torch.tensor((dim * eps) ** 0.5),
                    "zero": torch.tensor(0.0),
                },
                exact=(exact, exact),
                tolerance=precision(dtype),
                flops=4 * rows * dim,
                bytes=2 * size(x) + size(weight),
            )


def run(x: Tensor, weight: Tensor, floor: Tensor, zero: Tensor) -> tuple[Tensor, ...]:
    return rms_norm(x, weight, floor, zero), rms_norm_(x, weight, floor, zero)


BACKENDS = {"ref": run}
