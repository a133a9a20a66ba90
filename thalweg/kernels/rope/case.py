"""Cases of the rotary embedding: some blocks of a wider row, single and many heads."""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.attend.ref import rotate_
from thalweg.kernels.case import KernelCase, normal, size, tolerance_of


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    shapes = ((1, 48, 32, 1, 16, 16), (7, 400, 32, 8, 48, 16), (33, 288, 128, 1, 0, 64))
    for tokens, width, first, heads, dim, turning in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            x, angles = normal(generator, tokens, width, dtype=dtype), normal(generator, tokens, turning // 2) * 100
            exact, cos_sin = x.double(), torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
            for head in range(heads):
                at = first + head * dim
                even, odd = x[:, at : at + turning : 2].double(), x[:, at + 1 : at + turning : 2].double()
                cos, sin = angles.double().cos(), angles.double().sin()
                pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
                exact[:, at : at + turning] = pairs.flatten(1)
            yield KernelCase(
                name=f"{tokens} tokens, {heads} heads, {turning} dims, {dtype}",
                inputs={"x_TX": x, "cos_sin_T1c": cos_sin, "first": first, "heads": heads, "dim": dim},
                exact=(exact,),
                tolerance=tolerance_of(dtype),
                flops=3 * tokens * heads * turning,
                bytes=2 * tokens * heads * turning * x.itemsize + size(angles) * 2,
            )


def run(x_TX: Tensor, cos_sin_T1c: Tensor, first: int, heads: int, dim: int) -> tuple[Tensor, ...]:
    rotate_(x_TX, cos_sin_T1c, first, heads, dim)
    return (x_TX,)


BACKENDS = {"ref": run}
