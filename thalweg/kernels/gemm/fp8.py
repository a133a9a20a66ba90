"""FP8 block GEMM, y = x Wᵀ (+ residual), by backend: our own kernels, DeepGEMM, cuBLASLt's block scaling, or what
measured fastest for a size.

The own kernel for few rows reads the weight as it is beside activations in bf16; all others quantise x by row and group
of 128 columns first.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.batch_invariant_gemm import triton as batch_invariant_gemm
from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.kernels.fp8_block.ref import quantize as quantize_blocks
from thalweg.kernels.gemm import cublas, deep_gemm
from thalweg.kernels.gemm import triton as own
from thalweg.kernels.norm.triton import LazyNorm, codes_of, rows_of
from thalweg.kernels.tuned import TUNED

BLOCK = (128, 128)
FEW = 8  # rows up to which the own kernel is faster than DeepGEMM with its launch for the codes (H100)
# columns of K and rows up to which cuBLAS is faster with weights of many rows, where it serves (128 rows with 24,576 x
# 1,536: 22 us against 45)
FLAT, FLAT_ROWS = 2048, 128
WRONG = 0.05  # of the norm: e4m3 activations alone differ by 2.6 %
# of a library that is not the one we know
FAILURES = RuntimeError, AttributeError, TypeError, ValueError, OSError, AssertionError, ImportError


class Product(Protocol):
    """y [M, N] bf16 = x Wᵀ. x bf16, or a norm of such; w e4m3 [N, K], K a multiple of 128; scale float32 [ceil(N /
    128), K / 128]. residual_MN: added, and written: the result is then the residual itself.
    """

    def __call__(
        self, x: Tensor | LazyNorm, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None
    ) -> Tensor: ...


def product(backend: str, deterministic: bool = False) -> Product:
    """What computes these products: "triton", "deep_gemm", "cublas", or "triton+deep_gemm". deterministic: a row's bits
    depend on nothing but the row, which no library promises.
    """
    return _invariant if deterministic else PRODUCTS[backend]


def _invariant(x: Tensor | LazyNorm, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None) -> Tensor:
    return batch_invariant_gemm.linear_fp8(rows_of(x), w_NK, scale_BB, residual_MN)


def _triton(x: Tensor | LazyNorm, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None) -> Tensor:
    if len(x) <= own.ROWS_FP8:
        return own.linear_fp8(x, w_NK, scale_BB, residual_MN)
    return _added(own.matmul_fp8(*codes_of(x), w_NK, scale_BB, _result(x, w_NK)), residual_MN)


def _deep_gemm(x: Tensor | LazyNorm, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None) -> Tensor:
    y = _result(x, w_NK)
    deep_gemm.library().fp8_gemm_nt(codes_of(x), (w_NK, scale_BB), y)
    return _added(y, residual_MN)


def _result(x: Tensor | LazyNorm, w_NK: Tensor) -> Tensor:
    """Room for it."""
    return torch.empty(len(x), len(w_NK), dtype=torch.bfloat16, device=w_NK.device)


def _cublas(x: Tensor | LazyNorm, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None) -> Tensor:
    rows, inner = len(x), w_NK.shape[1]
    if not cublas.serves(rows, inner):
        return _triton(x, w_NK, scale_BB, residual_MN)
    if rows % 4:  # its scales have no room between columns
        x = F.pad(rows_of(x), (0, 0, 0, -rows % 4))
    return _added(cublas.matmul(*codes_of(x), w_NK, scale_BB)[:rows], residual_MN)


def _by_size(x: Tensor | LazyNorm, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None) -> Tensor:
    few = TUNED.lookup("fp8_rows", tuple(w_NK.shape), FEW)
    if len(x) <= few:
        return _triton(x, w_NK, scale_BB, residual_MN)
    outputs, inner = w_NK.shape
    flat = len(x) <= FLAT_ROWS and outputs >= own.MANY and inner <= FLAT and cublas.serves(len(x), inner)
    return (_cublas if flat and _flat(w_NK.device) else _deep_gemm)(x, w_NK, scale_BB, residual_MN)


@cache
def _flat(device: torch.device) -> bool:
    """Whether cuBLAS has block scaling here and is right with a weight of many rows: tried once, by `check`, before
    there are requests.
    """
    try:
        return _error(_cublas, device, own.MANY) < WRONG
    except FAILURES:
        return False


PRODUCTS: dict[str, Product] = {
    "triton": _triton,
    "deep_gemm": _deep_gemm,
    "cublas": _cublas,
    "triton+deep_gemm": _by_size,
}


def _added(y_MN: Tensor, residual_MN: Tensor | None) -> Tensor:
    return y_MN if residual_MN is None else residual_MN.add_(y_MN)


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with the reference; RuntimeError if the backend's library cannot run here or is wrong.
    Where a backend has cuBLAS beside its library, whether that serves is settled here, too; without it the library does
    all.
    """
    backend = case.backend
    try:
        error_is = _error(product(backend), device, 384)
    except FAILURES as error:
        raise RuntimeError(f"{backend} does not run here ({error}); use --fp8-gemm-backend triton") from error
    if not error_is < WRONG:
        raise RuntimeError(f"{backend} is wrong here by {error_is:.3f} of the norm; use --fp8-gemm-backend triton")
    if PRODUCTS[backend] is _by_size:
        _flat(torch.empty(0, device=device).device)  # by its number, as weights name it


def _error(run: Product, device: torch.device, outputs: int) -> float:
    """Of 68 rows and a weight of so many, relative to the norm of the result."""
    generator = torch.Generator(device).manual_seed(1)
    rows, inner = 68, 512
    x = torch.randn(rows, inner, generator=generator, device=device).bfloat16()
    spread = torch.rand(outputs // 128, inner // 128, generator=generator, device=device)
    weight = torch.randn(outputs, inner, generator=generator, device=device) * inner**-0.5
    # block scales far from one another, so that a wrong one shows beside the noise of FP8
    codes, scale = quantize_blocks(weight * spread.repeat_interleave(128, 0).repeat_interleave(128, 1), BLOCK, False)
    y = run(x, codes, scale)
    exact = x.float() @ dequantize(codes, scale, BLOCK, torch.float32).t()
    return float((y.float() - exact).norm() / exact.norm())
