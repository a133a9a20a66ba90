"""Cases of products in deterministic mode: one row and more than a tile, widths that no block divides, everything that
may be added, float32 results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.batch_invariant_gemm import ref
from thalweg.kernels.case import KernelCase, tolerance_of, with_triton
from thalweg.kernels.gemm.case import ADDED, product_case
from thalweg.kernels.gemm.epilogue import Epilogue

FP32 = {"dtype": torch.float32}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for shape in ((1, 130, 64), (130, 33, 72)):
        case = product_case(generator, shape)
        yield replace(
            case, name=f"{case.name}, float32", inputs=case.inputs | FP32, tolerance=tolerance_of(torch.float32)
        )
    for shape in ((67, 40, 200), (3, 4200, 128)):
        yield product_case(generator, shape, ADDED)
    yield product_case(generator, (67, 40, 200), ("bias_N", "out_MN"))


def run(x_MK: Tensor, w_NK: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return (ref.linear(x_MK, w_NK, Epilogue(**given)),)


def run_triton(x_MK: Tensor, w_NK: Tensor, **given: Any) -> tuple[Tensor, ...]:
    from thalweg.kernels.batch_invariant_gemm.triton import linear

    return (linear(x_MK, w_NK, Epilogue(**given)),)


BACKENDS = with_triton(run, run_triton)
