"""GEMM for deterministic mode: y = x Wᵀ. A row has the same bits whatever other rows are in the batch.

A row's bits depend on the order in which K is summed, and on the instruction that sums a step of it. Both are fixed:
all of K in one program, in steps of BLOCK_K, nothing split, by `wgmma`, whose 64 rows are computed whether one of them
is real or all. The number of rows and columns of a tile changes neither, so tiles grow with the number of rows
(tests/gpu/test_moe.py compares the bits over 1 … 300 and 4,096 rows). cuBLAS and the kernels for few rows choose splits
and instructions by it. The price: at one row each program multiplies 63 empty rows, while the weight arrives (64 FLOP a
byte of it, a fifth of what the tensor cores could do).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue
from thalweg.kernels.gemm.triton import tile_origin
from thalweg.kernels.launch import launch_config
from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.quantize.triton import quantize

BAND = 16  # row blocks that run together, so that both operands stay in L2


def tiles(m: int, n: int, fp8: bool) -> tuple[int, int, int, int, int]:
    """→ BLOCK_M (64, or 128 for many rows: multiples of the rows of a warp group), BLOCK_N, BLOCK_K, stages, warps.
    Narrow weights are cut finer, so that a single row still reads with many programs.
    """
    block_k = 128 if fp8 else 64
    if m > 256:
        return 128, 128, block_k, 4, 8
    block_n = 32 if n <= 4096 else 64 if n <= 12288 else 128
    return 64, block_n, block_k, {32: 8, 64: 6, 128: 4}[block_n], 4


def linear(x_MK: Tensor, w_NK: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """y [M, N]. x, w: bf16, rows of neighbours."""
    (m, k), n = x_MK.shape, len(w_NK)
    y = epilogue.result(m, n, x_MK)
    if m:
        block_m, block_n, block_k, stages, warps = tiles(m, n, False)
        _linear[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            x_MK, w_NK, epilogue.bias_N, epilogue.residual_MN, y, m, n, x_MK.stride(0), w_NK.stride(0), y.stride(0),
            k, block_m, block_n, block_k, BAND, stages, **launch_config(x_MK, warps),
        )  # fmt: skip
    return y


def linear_fp8(x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """y [M, N] in x's dtype. w: e4m3 [N, K], scale float32 [ceil(N / 128), K / 128]; x is quantized here, row by
    row.
    """
    (m, k), n = x_MK.shape, len(w_NK)
    y = epilogue.result(m, n, x_MK)
    if m:
        codes_MK, scales_MG = quantize(x_MK)
        block_m, block_n, _, stages, warps = tiles(m, n, True)
        _linear_fp8[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
            codes_MK, scales_MG, w_NK, scale_BB, epilogue.residual_MN, y, m, n, scales_MG.stride(1), y.stride(0),
            k, block_m, block_n, BAND, stages, **launch_config(x_MK, warps),
        )  # fmt: skip
    return y


@triton.jit
def _store(sums, residual_MN, y_MN, m_B, n_B, M, N, stride_y):
    inside = (m_B < M)[:, None] & (n_B < N)[None, :]
    at = m_B.to(tl.int64)[:, None] * stride_y + n_B[None, :]
    if residual_MN is not None:
        sums += tl.load(residual_MN + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_MN + at, sums.to(y_MN.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_MK, w_NK, bias_N, residual_MN, y_MN, M, N, stride_x, stride_w, stride_y,
    K: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, BAND: constexpr,
    STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    first_m, first_n = tile_origin(M, N, BLOCK_M, BLOCK_N, BAND)
    m_B, n_B, k_B = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # rows that are not there are not read at all: 64 copies of one row would take longer to arrive than the weight
    rows = (m_B < M)[:, None]
    x_ptr = x_MK + m_B.to(tl.int64)[:, None] * stride_x + k_B[None, :]
    w_ptr = w_NK + tl.where(n_B < N, n_B, 0).to(tl.int64)[:, None] * stride_w + k_B[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    pdl_wait(PDL)
    pdl_launch(PDL)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x, w = tl.load(x_ptr + start, mask=rows, other=0.0), tl.load(w_ptr + start)
        else:
            inside = (start + k_B < K)[None, :]
            x = tl.load(x_ptr + start, mask=rows & inside, other=0.0)
            w = tl.load(w_ptr + start, mask=inside, other=0.0)
        sums = tl.dot(x, w.T, sums, input_precision="ieee")
    if bias_N is not None:
        sums += tl.load(bias_N + n_B, mask=n_B < N, other=0.0).to(tl.float32)[None, :]
    _store(sums, residual_MN, y_MN, m_B, n_B, M, N, stride_y)


@triton.jit(do_not_specialize=["M", "stride_s"])
def _linear_fp8(
    codes_MK, scales_GM, w_NK, scale_BB, residual_MN, y_MN, M, N, stride_s, stride_y,
    K: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BAND: constexpr, STAGES: constexpr,
    PDL: constexpr,
):  # fmt: skip
    first_m, first_n = tile_origin(M, N, BLOCK_M, BLOCK_N, BAND)
    m_B, n_B, k_B = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N), tl.arange(0, 128)
    rows = m_B < M
    x_ptr = codes_MK + m_B.to(tl.int64)[:, None] * K + k_B[None, :]
    w_ptr = w_NK + tl.where(n_B < N, n_B, 0).to(tl.int64)[:, None] * K + k_B[None, :]
    scale_ptr = scale_BB + (first_n // 128) * (K // 128)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    pdl_wait(PDL)
    pdl_launch(PDL)
    for group in tl.range(0, K // 128, num_stages=STAGES):
        x, w = tl.load(x_ptr + group * 128, mask=rows[:, None], other=0.0), tl.load(w_ptr + group * 128)
        step = tl.load(scales_GM + group * stride_s + m_B, mask=rows, other=0.0) * tl.load(scale_ptr + group)
        sums += tl.dot(x, w.T) * step[:, None]
    _store(sums, residual_MN, y_MN, m_B, n_B, M, N, stride_y)
