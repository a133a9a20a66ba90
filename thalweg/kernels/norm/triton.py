"""RMSNorm, one program a row; alone, or with its result in e4m3 for an FP8 product.

Floor: 2 · T · H bytes read, and as many written, or half as many for codes. At decode it is one launch, and quantizing
in it saves another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.launch import launch_config
from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.quantize.triton import GROUP, encode, quantize, scales_like


@triton.jit
def _normed_row(x_TH, weight_H, stride_x, eps, H: constexpr, BLOCK: constexpr, PDL: constexpr):
    """This program's row, its columns, and the normed numbers in float32."""
    pdl_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    h_B = tl.arange(0, BLOCK)
    inside = h_B < H
    weight = tl.load(weight_H + h_B, mask=inside, other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_TH + row * stride_x + h_B, mask=inside, other=0.0).to(tl.float32)
    return row, h_B, x * tl.rsqrt(tl.sum(x * x) / H + eps) * weight


@triton.jit
def _rms_norm(x_TH, weight_H, y_TH, stride_x, stride_y, eps, H: constexpr, BLOCK: constexpr, PDL: constexpr):
    row, h_B, y = _normed_row(x_TH, weight_H, stride_x, eps, H, BLOCK, PDL)
    tl.store(y_TH + row * stride_y + h_B, y.to(y_TH.dtype.element_ty), mask=h_B < H)


@triton.jit(do_not_specialize=["scales_stride"])
def _rms_norm_quantize(
    x_TH, weight_H, codes_TH, scales_GT, stride_x, scales_stride, eps,
    H: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    row, _, y = _normed_row(x_TH, weight_H, stride_x, eps, H, BLOCK, PDL)
    y = y.to(x_TH.dtype.element_ty)
    codes, scale = encode(tl.reshape(y, [BLOCK // 128, 128]).to(tl.float32))
    group = tl.arange(0, BLOCK // 128)
    live = group < H // 128
    tl.store(codes_TH + row * H + group[:, None] * 128 + tl.arange(0, 128)[None, :], codes, mask=live[:, None])
    tl.store(scales_GT + group.to(tl.int64) * scales_stride + row, scale, mask=live)


@dataclass(frozen=True, slots=True)
class LazyNorm:
    """RMSNorm of rows that is yet to be computed: a product with few rows computes it as it reads them, without a
    launch of its own.
    """

    x_TH: Tensor  # bf16, rows with any stride, not to change before they are read
    weight_H: Tensor  # float32
    eps: float

    def __len__(self) -> int:
        return len(self.x_TH)

    def rows(self) -> Tensor:
        """[T, H] in x's dtype."""
        return rms_norm(self.x_TH, self.weight_H, self.eps)

    def codes(self) -> tuple[Tensor, Tensor]:
        """The rows quantized; see `rms_norm_quantize`."""
        return rms_norm_quantize(self.x_TH, self.weight_H, self.eps)


def rows_of(x: Tensor | LazyNorm) -> Tensor:
    """The rows, computed if they have not been."""
    return x.rows() if isinstance(x, LazyNorm) else x


def codes_of(x: Tensor | LazyNorm) -> tuple[Tensor, Tensor]:
    """The rows in e4m3 with their scales; see `quantize`."""
    return x.codes() if isinstance(x, LazyNorm) else quantize(x)


def deferred_norm(x: Tensor | LazyNorm) -> tuple[Tensor, Tensor | None, float]:
    """The arguments of a kernel that computes the norm itself: rows, and weight and eps of the norm. The weight is None
    where the rows are final.
    """
    return (x.x_TH, x.weight_H, x.eps) if isinstance(x, LazyNorm) else (x, None, 0.0)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim, in x's dtype. x: rows with any stride. weight: float32."""
    rows, width = x_TH.shape
    y = torch.empty(rows, width, dtype=x_TH.dtype, device=x_TH.device)
    _rms_norm[(rows,)](x_TH, weight_H, y, x_TH.stride(0), y.stride(0), eps, width, **_config(x_TH))
    return y


def rms_norm_quantize(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`quantize` of `rms_norm`, bit by bit, in one launch: → e4m3 [T, H] and float32 scales [T, H / 128], MN-major. H:
    a multiple of 128.
    """
    rows, width = x_TH.shape
    if width % GROUP:
        raise ValueError(f"rms_norm_quantize takes rows of a multiple of {GROUP}, not {width}")
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x_TH.device)
    scales = scales_like(rows, width, x_TH.device)
    _rms_norm_quantize[(rows,)](
        x_TH, weight_H, codes, scales, x_TH.stride(0), scales.stride(1), eps, width, **_config(x_TH)
    )
    return codes, scales


def _config(x_TH: Tensor) -> dict[str, int | bool]:
    block = triton.next_power_of_2(x_TH.shape[1])
    return {"BLOCK": block, **launch_config(x_TH, 8 if block >= 4096 else 4, 3)}
