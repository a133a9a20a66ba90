"""Rows to e4m3 with one float32 scale for each row and 128 channels (DeepSeek-V3 report §3.3.2): q = x / s, s =
max(|x|, 1e-4) / 448.

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


@triton.jit
def encode(x_R128):
    """float32 [R, 128] → e4m3 [R, 128] and scales [R]. Both quotients are rounded as IEEE does, by a reciprocal and one
    correction (Markstein), so that codes are the reference's at a third of a division's instructions: kernels that
    quantize their inputs do it in their inner loop.
    """
    largest_R = tl.maximum(tl.max(tl.abs(x_R128), 1), FLOOR)
    scale_R = quotient(largest_R, 1.0 / LARGEST, LARGEST)
    about_R = 1.0 / scale_R
    inverse_R = tl.fma(tl.fma(-scale_R, about_R, tl.zeros_like(about_R) + 1.0), about_R, about_R)
    # at most 448 (1 + 2^-23), which rounds to 448: nothing to clamp
    return quotient(x_R128, inverse_R[:, None], scale_R[:, None]).to(tl.float8e4nv), scale_R


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
