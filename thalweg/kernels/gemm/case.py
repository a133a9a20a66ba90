"""Cases of y = x Wᵀ with few rows: one row, a whole and a partial tile of rows, weights that no tile divides, all that
may be added.
"""

from __future__ import annotations

from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size, tolerance_of
from thalweg.kernels.gemm import ref
from thalweg.kernels.gemm.prefetch import read_weight
from thalweg.kernels.launch import triton_available

# of models: (name, outputs, inputs, numbers of rows)
SHAPES = {
    "cpu": (("tiny down", 336, 256, (1, 4, 64)), ("tiny head", 2048, 256, (1, 4, 64))),
    "cuda": (
        ("v2-lite down", 3648, 2048, (1, 16, 4096)),
        ("v2-lite out", 2048, 2048, (1, 16)),
        ("v2-lite head", 102400, 2048, (1, 32)),
        ("qwen2.5-7b gate_up", 37888, 3584, (1, 32, 4096)),
    ),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, n, k in ((1, 200, 2048), (8, 72, 1024), (11, 130, 1536), (40, 64, 512), (3, 96, 200)):
        for added in (False, True):
            x, w = normal(generator, rows, k), normal(generator, n, k) * k**-0.5
            x, w = x.bfloat16(), w.bfloat16()
            bias = normal(generator, n, dtype=torch.bfloat16) if added else None
            residual = normal(generator, rows, n, dtype=torch.bfloat16) if added else None
            exact = x.double() @ w.double().t()
            if bias is not None and residual is not None:
                exact += bias.double() + residual.double()
            yield KernelCase(
                name=f"{rows} x {n} x {k}{', bias, residual' if added else ''}",
                inputs={"x_MK": x, "w_NK": w, "bias_N": bias, "residual_MN": residual},
                exact=(exact,),
                tolerance=tolerance_of(torch.bfloat16),
                flops=2 * rows * n * k,
                bytes=size(x, w) + 2 * rows * n * (1 + added),
            )


def run(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, residual_MN: Tensor | None) -> tuple[Tensor, ...]:
    return (ref.linear(x_MK, w_NK, bias_N, residual_MN),)


def run_triton(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, residual_MN: Tensor | None) -> tuple[Tensor, ...]:
    from thalweg.kernels.gemm import triton

    bias, residual = (None if each is None else each.cuda() for each in (bias_N, residual_MN))
    return (triton.linear(x_MK.cuda(), w_NK.cuda(), bias, residual).to(x_MK.device),)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, n, k, counts in SHAPES[device.type]:
        for rows in counts:
            yield _sized(name, rows, n, k, dtype)


def _sized(name: str, rows: int, n: int, k: int, dtype: torch.dtype) -> TimedCase:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        return {
            "x_MK": draw_tensor(generator, rows, k, dtype=dtype),
            "w_NK": draw_tensor(generator, n, k, dtype=dtype).mul_(k**-0.5),
        }

    backends: dict[str, Run] = {"ref": lambda x_MK, w_NK: (ref.linear(x_MK, w_NK),)}
    if dtype == torch.float32:
        backends |= {"mkl": _library, "mkl, read ahead": _read_ahead}
    else:
        backends["cublas"] = _library
        if triton_available() and rows <= 64:
            backends["triton"] = lambda x_MK, w_NK: run_triton(x_MK, w_NK, None, None)
    moved = (rows * (k + n) + n * k) * dtype.itemsize
    math = "bf16" if dtype == torch.bfloat16 else "float32"
    return TimedCase(f"{name}, {rows} x {n} x {k}", draw, backends, lambda given: (2 * rows * n * k, moved), math, 2e-2)


def _library(x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, ...]:
    return (F.linear(x_MK, w_NK),)


def _read_ahead(x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, ...]:
    """As the CPU's layers do: see `prefetch.py`."""
    read_weight(w_NK)
    return (F.linear(x_MK, w_NK),)


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
