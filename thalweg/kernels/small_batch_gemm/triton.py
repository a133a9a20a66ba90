"""bf16 products of 9 to 128 rows that read a weight at the speed of memory, on a Hopper's tensor cores: SwiGLU's gate
and up projection with its activation in one launch, heads, and split-K projections back from the inner width.

Floor: 2 · N · K bytes of weights over the read bandwidth. Qwen2.5-7B on an H100, 64 rows: gate and up (37,888 × 3,584,
272 MB, floor 87 µs) 96 µs, cuBLAS with `silu_mul` 107; the head (152,064 × 3,584, floor 350) 387, cuBLAS 410; down
(3,584 × 18,944, floor 44) 53, cuBLAS 55.

A program owns `big + small` columns of the result, or as many pairs of gate and up, and all of K. TMA loads gate and up
rows as one box of three dims, [2, columns, K], which is one operand of one product. Each multiprocessor takes one
program, and the last wave should be full, so a program's width is a sum of two powers of two (18,944 = 263 · 72 + 8:
two waves). Steps of 128 columns of K read 256 neighbouring bytes of a row. From some 128 rows on a library wins, whose
multiprocessors share what they read: x comes from L2 too often here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue
from thalweg.kernels.launch import SMS, has_tma, launch_config
from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.silu_mul.triton import gated

FEWEST, FEW, MOST = 9, 64, 128  # rows for which they are the fastest, and that one instruction multiplies
PAIRED, HEAD = 16384, 65536  # rows of the least weights that fill the machine
WIDTHS = ((64, 0), (64, 8), (64, 16), (32, 16), (64, 32))  # of a program with pairs


@triton.jit
def _joined(sums, dtype: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """silu(gate) · up of [ROWS, 2 COLUMNS], gates first, of rounded numbers as `silu_mul` computes it."""
    rounded = sums.to(dtype).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(rounded, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    return gated(gate, up)


@triton.jit(do_not_specialize=["M"])
def _small_batch_gemm(
    x, w_big, w_small, y_MN, M, N,
    K: constexpr, BLOCK_M: constexpr, BIG: constexpr, SMALL: constexpr, BLOCK_K: constexpr,
    STAGES: constexpr, PAIRS: constexpr, PDL: constexpr,
):  # fmt: skip
    """y [M, N]. PAIRS: the weight is [2, N, K], gate rows first."""
    pdl_launch(PDL)
    pdl_wait(PDL)
    FOLD: constexpr = 2 if PAIRS else 1
    first, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * (BIG + SMALL)
    row = first + tl.arange(0, BLOCK_M)
    big = tl.zeros((BLOCK_M, FOLD * BIG), tl.float32)
    if SMALL:
        small = tl.zeros((BLOCK_M, FOLD * SMALL), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        rows = x.load([first, k])
        if PAIRS:
            big = tl.dot(rows, w_big.load([0, column, k]).reshape(2 * BIG, BLOCK_K).T, big)
            if SMALL:
                small = tl.dot(rows, w_small.load([0, column + BIG, k]).reshape(2 * SMALL, BLOCK_K).T, small)
        else:
            big = tl.dot(rows, w_big.load([column, k]).T, big)
            if SMALL:
                small = tl.dot(rows, w_small.load([column + BIG, k]).T, small)
    to = y_MN + row.to(tl.int64)[:, None] * N
    n_B = column + tl.arange(0, BIG)
    y = _joined(big, y_MN.dtype.element_ty, BLOCK_M, BIG) if PAIRS else big
    tl.store(to + n_B[None, :], y.to(y_MN.dtype.element_ty), mask=(row < M)[:, None] & (n_B < N)[None, :])
    if SMALL:
        n_S = column + BIG + tl.arange(0, SMALL)
        z = _joined(small, y_MN.dtype.element_ty, BLOCK_M, SMALL) if PAIRS else small
        tl.store(to + n_S[None, :], z.to(y_MN.dtype.element_ty), mask=(row < M)[:, None] & (n_S < N)[None, :])


class SmallBatchTile(NamedTuple):
    """Rows of x, columns of the result in two parts, columns of K a step, stages of the pipeline, warps."""

    rows: int
    big: int
    small: int
    k: int
    stages: int
    warps: int


class SplitKTile(NamedTuple):
    """Rows of x, columns of the result in three parts, parts of K, columns of K a step, stages of the pipeline,
    warps.
    """

    rows: int
    widths: tuple[int, int, int]
    parts: int
    k: int
    stages: int
    warps: int


SPLIT_K = SplitKTile(64, (64, 32, 16), 4, 128, 4, 4)  # the fastest of those tried on an H100


def tile(m: int, n: int, pairs: bool) -> SmallBatchTile:
    """The fastest of those tried on an H100. n: columns of the result."""
    if not pairs:
        return SmallBatchTile(64, 128, 16, 128, 3, 4) if m <= FEW else SmallBatchTile(128, 128, 0, 128, 3, 8)
    big, small = min(WIDTHS, key=lambda width: _waste(n, sum(width)))
    return (
        SmallBatchTile(64, big, small, 128, 4 if 2 * (big + small) <= 144 else 3, 4)
        if m <= FEW
        else SmallBatchTile(128, big, small, 64, 5 if big + small <= 80 else 4, 4)
    )


def _waste(n: int, width: int) -> float:
    """Columns that whole waves of such programs compute, over n. Of equal widths the wider reads x less often."""
    return -(-n // width // SMS) * SMS * width / n - width * 1e-6


def swiglu_fits(m: int, w_NK: Tensor) -> bool:
    """Whether `swiglu` is faster than a library's product and `silu_mul` for m rows of x. w: gate and up rows."""
    n, k = w_NK.shape
    return FEWEST <= m <= MOST and n >= PAIRED and n % 16 == 0 and k % 128 == 0 and has_tma(w_NK)


def linear_fits(m: int, w_NK: Tensor) -> bool:
    """Whether `linear` is faster than a library's product."""
    n, k = w_NK.shape
    return FEWEST <= m <= MOST and n >= HEAD and k % 128 == 0 and has_tma(w_NK)


def split_k_fits(m: int, w_NK: Tensor) -> bool:
    """Whether `split_k` is faster than a library's product: few columns, K so long that a part of it is long, and a
    wave of programs.
    """
    n, k = w_NK.shape
    shape = SPLIT_K
    wave = 100 <= shape.parts * triton.cdiv(n, sum(shape.widths)) <= SMS
    return FEWEST <= m <= FEW and wave and k >= 4 * n and k % 128 == 0 and has_tma(w_NK)


def swiglu(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """silu(gate) · up → [M, N / 2] bf16. x: bf16, its address and stride multiples of 16 bytes. w: bf16, contiguous, N
    / 2 gate rows, then as many up rows. Where `swiglu_fits`.
    """
    inner = len(w_NK) // 2
    y = torch.empty(len(x_MK), inner, dtype=x_MK.dtype, device=x_MK.device)
    return _launch(x_MK, w_NK.view(2, inner, -1), y, True)


def linear(x_MK: Tensor, w_NK: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """x Wᵀ → [M, N], without bias and residual. x, w: as in `swiglu`. Where `linear_fits`."""
    return _launch(x_MK, w_NK, epilogue.result(len(x_MK), len(w_NK), x_MK), False)


def _launch(x_MK: Tensor, w: Tensor, y_MN: Tensor, pairs: bool) -> Tensor:
    (m, n), k = y_MN.shape, x_MK.shape[1]
    shape = tile(m, n, pairs)
    lead = [2] if pairs else []
    _small_batch_gemm[(triton.cdiv(m, shape.rows), triton.cdiv(n, shape.big + shape.small))](
        TensorDescriptor.from_tensor(x_MK, [shape.rows, shape.k]),
        TensorDescriptor.from_tensor(w, [*lead, shape.big, shape.k]),
        TensorDescriptor.from_tensor(w, [*lead, shape.small or shape.big, shape.k]),
        y_MN, m, n, k, shape.rows, shape.big, shape.small, shape.k, shape.stages, pairs,
        **launch_config(x_MK, shape.warps, shape.stages),
    )  # fmt: skip
    return y_MN


@triton.jit(do_not_specialize=["M"])
def _split_k_gemm(
    x, w_A, w_B, w_C, part_SMN, M, N, steps,
    K: constexpr, BLOCK_M: constexpr, A: constexpr, B: constexpr, C: constexpr, BLOCK_K: constexpr,
    STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (b, s): A + B + C columns of the sum over the s-th part of K, `steps` steps long."""
    pdl_launch(PDL)
    pdl_wait(PDL)
    column, part, row = tl.program_id(0) * (A + B + C), tl.program_id(1), tl.arange(0, BLOCK_M)
    a, b, c = tl.zeros((BLOCK_M, A), tl.float32), tl.zeros((BLOCK_M, B), tl.float32), tl.zeros((BLOCK_M, C), tl.float32)
    for k in tl.range(part * steps * BLOCK_K, tl.minimum((part + 1) * steps * BLOCK_K, K), BLOCK_K, num_stages=STAGES):
        rows = x.load([0, k])
        a = tl.dot(rows, w_A.load([column, k]).T, a)
        b = tl.dot(rows, w_B.load([column + A, k]).T, b)
        c = tl.dot(rows, w_C.load([column + A + B, k]).T, c)
    to = part_SMN + (part.to(tl.int64) * M + row.to(tl.int64))[:, None] * N + column
    live, left = (row < M)[:, None], N - column
    tl.store(to + tl.arange(0, A)[None, :], a, mask=live & (tl.arange(0, A) < left)[None, :])
    tl.store(to + A + tl.arange(0, B)[None, :], b, mask=live & (A + tl.arange(0, B) < left)[None, :])
    tl.store(to + A + B + tl.arange(0, C)[None, :], c, mask=live & (A + B + tl.arange(0, C) < left)[None, :])


@triton.jit
def _add_partials(part_SE, y_E, elements, PARTS: constexpr, BLOCK: constexpr, ACCUMULATE: constexpr, PDL: constexpr):
    """y = the sum of the parts, in float32; ACCUMULATE: y += it."""
    pdl_launch(PDL)
    pdl_wait(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < elements
    total = tl.zeros((BLOCK,), tl.float32)
    if ACCUMULATE:
        total = tl.load(y_E + at, mask=live, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_SE + part * elements + at, mask=live, other=0.0)
    tl.store(y_E + at, total.to(y_E.dtype.element_ty), mask=live)


def split_k(x_MK: Tensor, w_NK: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """x Wᵀ (+ residual) → [M, N] bf16, contiguous, without bias. x, w: as in `swiglu`. Where `split_k_fits`."""
    m, (n, k) = len(x_MK), w_NK.shape
    y = epilogue.result(m, n, x_MK)
    shape = SPLIT_K
    part = torch.empty(shape.parts, m, n, dtype=torch.float32, device=x_MK.device)
    _split_k_gemm[(triton.cdiv(n, sum(shape.widths)), shape.parts)](
        TensorDescriptor.from_tensor(x_MK, [shape.rows, shape.k]),
        *(TensorDescriptor.from_tensor(w_NK, [width, shape.k]) for width in shape.widths),
        part, m, n, triton.cdiv(k // shape.k, shape.parts), k, shape.rows, *shape.widths, shape.k, shape.stages,
        **launch_config(x_MK, shape.warps, shape.stages),
    )  # fmt: skip
    accumulate = epilogue.residual_MN is not None
    _add_partials[(triton.cdiv(m * n, 1024),)](
        part, y, m * n, shape.parts, 1024, accumulate, **launch_config(x_MK, 4, 3)
    )
    return y
