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
from thalweg.kernels.quantize.triton import encode, quantize, scales_like


@triton.jit(do_not_specialize=["scales_stride"])
def _rms_norm(
    x_TH, weight_H, y_TH, scales_GT, stride_x, stride_y, scales_stride, eps,
    H: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    h_B = tl.arange(0, BLOCK)
    inside = h_B < H
    weight = tl.load(weight_H + h_B, mask=inside, other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_TH + row * stride_x + h_B, mask=inside, other=0.0).to(tl.float32)
    y = (x * tl.rsqrt(tl.sum(x * x) / H + eps) * weight).to(x_TH.dtype.element_ty)
    if scales_GT is None:
        tl.store(y_TH + row * stride_y + h_B, y, mask=inside)
    else:
        codes, scale = encode(tl.reshape(y, [BLOCK // 128, 128]).to(tl.float32))
        group = tl.arange(0, BLOCK // 128)
        live = group < H // 128
        at = row * stride_y + group[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(y_TH + at, codes, mask=live[:, None])
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


@dataclass(frozen=True, slots=True)
class ReadyNorm:
    """RMSNorm of rows that another kernel has computed with its own result."""

    rows_TH: Tensor
    quantized: tuple[Tensor, Tensor] | None = None  # see `quantize`

    def __len__(self) -> int:
        return len(self.rows_TH)

    def rows(self) -> Tensor:
        return self.rows_TH

    def codes(self) -> tuple[Tensor, Tensor]:
        return quantize(self.rows_TH) if self.quantized is None else self.quantized


Rows = Tensor | LazyNorm | ReadyNorm


def rows_of(x: Rows) -> Tensor:
    """The rows, computed if they have not been."""
    return x if isinstance(x, Tensor) else x.rows()


def codes_of(x: Rows) -> tuple[Tensor, Tensor]:
    """The rows in e4m3 with their scales; see `quantize`."""
    return quantize(x) if isinstance(x, Tensor) else x.codes()


def deferred_norm(x: Rows) -> tuple[Tensor, Tensor | None, float]:
    """The arguments of a kernel that computes the norm itself: rows, and weight and eps of the norm. The weight is None
    where the rows are final.
    """
    return (x.x_TH, x.weight_H, x.eps) if isinstance(x, LazyNorm) else (rows_of(x), None, 0.0)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim, in x's dtype. x: rows with any stride. weight: float32."""
    y_TH = x_TH.new_empty(x_TH.shape)
    _launch(x_TH, weight_H, y_TH, None, eps)
    return y_TH


def rms_norm_quantize(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`quantize` of `rms_norm`, bit by bit, in one launch: → e4m3 [T, H] and float32 scales [T, H / 128], MN-major. H:
    a multiple of 128.
    """
    codes_TH = x_TH.new_empty(x_TH.shape, dtype=torch.float8_e4m3fn)
    scales_TG = scales_like(len(x_TH), x_TH.shape[1], x_TH.device)
    _launch(x_TH, weight_H, codes_TH, scales_TG, eps)
    return codes_TH, scales_TG


def _launch(x_TH: Tensor, weight_H: Tensor, y_TH: Tensor, scales_TG: Tensor | None, eps: float) -> None:
    rows, width = x_TH.shape
    block, stride = triton.next_power_of_2(width), 0 if scales_TG is None else scales_TG.stride(1)
    config = launch_config(x_TH, 8 if block >= 4096 else 4, 3)
    _rms_norm[(rows,)](
        x_TH, weight_H, y_TH, scales_TG, x_TH.stride(0), y_TH.stride(0), stride, eps, width, block, **config
    )
