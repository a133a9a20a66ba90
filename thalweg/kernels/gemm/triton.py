"""GEMM with few rows, for decode: y = x Wᵀ, the weight read once at the speed of memory.

Floor: N · K bytes (FP8) or 2 · N · K (bf16) over the read bandwidth. V2-Lite's fused projection (3648 × 2048 bf16,
15 MB) is 4.8 µs on an H100, V3's (2112 × 7168 FP8, 15 MB) the same. A program owns BLOCK_N rows of the weight and all
of K: nothing is summed across programs, and a row's result depends on nothing but the row.

`gemv`, up to 16 rows. Weights depend on no kernel, so a program loads its first ones, for small K all of them, before
it waits for its predecessor. Only x is left on the critical path. A chain of dependent products over K would take
longer than the weights (K = 2048: 128 of 33 cycles), so K is cut into parts, one or more a warp, whose sums are added
at the end. One row is multiplied without tensor cores, and then nothing passes through shared memory. RMSNorm costs a
pass over x, which each program makes in any case: x times the norm's weight is multiplied, and the sum is scaled at the
end.

`linear` beyond 16 rows: a pipeline over K. FP8: codes become bf16 in registers and activations stay bf16. Quantizing
them would cost each program more than it saves where only the weight's bytes count, and precision besides.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue
from thalweg.kernels.launch import launch_config
from thalweg.kernels.norm.triton import LazyNorm, Rows, deferred_norm, rows_of
from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.silu_mul.triton import gated
from thalweg.kernels.tuned import TUNED

ROWS, GEMV_ROWS = 64, 16  # rows up to which `linear` and `gemv` serve; beyond them a library's GEMM wins
ROWS_FP8 = 32  # rows up to which `linear_fp8` serves
NORMED = 1  # rows up to which `gemv` computes a norm faster than a launch of its own
FEW = 512  # rows of a weight that leave most of the machine idle with tiles of 16
SOME, MANY = 24 * 132, 16384  # rows of a weight that are few, and that fill the machine whatever the tile
GROUP = 128


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_MK, w_NK, bias_N, residual_MN, y_MN, M, N, stride_x, stride_y, stride_r,
    K: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_launch(PDL)
    n_B = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_B = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k_B = tl.arange(0, BLOCK_K)
    rows, columns = m_B < M, n_B < N
    w_ptr = w_NK + tl.where(columns, n_B, 0).to(tl.int64)[:, None] * K + k_B[None, :]
    x_ptr = x_MK + tl.where(rows, m_B, 0)[:, None] * stride_x + k_B[None, :]
    # weights depend on nothing in the step: the first are loaded while the kernel before this one ends
    w = tl.load(w_ptr, eviction_policy="evict_first")
    pdl_wait(PDL)
    sums = tl.dot(tl.load(x_ptr), w.T)
    for start in range(BLOCK_K, K, BLOCK_K):
        w = tl.load(w_ptr + start, eviction_policy="evict_first")
        sums = tl.dot(tl.load(x_ptr + start), w.T, sums)
    if bias_N is not None:
        sums += tl.load(bias_N + n_B, mask=columns, other=0.0).to(tl.float32)[None, :]
    inside = rows[:, None] & columns[None, :]
    if residual_MN is not None:
        r = tl.load(residual_MN + m_B[:, None] * stride_r + n_B[None, :], mask=inside, other=0.0)
        sums += r.to(tl.float32)
    tl.store(y_MN + m_B.to(tl.int64)[:, None] * stride_y + n_B[None, :], sums.to(y_MN.dtype.element_ty), mask=inside)


@triton.jit
def _add_product(acc_PNM, square_M, w_PNC, x_ptr, norm_PC, scale_ptr, live_M, BLOCK_M: constexpr):
    """One step of K: adds the product of each part's columns, and the squares of x if there is a norm."""
    x_PMC = tl.load(x_ptr, mask=live_M[None, :, None], other=0.0)
    if norm_PC is not None:
        wide = x_PMC.to(tl.float32)
        square_M += tl.sum(tl.sum(wide * wide, 2), 0)
        x_PMC = (wide * norm_PC[:, None, :]).to(x_PMC.dtype)
    if BLOCK_M == 1:
        part = tl.sum(w_PNC.to(tl.float32) * x_PMC.to(tl.float32), 2)[:, :, None]
        if scale_ptr is not None:
            part *= tl.load(scale_ptr)[:, None, None]
        acc_PNM += part
    elif scale_ptr is None:
        acc_PNM = tl.dot(w_PNC, tl.permute(x_PMC, (0, 2, 1)), acc_PNM)
    else:
        # by way of float32: the direct cast takes an instruction of the slow kind for each element
        part = tl.dot(w_PNC.to(tl.float32).to(x_PMC.dtype), tl.permute(x_PMC, (0, 2, 1)))
        acc_PNM += part * tl.load(scale_ptr)[:, None, None]
    return acc_PNM, square_M


@triton.jit(do_not_specialize=["M"])
def _gemv(
    x_MK, w_NK, scale_BB, norm_K, bias_N, residual_MN, y_MN, M, N, stride_x, stride_y, eps,
    K: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, PARTS: constexpr, BLOCK_C: constexpr,
    AHEAD: constexpr, STAGES: constexpr, GATED: constexpr, PDL: constexpr,
):  # fmt: skip
    """y = norm(x) Wᵀ (+ bias) (+ residual) for BLOCK_N rows of the weight and all of K. GATED: half of them are gate
    rows, the others the up rows N / 2 further on, and y is silu(gate) · up of half as many columns.
    """
    pdl_launch(PDL)
    CHUNK: constexpr = PARTS * BLOCK_C
    LOOP: constexpr = K // CHUNK - AHEAD
    HALF: constexpr = BLOCK_N // 2
    n_B = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        n_B = tl.program_id(0) * HALF + tl.arange(0, BLOCK_N) % HALF + tl.arange(0, BLOCK_N) // HALF * (N // 2)
    m_B = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.arange(0, PARTS)
    k_PC = part[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    rows, columns = m_B < M, n_B < N
    w_ptr = w_NK + tl.where(columns, n_B, 0).to(tl.int64)[None, :, None] * K + k_PC[:, None, :]
    x_ptr = x_MK + tl.where(rows, m_B, 0)[None, :, None] * stride_x + k_PC[:, None, :]
    scale_ptr = None
    if scale_BB is not None:
        scale_ptr = scale_BB + (tl.program_id(0) * BLOCK_N // 128) * (K // 128) + part
    ahead, norms = (), ()
    for step in tl.static_range(AHEAD):
        at = (LOOP + step) * CHUNK
        ahead = ahead + (tl.load(w_ptr + at, eviction_policy="evict_first"),)  # type: ignore[assignment]
        if norm_K is not None:
            norms = norms + (tl.load(norm_K + at + k_PC),)  # type: ignore[assignment]
    pdl_wait(PDL)
    acc_PNM = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    square_M = tl.zeros((BLOCK_M,), tl.float32)
    for step in tl.range(0, LOOP, num_stages=STAGES):
        at = step * CHUNK
        w_PNC = tl.load(w_ptr + at, eviction_policy="evict_first")
        norm_PC = None if norm_K is None else tl.load(norm_K + at + k_PC)
        s_ptr = None if scale_BB is None else scale_ptr + step * PARTS
        acc_PNM, square_M = _add_product(acc_PNM, square_M, w_PNC, x_ptr + at, norm_PC, s_ptr, rows, BLOCK_M)
    for step in tl.static_range(AHEAD):
        norm_PC = None if norm_K is None else norms[step]
        s_ptr = None if scale_BB is None else scale_ptr + (LOOP + step) * PARTS
        acc_PNM, square_M = _add_product(
            acc_PNM, square_M, ahead[step], x_ptr + (LOOP + step) * CHUNK, norm_PC, s_ptr, rows, BLOCK_M
        )
    sums = tl.sum(acc_PNM, 0)
    if norm_K is not None:
        sums *= tl.rsqrt(square_M / K + eps)[None, :]
    inside = columns[:, None] & rows[None, :]
    if bias_N is not None:
        sums += tl.load(bias_N + n_B, mask=columns, other=0.0).to(tl.float32)[:, None]
    if GATED:
        rounded = sums.to(y_MN.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(rounded, (2, HALF, BLOCK_M)), (1, 2, 0)))
        sums, n_B = gated(gate, up), tl.program_id(0) * HALF + tl.arange(0, HALF)
        inside = (n_B < N // 2)[:, None] & rows[None, :]
    if residual_MN is not None:
        sums += tl.load(residual_MN + m_B[None, :] * stride_y + n_B[:, None], mask=inside, other=0.0).to(tl.float32)
    at = y_MN + m_B.to(tl.int64)[None, :] * stride_y + n_B[:, None]
    tl.store(at, sums.to(y_MN.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The tile of one program of `gemv`."""

    m: int  # rows of x
    n: int  # rows of the weight
    parts: int  # pieces of one step of K, one or more a warp
    columns: int  # of K, of each piece
    ahead: int  # last steps whose weights are loaded before the kernel waits for its predecessor
    stages: int  # of the pipeline of the other steps
    warps: int


def gemv_tile(m: int, n: int, k: int, itemsize: int, normed: bool = False) -> GemvTile | None:
    """The tile that `thalweg tune` found for this weight, or else `tabled`; None where `gemv` does not serve."""
    tile = tabled(m, n, k, itemsize, normed)
    return None if tile is None else TUNED.lookup("gemv", (n, k, itemsize, int(normed)), tile)


def tabled(m: int, n: int, k: int, itemsize: int, normed: bool = False) -> GemvTile | None:
    """The fastest of those tried on an H100 (benchmarks/gpu/decode_kernels.py)."""
    if itemsize == 1:
        return _fp8_tile(m, n, k, normed) if m <= ROWS_FP8 and k % GROUP == 0 else None
    if m > GEMV_ROWS or k % 512 or k < 1024 or m > 8 and n >= MANY:
        return None
    rows = 8 if m <= 8 else 16
    if n >= MANY:
        if m == 1 and k % 1024 == 0 and k <= 8192:
            return GemvTile(1, 4, 8, 128, k // 1024, 1, 8)
        if m == 1 and k <= 4096:
            return GemvTile(1, 4, 4, 128, k // 512, 1, 4) if n >= 4 * MANY else GemvTile(1, 4, 4, 128, 3, 3, 4)
        return GemvTile(rows, 32, 4, 128, 1, 3, 4)
    if k % 1024 == 0 and k <= 2048:
        return GemvTile(1 if normed and m == 1 else rows, 16, 4, 256, k // 1024, 1, 4)
    if n <= FEW and k % 1024 == 0 and k <= 8192:  # an index key of DeepSeek-V3.2: 128 rows, 21 us by 8 programs (H200)
        return GemvTile(1, 4, 8, 128, k // 1024, 1, 8) if m == 1 else GemvTile(rows, 16, 8, 128, 2, 3, 8)
    if m == 1 and k <= 4096:  # no tensor cores: 5.4 us less of a layer of Qwen2.5-7B after a norm, 1.4 otherwise
        return GemvTile(1, 16, 4, 128, 2 if normed else 1, 3, 4)
    return GemvTile(rows, 16, 4, 128, 2, 3, 4)


def _fp8_tile(m: int, n: int, k: int, normed: bool) -> GemvTile:
    steps = k // 1024
    if k % 512:
        return GemvTile(32 if m > GEMV_ROWS else 16 if m > 8 else 8, 32, 1, 128, 0, 4, 4)
    if m > GEMV_ROWS:
        return GemvTile(32, 16, 4, 128, 1, 3, 4)
    if m > 8:
        if n <= SOME and k % 1024 == 0:
            return GemvTile(16, 16, 8, 128, 1, 4, 8)
        return GemvTile(16, 64, 4, 128, 1, 3, 4) if n >= MANY and k <= 2048 else GemvTile(16, 32, 4, 128, 1, 4, 4)
    if m == 1 and n >= MANY and k <= 2048:
        return GemvTile(1, 8, 4, 128, k // 512, 1, 4)
    if m == 1 and n >= MANY and k % 1024 == 0 and k <= 8192:
        return GemvTile(1, 4, 8, 128, steps, 1, 8)
    if m == 1 and normed:
        return GemvTile(1, 8, 8, 128, min(2, steps), 3, 8) if k % 1024 == 0 else GemvTile(1, 16, 4, 128, 1, 3, 4)
    if n <= SOME and k % 1024 == 0:
        return GemvTile(8, 16, 8, 128, 0, 5, 8)
    return GemvTile(8, 32, 4, 128, 1, 4, 4) if m > 1 and n >= MANY and k > 2048 else GemvTile(8, 16, 4, 128, 1, 3, 4)


def is_faster(m: int, n: int, k: int) -> bool:
    """Whether `linear` is faster than the library for a bf16 weight (measured on an H100)."""
    return gemv_tile(m, n, k, 2) is not None or m <= 32 and n >= 4 * MANY and k % GROUP == 0


def linear(x: Rows, w_NK: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """y [M, N], M ≤ 64. x, w: bf16, K a multiple of 128."""
    x, tile = _tiled(x, w_NK)
    if tile is not None:
        return gemv(x, w_NK, tile, epilogue=epilogue)
    x_MK, (n, k) = rows_of(x), w_NK.shape
    m = len(x_MK)
    y = epilogue.result(m, n, x_MK)
    block_m, block_n = 32 if m <= 32 else 64, 32  # the fastest of those tried on an H100
    _linear[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
        x_MK, w_NK, epilogue.bias_N, epilogue.residual_MN, y, m, n, x_MK.stride(0), y.stride(0), y.stride(0),
        k, block_m, block_n, GROUP, **launch_config(x_MK, 4, 4),
    )  # fmt: skip
    return y


def computes_norm(m: int, n: int) -> bool:
    """Whether `linear` and `linear_fp8` of a weight of n rows compute a norm of m rows themselves. It is computed first
    where each of many programs, or of many rows, would compute it.
    """
    return n < MANY and m <= NORMED


def _tiled(x: Rows, w_NK: Tensor) -> tuple[Rows, GemvTile | None]:
    """x and its tile."""
    n, k = w_NK.shape
    x = x if computes_norm(len(x), n) else rows_of(x)
    return x, gemv_tile(len(x), n, k, w_NK.itemsize, isinstance(x, LazyNorm))


def can_fuse_swiglu(m: int, n: int, k: int) -> bool:
    """Whether `swiglu` serves a bf16 weight of n rows."""
    return gemv_tile(m, n, k, 2) is not None


def swiglu(x: Rows, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """silu(gate) · up [M, N / 2] of x Wᵀ (+ b), whose first N / 2 columns are the gates, in one launch. Where
    `can_fuse_swiglu`.
    """
    x, tile = _tiled(x, w_NK)
    assert tile is not None, "`can_fuse_swiglu` is false"
    return gemv(x, w_NK, tile, epilogue=Epilogue(bias_N), swiglu=True)


def linear_fp8(x: Rows, w_NK: Tensor, scale_BB: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """y [M, N] bf16, M ≤ 32. w: e4m3 [N, K], K a multiple of 128, scale float32 [ceil(N / 128), K / 128]."""
    x, tile = _tiled(x, w_NK)
    if tile is None:
        inner = w_NK.shape[1]
        raise ValueError(
            f"linear_fp8 takes up to {ROWS_FP8} rows of a multiple of {GROUP} columns, not {len(x)} of {inner}"
        )
    return gemv(x, w_NK, tile, scale_BB, epilogue)


def gemv(
    x: Rows,
    w_NK: Tensor,
    tile: GemvTile,
    scale_BB: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    swiglu: bool = False,
) -> Tensor:
    """y [M, N] = x Wᵀ. x: bf16, or a norm of such, which is computed as it is read. w: bf16, or e4m3 with scale
    float32 [ceil(N / 128), K / 128]; K a multiple of parts · columns. swiglu: w, bf16, has gate rows, then as many up
    rows, and y [M, N / 2] is silu(gate) · up, as `silu_mul` computes it from bf16.
    """
    assert scale_BB is None or not swiglu, "SwiGLU is fused with bf16 weights only"
    x_MK, norm_K, eps = deferred_norm(x)
    (m, k), n = x_MK.shape, len(w_NK)
    y = epilogue.result(m, n // 2 if swiglu else n, x_MK)
    _gemv[(triton.cdiv(n, tile.n), triton.cdiv(m, tile.m))](
        x_MK, w_NK, scale_BB, norm_K, epilogue.bias_N, epilogue.residual_MN, y, m, n, x_MK.stride(0), y.stride(0), eps,
        k, tile.m, tile.n, tile.parts, tile.columns, tile.ahead, tile.stages, swiglu,
        **launch_config(x_MK, tile.warps, tile.stages),
    )  # fmt: skip
    return y


@triton.jit
def tile_origin(M, N, BLOCK_M: constexpr, BLOCK_N: constexpr, BAND: constexpr):
    """First row and column of this program's tile. Bands of BAND row blocks run together, columns slower, so that both
    operands stay in L2.
    """
    across, down = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    band = tl.program_id(0) // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    inside = tl.program_id(0) % (BAND * across)
    return (band * BAND + inside % height) * BLOCK_M, inside // height * BLOCK_N


@triton.jit(do_not_specialize=["M", "stride_sx"])
def _matmul_fp8(
    x_MK, sx_MG, w_NK, scale_BB, y_MN, M, N, stride_sx,
    K: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BAND: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_launch(PDL)
    first_m, first_n = tile_origin(M, N, BLOCK_M, BLOCK_N, BAND)
    m_B, n_B, k_B = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N), tl.arange(0, 128)
    rows = tl.where(m_B < M, m_B, 0)
    x_ptr = x_MK + rows.to(tl.int64)[:, None] * K + k_B[None, :]
    w_ptr = w_NK + tl.where(n_B < N, n_B, 0).to(tl.int64)[:, None] * K + k_B[None, :]
    scale_ptr = scale_BB + (first_n // 128) * (K // 128)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    pdl_wait(PDL)
    for group in range(K // 128):
        x, w = tl.load(x_ptr + group * 128), tl.load(w_ptr + group * 128)
        step = tl.load(sx_MG + rows + group * stride_sx) * tl.load(scale_ptr + group)
        sums += tl.dot(x, w.T) * step[:, None]
    inside = (m_B < M)[:, None] & (n_B < N)[None, :]
    tl.store(y_MN + m_B.to(tl.int64)[:, None] * N + n_B[None, :], sums.to(y_MN.dtype.element_ty), mask=inside)


def matmul_fp8(codes_MK: Tensor, scales_MG: Tensor, w_NK: Tensor, scale_BB: Tensor, y_MN: Tensor) -> Tensor:
    """y = x Wᵀ for many rows. codes e4m3 [M, K] with multipliers float32 [M, K / 128] of strides (1, any); w, scale:
    as in `linear_fp8`.
    """
    (m, k), n = codes_MK.shape, len(w_NK)
    block_m, block_n = (64, 128) if m <= 256 else (128, 128)
    _matmul_fp8[(triton.cdiv(n, block_n) * triton.cdiv(m, block_m),)](
        codes_MK, scales_MG, w_NK, scale_BB, y_MN, m, n, scales_MG.stride(1), k, block_m, block_n, 8,
        **launch_config(codes_MK, 8 if block_m == 128 else 4, 4),
    )  # fmt: skip
    return y_MN
