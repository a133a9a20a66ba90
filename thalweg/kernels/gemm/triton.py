"""Few-row GEMM for decode: y = x Wᵀ, the weight read once at the speed of memory, whatever the number of rows up to 64.

Floor: N · K bytes (FP8) or 2 · N · K (bf16) over the read bandwidth; V2-Lite's fused projection (3648 × 2048 bf16, 15 MB) 4.8 µs on an
H100, V3's (2112 × 7168 FP8, 15 MB) the same. A block owns BLOCK_N rows of the weight and walks all of K, so that nothing is summed
across blocks and a row's result depends on nothing but the row; BLOCK_N is chosen to give every multiprocessor a block or two.
FP8: the weight's codes become bf16 in registers and activations stay bf16: quantizing them would cost each block more than it saves where
the weight's bytes are all that counts, and precision besides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # beyond it a library's GEMM wins
GROUP = 128


@triton.jit
def _linear(
    x_MK, w_NK, bias_N, residual_MN, y_MN, M, N, stride_x, stride_y, stride_r,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_B = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_B = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k_B = tl.arange(0, BLOCK_K)
    rows, columns = m_B < M, n_B < N
    w_ptr = w_NK + tl.where(columns, n_B, 0).to(tl.int64)[:, None] * K + k_B[None, :]
    x_ptr = x_MK + tl.where(rows, m_B, 0)[:, None] * stride_x + k_B[None, :]
    if K % BLOCK_K == 0:
        # weights depend on nothing in the step: the first are under way while the kernel before this one ends
        w = tl.load(w_ptr, eviction_policy="evict_first")
        if PDL:
            tl.extra.cuda.gdc_wait()
        sums = tl.dot(tl.load(x_ptr), w.T)
        for start in range(BLOCK_K, K, BLOCK_K):
            w = tl.load(w_ptr + start, eviction_policy="evict_first")
            sums = tl.dot(tl.load(x_ptr + start), w.T, sums)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = start + k_B < K
            w = tl.load(w_ptr + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + start, mask=inside[None, :], other=0.0)
            sums = tl.dot(x, w.T, sums)
    if BIAS:
        sums += tl.load(bias_N + n_B, mask=columns, other=0.0).to(tl.float32)[None, :]
    inside = rows[:, None] & columns[None, :]
    if RESIDUAL:
        r = tl.load(residual_MN + m_B[:, None] * stride_r + n_B[None, :], mask=inside, other=0.0)
        sums += r.to(tl.float32)
    tl.store(y_MN + m_B.to(tl.int64)[:, None] * stride_y + n_B[None, :], sums.to(y_MN.dtype.element_ty), mask=inside)


@triton.jit
def _linear_fp8(
    x_MK, w_NK, scale_BB, residual_MN, y_MN, M, N, stride_x, stride_y, stride_r,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_B = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_B = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k_B = tl.arange(0, 128)
    rows, columns = m_B < M, n_B < N
    w_ptr = w_NK + tl.where(columns, n_B, 0).to(tl.int64)[:, None] * K + k_B[None, :]
    x_ptr = x_MK + tl.where(rows, m_B, 0)[:, None] * stride_x + k_B[None, :]
    scale_ptr = scale_BB + (tl.program_id(0) * BLOCK_N // 128) * (K // 128)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for group in range(K // 128):
        w = tl.load(w_ptr + group * 128, eviction_policy="evict_first").to(x_MK.dtype.element_ty)
        x = tl.load(x_ptr + group * 128)
        sums += tl.dot(x, w.T) * tl.load(scale_ptr + group)
    inside = rows[:, None] & columns[None, :]
    if RESIDUAL:
        r = tl.load(residual_MN + m_B[:, None] * stride_r + n_B[None, :], mask=inside, other=0.0)
        sums += r.to(tl.float32)
    tl.store(y_MN + m_B.to(tl.int64)[:, None] * stride_y + n_B[None, :], sums.to(y_MN.dtype.element_ty), mask=inside)


def wins(m: int, n: int) -> bool:
    """Whether this kernel is faster than the library's for a bf16 weight of n rows: from 16 thousand on (measured on an H100)."""
    return m <= ROWS and n >= 16384


def tiles(m: int, n: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), the fastest of those tried on an H100 (benchmarks/gpu/gemm.py)."""
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    if itemsize == 2:
        if block_m == 16:
            return (16, 32, 512, 4, 3) if n >= 65536 else (16, 64, 128, 4, 4)
        return block_m, 32, 128, 4, 4
    block_n = 16 if n <= 132 * 24 else 32 if n <= 132 * 96 else 64
    return block_m, block_n, 128, 4, {16: 10, 32: 8, 64: 5}[block_n]


def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y [M, N] in `dtype` (default x's), M ≤ 64. x, w: bf16. residual_MN: added, and written: the result is then the residual itself."""
    (m, k), n = x_MK.shape, len(w_NK)
    y = torch.empty(m, n, dtype=dtype or x_MK.dtype, device=x_MK.device) if residual_MN is None else residual_MN
    block_m, block_n, block_k, warps, stages = tiles(m, n, 2)
    _linear[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
        x_MK, w_NK, bias_N, residual_MN, y, m, n, x_MK.stride(0), y.stride(0), y.stride(0), k, block_m, block_n, block_k,
        bias_N is not None, residual_MN is not None, True, num_warps=warps, num_stages=stages, launch_pdl=True,
    )  # fmt: skip
    return y


def linear_fp8(x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None) -> Tensor:
    """y [M, N] bf16, M ≤ 64. w: e4m3 [N, K], scale float32 [ceil(N / 128), K / 128]. residual_MN: as in `linear`."""
    (m, k), n = x_MK.shape, len(w_NK)
    y = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device) if residual_MN is None else residual_MN
    block_m, block_n, _, warps, stages = tiles(m, n, 1)
    _linear_fp8[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
        x_MK, w_NK, scale_BB, residual_MN, y, m, n, x_MK.stride(0), y.stride(0), y.stride(0), k, block_m, block_n,
        residual_MN is not None, True, num_warps=warps, num_stages=stages, launch_pdl=True,
    )  # fmt: skip
    return y


@triton.jit
def _matmul_fp8(
    x_MK, sx_MG, w_NK, scale_BB, y_MN, M, N, stride_sx,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # blocks that share rows of x run together, so that both operands stay in L2
    across, down = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    band = tl.program_id(0) // (GROUP_M * across)
    height = min(down - band * GROUP_M, GROUP_M)
    inside_band = tl.program_id(0) % (GROUP_M * across)
    m_B = (band * GROUP_M + inside_band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = (inside_band // height) * BLOCK_N
    n_B, k_B = first_n + tl.arange(0, BLOCK_N), tl.arange(0, 128)
    rows = tl.where(m_B < M, m_B, 0)
    x_ptr = x_MK + rows.to(tl.int64)[:, None] * K + k_B[None, :]
    w_ptr = w_NK + tl.where(n_B < N, n_B, 0).to(tl.int64)[:, None] * K + k_B[None, :]
    scale_ptr = scale_BB + (first_n // 128) * (K // 128)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for group in range(K // 128):
        x, w = tl.load(x_ptr + group * 128), tl.load(w_ptr + group * 128)
        step = tl.load(sx_MG + rows + group * stride_sx) * tl.load(scale_ptr + group)
        sums += tl.dot(x, w.T) * step[:, None]
    inside = (m_B < M)[:, None] & (n_B < N)[None, :]
    tl.store(y_MN + m_B.to(tl.int64)[:, None] * N + n_B[None, :], sums.to(y_MN.dtype.element_ty), mask=inside)


def matmul_fp8(codes_MK: Tensor, scales_MG: Tensor, w_NK: Tensor, scale_BB: Tensor, y_MN: Tensor) -> Tensor:
    """y = x Wᵀ for many rows. codes e4m3 [M, K] with multipliers float32 [M, K / 128] of strides (1, any); w, scale: as in `linear_fp8`."""
    (m, k), n = codes_MK.shape, len(w_NK)
    block_m, block_n = (64, 128) if m <= 256 else (128, 128)
    _matmul_fp8[(triton.cdiv(n, block_n) * triton.cdiv(m, block_m),)](
        codes_MK, scales_MG, w_NK, scale_BB, y_MN, m, n, scales_MG.stride(1), k, block_m, block_n, 8, True,
        num_warps=8 if block_m == 128 else 4, num_stages=4, launch_pdl=True,
    )  # fmt: skip
    return y_MN
