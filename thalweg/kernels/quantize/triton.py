"""Rows to e4m3 with one float32 scale for each row and 128 channels (DeepSeek-V3 report §3.3.2): q = x / s, s =
max(|x|, 1e-4) / 448; or to e4m3 or INT8 with a scale for each row or group (`quantize_rows`).

Scales are MN-major: shape [M, K / 128], strides (1, M rounded up to 4), which is what DeepGEMM takes without a kernel
of its own. Floor: 3.03 bytes an element; [8192, 7168] moves 178 MB, 57 µs at 3.1 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.launch import launch_config
from thalweg.kernels.pdl import pdl_launch, pdl_wait

GROUP = 128
FLOOR, LARGEST = tl.constexpr(1e-4), tl.constexpr(448.0)  # as in fp8_block/ref.py
ROWS = 16  # of a program: 4 KB in, one scale a row; enough programs from one row on (K / 128 of them)


def scales_like(rows: int, columns: int, device: torch.device) -> Tensor:
    """Room for the scales of [rows, columns]: float32 [rows, columns / 128], strides (1, rows rounded up to 4)."""
    return torch.empty(columns // GROUP, -(-rows // 4) * 4, dtype=torch.float32, device=device)[:, :rows].t()


def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """→ e4m3 [M, K] and float32 scales [M, K / 128], MN-major. x_MK: bf16 (or float16, float32), contiguous rows; K a
    multiple of 128.
    """
    rows, columns = x_MK.shape
    codes, scales = torch.empty_like(x_MK, dtype=torch.float8_e4m3fn), scales_like(rows, columns, x_MK.device)
    if rows:
        groups = columns // GROUP
        # one axis: rows beyond 65,535 blocks do not fit the others
        _quantize[(groups * triton.cdiv(rows, ROWS),)](
            codes, scales, x_MK, rows, x_MK.stride(0), codes.stride(0), scales.stride(1), groups, ROWS,
            **launch_config(x_MK, 4),
        )  # fmt: skip
    return codes, scales


def quantize_rows(x_MK: Tensor, kind: str, group: int = 0, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """→ codes [M, K], e4m3 or int8, and float32 scales [M, K / group]; see `ref.rounded_rows`. x_MK: rows with any
    stride. inputs: contiguous.
    """
    rows, columns = x_MK.shape
    codes_MK = torch.empty(x_MK.shape, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn, device=x_MK.device)
    scales_MG = torch.empty(rows, columns // group if group else 1, dtype=torch.float32, device=x_MK.device)
    block, count = triton.next_power_of_2(columns), 0 if inputs is None else inputs.numel()
    if rows:
        _quantize_rows[(rows,)](
            codes_MK, scales_MG, x_MK, inputs, x_MK.stride(0), columns, group or block, block, count,
            triton.next_power_of_2(max(count, 1)), kind == "int8",
            **launch_config(x_MK, 16 if block > 16384 else 8 if block >= 4096 else 4),
        )  # fmt: skip
    return codes_MK, scales_MG


@triton.jit
def encode(x_R128):
    """float32 [R, 128] → e4m3 [R, 128] and scales [R]. Both quotients are rounded as IEEE does, by a reciprocal and one
    correction (Markstein), so that codes are the reference's at a third of a division's instructions: kernels that
    quantize their inputs do it in their inner loop.
    """
    largest_R = tl.maximum(tl.max(tl.abs(x_R128), 1), FLOOR)
    scale_R = quotient(largest_R, 1.0 / LARGEST, LARGEST)
    # at most 448 (1 + 2^-23), which rounds to 448: nothing to clamp
    return _divided(x_R128, scale_R).to(tl.float8e4nv), scale_R


@triton.jit
def _divided(x_RC, scale_R):
    """x / scale, correctly rounded."""
    about_R = 1.0 / scale_R
    inverse_R = tl.fma(tl.fma(-scale_R, about_R, tl.zeros_like(about_R) + 1.0), about_R, about_R)
    return quotient(x_RC, inverse_R[:, None], scale_R[:, None])


@triton.jit
def quotient(x, inverse, divisor):
    """x / divisor, correctly rounded if inverse is the correctly rounded 1 / divisor."""
    q = x * inverse
    return tl.fma(tl.fma(-q, tl.zeros_like(x) + divisor, x), tl.zeros_like(x) + inverse, q)


@triton.jit(do_not_specialize=["rows", "scales_stride"])
def _quantize(
    codes_MK, scales_GM, x_MK, rows, x_stride, codes_stride, scales_stride, groups, ROWS: constexpr, PDL: constexpr
):  # fmt: skip
    group, block = tl.program_id(0) % groups, tl.program_id(0) // groups
    row = block * ROWS + tl.arange(0, ROWS)
    column = group * 128 + tl.arange(0, 128)
    live = row < rows
    pdl_wait(PDL)
    pdl_launch(PDL)
    x = tl.load(x_MK + row[:, None].to(tl.int64) * x_stride + column[None, :], mask=live[:, None], other=0.0)
    codes, scale = encode(x.to(tl.float32))
    tl.store(codes_MK + row[:, None].to(tl.int64) * codes_stride + column[None, :], codes, mask=live[:, None])
    tl.store(scales_GM + group * scales_stride + row, scale, mask=live)


@triton.jit
def _quantize_rows(
    codes_MK, scales_MG, x_MK, inputs, x_stride,
    K: constexpr, GROUP: constexpr, BLOCK: constexpr, COUNT: constexpr, INPUTS: constexpr, IS_INT8: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """One row. GROUP divides BLOCK, of which K columns are used."""
    LIMIT: constexpr = 127.0 if IS_INT8 else 448.0
    LEAST: constexpr = 1e-10 if IS_INT8 else 1e-4
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // GROUP)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    pdl_wait(PDL)
    pdl_launch(PDL)
    x = tl.load(x_MK + row * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
    if inputs is None:
        scale_G = quotient(tl.maximum(tl.max(tl.abs(x), 1), LEAST), 1.0 / LIMIT, LIMIT)
    else:
        e = tl.arange(0, INPUTS)
        scale_G = tl.zeros([BLOCK // GROUP], tl.float32) + tl.max(tl.load(inputs + e, mask=e < COUNT, other=0.0))
    is_broken_G = tl.max(tl.where(x == x, 0, 1), 1) > 0  # a NaN, which has no INT8 code, makes the scale one
    x = tl.minimum(tl.maximum(_divided(x, scale_G), -LIMIT), LIMIT)
    scale_G = tl.where(is_broken_G, float("nan"), scale_G)
    if IS_INT8:
        # adding 1.5 · 2^23 leaves no bits behind the point, and rounds as IEEE does
        codes = (x + 12582912.0 - 12582912.0).to(tl.int8)
    else:
        codes = x.to(tl.float8e4nv)
    tl.store(codes_MK + row * K + column, codes, mask=column < K)
    tl.store(scales_MG + row * (K // GROUP if GROUP < K else 1) + group, scale_G, mask=group * GROUP < K)
