"""Cases of y = x Wᵀ with few rows: one row, a whole and a partial tile of rows, weights that no tile divides, all that may be added."""

from __future__ import annotations

import importlib.util
from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Case, Run, normal, precision, size
from thalweg.kernels.gemm import ref


def cases(generator: torch.Generator) -> Iterator[Case]:
    for rows, n, k in ((1, 200, 2048), (8, 72, 1024), (11, 130, 1536), (40, 64, 512), (3, 96, 200)):
        for added in (False, True):
            x, w = normal(generator, rows, k), normal(generator, n, k) * k**-0.5
            x, w = x.bfloat16(), w.bfloat16()
            bias = normal(generator, n, dtype=torch.bfloat16) if added else None
            residual = normal(generator, rows, n, dtype=torch.bfloat16) if added else None
            exact = x.double() @ w.double().t()
            if bias is not None and residual is not None:
                exact += bias.double() + residual.double()
            yield Case(
                name=f"{rows} x {n} x {k}{', bias, residual' if added else ''}",
                inputs={"x_MK": x, "w_NK": w, "bias_N": bias, "residual_MN": residual},
                exact=(exact,),
                tolerance=precision(torch.bfloat16),
                flops=2 * rows * n * k,
                bytes=size(x, w) + 2 * rows * n * (1 + added),
            )


def run(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, residual_MN: Tensor | None) -> tuple[Tensor, ...]:
    return (ref.linear(x_MK, w_NK, bias_N, residual_MN),)


def run_triton(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, residual_MN: Tensor | None) -> tuple[Tensor, ...]:
    from thalweg.kernels.gemm import triton

    bias, residual = (None if each is None else each.cuda() for each in (bias_N, residual_MN))
    return (triton.linear(x_MK.cuda(), w_NK.cuda(), bias, residual).to(x_MK.device),)


_GPU = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if _GPU else {})
