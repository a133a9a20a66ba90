"""FP8 block GEMM: DeepGEMM where it is installed, else the own kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.gemm import triton as own
from thalweg.kernels.quantize.triton import quantize


@cache
def _deep_gemm() -> Any:
    """The library, or None."""
    if importlib.util.find_spec("deep_gemm") is None:
        return None
    if shutil.which("nvcc") is None:  # the library compiles its kernels itself, with whatever is there
        os.environ.setdefault("DG_JIT_USE_NVRTC", "1")
    import deep_gemm

    return deep_gemm


def linear(x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor) -> Tensor:
    """y [M, N] bf16 = x Wᵀ; x bf16, quantized here; w e4m3 [N, K], scale float32 [ceil(N / 128), K / 128]."""
    library = _deep_gemm()
    if library is None and len(x_MK) <= own.ROWS:
        return own.linear_fp8(x_MK, w_NK, scale_BB)
    codes_MK, scales_MG = quantize(x_MK)
    y = torch.empty(len(x_MK), len(w_NK), dtype=x_MK.dtype, device=x_MK.device)
    if library is not None:
        library.fp8_gemm_nt((codes_MK, scales_MG), (w_NK, scale_BB), y)
        return y
    return own.matmul_fp8(codes_MK, scales_MG, w_NK, scale_BB, y)
