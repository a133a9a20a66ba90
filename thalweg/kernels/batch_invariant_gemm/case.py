"""Cases of products in deterministic mode: one row and more than a tile, widths that no block divides, with bias and
residual, float32 out.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.batch_invariant_gemm import ref
from thalweg.kernels.case import KernelCase, Run, normal, size, tolerance_of
from thalweg.kernels.launch import triton_available


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, columns, inner, extras in (
        (1, 130, 64, False),
        (67, 40, 200, True),
        (3, 4200, 128, True),
        (130, 33, 72, False),
    ):
        x, w = (normal(generator, *shape, dtype=torch.bfloat16) for shape in ((rows, inner), (columns, inner)))
        bias = normal(generator, columns, dtype=torch.bfloat16) if extras else None
        residual = normal(generator, rows, columns, dtype=torch.bfloat16) if extras else None
        exact = x.double() @ w.double().t()
        if bias is not None and residual is not None:
            exact = exact + bias.double() + residual.double()
        yield KernelCase(
            name=f"{rows} x {columns} x {inner}" + (", bias and residual" if extras else ", float32"),
            inputs={"x_MK": x, "w_NK": w, "bias_N": bias, "residual_MN": residual},
            exact=(exact,),
            tolerance=tolerance_of(torch.bfloat16) if extras else tolerance_of(torch.float32),
            flops=2 * rows * columns * inner,
            bytes=size(x, w) + 4 * rows * columns,
        )


def run(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, residual_MN: Tensor | None) -> tuple[Tensor, ...]:
    return (ref.linear(x_MK, w_NK, bias_N, residual_MN, torch.float32),)


def run_triton(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, residual_MN: Tensor | None) -> tuple[Tensor, ...]:
    from thalweg.kernels.batch_invariant_gemm.triton import linear

    bias, residual = (None if one is None else one.cuda() for one in (bias_N, residual_MN))
    return (linear(x_MK.cuda(), w_NK.cuda(), bias, residual, torch.float32).to(x_MK.device),)


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
