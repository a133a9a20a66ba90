"""FP8 block GEMM, y = x Wᵀ (+ residual), by backend: our own kernels, DeepGEMM, cuBLASLt's block scaling, or the one
that measured fastest for a size.

The own kernel for few rows reads the weight as it is and activations in bf16. All others quantize x by row and group of
128 columns first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.batch_invariant_gemm import triton as batch_invariant_gemm
from thalweg.kernels.case import fp8_weight
from thalweg.kernels.check import check_results
from thalweg.kernels.gemm import cublas, deep_gemm, ref
from thalweg.kernels.gemm import triton as own
from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue
from thalweg.kernels.norm.triton import Rows, codes_of, rows_of
from thalweg.kernels.tuned import TUNED

FEW = 8  # rows up to which the own kernel is faster than DeepGEMM with its launch for the codes (H100)
# columns of K and rows up to which cuBLAS is faster with weights of many rows, where it serves (128 rows with 24,576 x
# 1,536: 22 us against 45)
FLAT, FLAT_ROWS = 2048, 128
WRONG = 0.05  # of the norm: e4m3 activations alone differ by 2.6 %

# (x, w, scale, epilogue) → y [M, N] bf16. x: bf16, or a norm of such; w: e4m3 [N, K], K a multiple of 128; scale:
# float32 [ceil(N / 128), K / 128].
Fp8Product = Callable[..., Tensor]


def product(backend: str, deterministic: bool = False) -> Fp8Product:
    """The backend's product: "triton", "deep_gemm", "cublas" or "triton+deep_gemm". deterministic: a row's bits depend
    on nothing but the row, which no library promises.
    """
    return _batch_invariant if deterministic else PRODUCTS[backend]


def _batch_invariant(x: Rows, w_NK: Tensor, scale_BB: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    return batch_invariant_gemm.linear_fp8(rows_of(x), w_NK, scale_BB, epilogue)


def _triton(x: Rows, w_NK: Tensor, scale_BB: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    if len(x) <= own.ROWS_FP8:
        return own.linear_fp8(x, w_NK, scale_BB, epilogue)
    return epilogue.finish(own.matmul_fp8(*codes_of(x), w_NK, scale_BB, _room(x, w_NK, epilogue)))


def _deep_gemm(x: Rows, w_NK: Tensor, scale_BB: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    y = _room(x, w_NK, epilogue)
    deep_gemm.library().fp8_gemm_nt(codes_of(x), (w_NK, scale_BB), y)
    return epilogue.finish(y)


def _room(x: Rows, w_NK: Tensor, epilogue: Epilogue) -> Tensor:
    """The tensor for a library's result, which adds no residual."""
    if epilogue.out_MN is not None:
        return epilogue.out_MN
    return torch.empty(len(x), len(w_NK), dtype=torch.bfloat16, device=w_NK.device)


def _cublas(x: Rows, w_NK: Tensor, scale_BB: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    rows, inner = len(x), w_NK.shape[1]
    if not cublas.serves(rows, inner):
        return _triton(x, w_NK, scale_BB, epilogue)
    if rows % 4:  # its scales have no room between columns
        x = F.pad(rows_of(x), (0, 0, 0, -rows % 4))
    return epilogue.finish(cublas.matmul(*codes_of(x), w_NK, scale_BB)[:rows])


def _by_size(x: Rows, w_NK: Tensor, scale_BB: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    rows, (outputs, inner) = len(x), w_NK.shape
    if rows <= TUNED.lookup("fp8_rows", (outputs, inner), FEW):
        return _triton(x, w_NK, scale_BB, epilogue)
    flat = rows <= FLAT_ROWS and outputs >= own.MANY and inner <= FLAT and cublas.serves(rows, inner)
    return (_cublas if flat and _flat(w_NK.device) else _deep_gemm)(x, w_NK, scale_BB, epilogue)


@cache
def _flat(device: torch.device) -> bool:
    """Whether cuBLAS has block scaling here and is right with a weight of many rows. `check` tries it once, before
    there are requests.
    """
    try:
        _check_product("cublas", device, own.MANY)
    except RuntimeError:
        return False
    return True


PRODUCTS: dict[str, Fp8Product] = {
    "triton": _triton,
    "deep_gemm": _deep_gemm,
    "cublas": _cublas,
    "triton+deep_gemm": _by_size,
}


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with the reference. Raises RuntimeError if the backend's library cannot run here or is
    wrong. A backend with cuBLAS beside its library also learns whether cuBLAS serves; without it the library does all.
    """
    _check_product(case.backend, device, 384)
    if PRODUCTS[case.backend] is _by_size:
        _flat(torch.empty(0, device=device).device)  # by its number, as weights name it


def _check_product(backend: str, device: torch.device, outputs: int) -> None:
    """68 rows times a weight of so many."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(68, 512, generator=generator, device=device).bfloat16()
    weight = fp8_weight(generator, outputs, 512)
    exact = (ref.linear_fp8(x.float(), *weight),)
    check_results(backend, "use --fp8-gemm-backend triton", lambda: (PRODUCTS[backend](x, *weight),), exact, WRONG)
