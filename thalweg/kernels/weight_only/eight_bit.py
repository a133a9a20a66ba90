"""Sums of `triton.py` over activations of 8 bits: INT4 codes and e4m3 times e4m3, and INT8 times INT8.

INT4 becomes e4m3 exactly: the numbers 0 to 8 times 2^-9 are the bit patterns 0 to 8, with and without a leading one.
So a code's sign goes to the byte's, and is added to the bits of -1 - v (`ref.arranged`): nine instructions for eight
codes, in the registers from which the tensor cores take their left operand. These add e4m3 with some 14 bits
(DeepSeek-V3 report, section 3.3.2), so each block of 128 columns is scaled and added in float32 by itself. Products of
INT8 are summed in int32: of a whole row of up to 133,000 columns, or of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def group_scales(at, mask, IS_EXPONENT: constexpr):
    """float32 scales; bytes of exponents (e8m0) are powers of two."""
    if IS_EXPONENT:
        return (tl.load(at, mask=mask, other=127).to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _signed_bytes(codes, PTX: constexpr):
    """→ the numbers of both halves of bytes [N, B], times 2^-9, e4m3."""
    if PTX:  # four bytes at a time
        asm: constexpr = """{
            .reg .b32 sign, bits;
            shr.u32 sign, $2, 3;
            and.b32 sign, sign, 0x01010101;
            and.b32 bits, $2, 0x07070707;
            mad.lo.u32 $0, sign, 0x81, bits;
            shr.u32 sign, $2, 7;
            and.b32 sign, sign, 0x01010101;
            shr.u32 bits, $2, 4;
            and.b32 bits, bits, 0x07070707;
            mad.lo.u32 $1, sign, 0x81, bits;
        }"""
        low, high = tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], (tl.uint8, tl.uint8), is_pure=True, pack=4)
    else:
        low = (codes & 7) + (codes >> 3 & 1) * 0x81
        high = (codes >> 4 & 7) + (codes >> 7) * 0x81
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def beside(left, right):
    """[N, 2 K] of two [N, K]."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def int4_sum(
    codes_NK, scale_GN, n_N, at_N, live_N, x_M, first, last, stride_g,
    K: constexpr, GROUP: constexpr, IS_EXPONENT: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    STAGES: constexpr, PTX: constexpr,
):  # fmt: skip
    """`triton._sum` of INT4 and e4m3, without the scale of x. GROUP: a multiple of 128, or 0. A step is one block of
    128 columns, or several. The scales of a step are on their way while its products are computed.
    """
    tl.static_assert(BLOCK_K % 128 == 0)
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    code_at = codes_NK + n_N[:, None] * (K // 2) + tl.arange(0, 64)[None, :]
    x_at = x_M[:, None] + tl.arange(0, 128)[None, :]
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        scales, parts = (), ()
        if scale_GN is not None:
            for block in tl.static_range(0, BLOCK_K, 128):
                at = (start + block) // GROUP * stride_g + at_N
                scales = scales + (group_scales(scale_GN + at, live_N, IS_EXPONENT),)  # type: ignore[assignment]
        for block in tl.static_range(0, BLOCK_K, 128):
            # rows past the end read another row, of the weight and of x
            codes = tl.load(code_at + start // 2 + block // 2)
            x = tl.load(x_at + start + block)
            parts = parts + (tl.dot(beside(*_signed_bytes(codes, PTX)), x.T),)  # type: ignore[assignment]
        for i in tl.static_range(BLOCK_K // 128):
            part_NM = parts[i]  # type: ignore[var-annotated]
            if scale_GN is not None:
                part_NM *= scales[i][:, None]
            acc_NM += part_NM
    return acc_NM * 512.0


@triton.jit
def byte_sum(
    codes_NK, scale_GN, n_N, at_N, live_N, x_M, scale_M, first, last, stride_g,
    K: constexpr, GROUP: constexpr, IS_EXPONENT: constexpr, X_GROUP: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr,
):  # fmt: skip
    """`triton._sum` of INT8 and INT8, or of whole rows of e4m3 and e4m3; with the scales of x if groups of columns have
    them, those of the weight's.
    """
    IS_FLOAT: constexpr = codes_NK.dtype.element_ty.is_fp8()
    STEP: constexpr = BLOCK_K if scale_GN is None else GROUP
    k = tl.arange(0, STEP)
    total_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    code_at, x_at = codes_NK + n_N[:, None] * K + k[None, :], x_M[:, None] + k[None, :]
    for start in tl.range(first, last, STEP, num_stages=STAGES):
        codes, x = tl.load(code_at + start), tl.load(x_at + start)
        if IS_FLOAT:
            acc_NM += tl.dot(codes, x.T)
        elif scale_GN is None:
            total_NM = tl.dot(codes, x.T, total_NM, out_dtype=tl.int32)
        else:
            group = start // GROUP
            scale_NM = group_scales(scale_GN + group * stride_g + at_N, live_N, IS_EXPONENT)[:, None]
            if X_GROUP > 0:
                scale_NM *= tl.load(scale_M + group)[None, :]
            acc_NM += tl.dot(codes, x.T, out_dtype=tl.int32).to(tl.float32) * scale_NM
    return acc_NM if IS_FLOAT or scale_GN is not None else total_NM.to(tl.float32)
