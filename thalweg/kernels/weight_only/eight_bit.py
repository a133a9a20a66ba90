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
def no_sums(x_Ms, N: constexpr, TYPE: constexpr):
    """[N, M] for each block of rows of x."""
    made = ()
    for i in tl.static_range(len(x_Ms)):
        made = made + (tl.zeros([N, x_Ms[i].shape[0]], TYPE),)  # type: ignore[assignment]
    return made


@triton.jit
def products(numbers_NK, x_Ms, live_Ms, at_K, sums_NM, IS_INT: constexpr = False):
    """sums (None: 0) + numbers · xᵀ over columns at_K, of each block of rows. live_Ms: rows to read; None: all."""
    made = ()
    for i in tl.static_range(len(x_Ms)):
        at = x_Ms[i][:, None] + at_K[None, :]
        x = tl.load(at) if live_Ms is None else tl.load(at, mask=live_Ms[i][:, None], other=0.0)
        before = None if sums_NM is None else sums_NM[i]
        if IS_INT:
            product = tl.dot(numbers_NK, x.T, before, out_dtype=tl.int32)
        else:
            product = tl.dot(numbers_NK.to(x.dtype), x.T, before, input_precision="ieee")
        made = made + (product,)  # type: ignore[assignment]
    return made


@triton.jit
def plus(sums_NM, parts_NM, scale_N, scale_Ms, group):
    """sums + parts · scale_N · scale_M of a group, of each block of rows. None: 1; scale_Ms only beside scale_N."""
    made = ()
    for i in tl.static_range(len(sums_NM)):
        part_NM = parts_NM[i].to(tl.float32)
        if scale_Ms is not None:
            part_NM *= scale_N[:, None] * tl.load(scale_Ms[i] + group)[None, :]
        elif scale_N is not None:
            part_NM *= scale_N[:, None]
        made = made + (sums_NM[i] + part_NM,)  # type: ignore[assignment]
    return made


@triton.jit
def times(sums_NM, factor: constexpr):
    made = ()
    for i in tl.static_range(len(sums_NM)):
        made = made + (sums_NM[i] * factor,)  # type: ignore[assignment]
    return made


@triton.jit
def int4_sum(
    codes_NK, scale_GN, n_N, at_N, live_N, x_Ms, first, last, stride_g,
    K: constexpr, GROUP: constexpr, IS_EXPONENT: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
    STAGES: constexpr, PTX: constexpr,
):  # fmt: skip
    """`triton._sums` of INT4 and e4m3, without the scale of x. GROUP: a multiple of 128, or 0. A step is one block of
    128 columns, or several. The scales of a step are on their way while its products are computed.
    """
    tl.static_assert(BLOCK_K % 128 == 0)
    sums_NM, k = no_sums(x_Ms, BLOCK_N, tl.float32), tl.arange(0, 128)
    code_at = codes_NK + n_N[:, None] * (K // 2) + tl.arange(0, 64)[None, :]
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        scales, parts = (), ()
        if scale_GN is not None:
            for block in tl.static_range(0, BLOCK_K, 128):
                at = (start + block) // GROUP * stride_g + at_N
                scales = scales + (group_scales(scale_GN + at, live_N, IS_EXPONENT),)  # type: ignore[assignment]
        for block in tl.static_range(0, BLOCK_K, 128):
            # rows past the end read another row, of the weight and of x
            numbers_NK = beside(*_signed_bytes(tl.load(code_at + start // 2 + block // 2), PTX))
            parts = parts + (products(numbers_NK, x_Ms, None, start + block + k, None),)  # type: ignore[assignment]
        for i in tl.static_range(BLOCK_K // 128):
            sums_NM = plus(sums_NM, parts[i], None if scale_GN is None else scales[i], None, 0)
    return times(sums_NM, 512.0)


@triton.jit
def byte_sum(
    codes_NK, scale_GN, n_N, at_N, live_N, x_Ms, scale_Ms, first, last, stride_g,
    K: constexpr, GROUP: constexpr, IS_EXPONENT: constexpr, X_GROUP: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr,
):  # fmt: skip
    """`triton._sums` of INT8 and INT8, or of whole rows of e4m3 and e4m3; with the scales of x if groups of columns
    have them, those of the weight's.
    """
    IS_SCALED: constexpr = scale_GN is not None
    IS_INT: constexpr = not codes_NK.dtype.element_ty.is_fp8()
    STEP: constexpr = GROUP if IS_SCALED else BLOCK_K
    tl.static_assert(IS_SCALED or X_GROUP <= 0)
    k = tl.arange(0, STEP)
    code_at = codes_NK + n_N[:, None] * K + k[None, :]
    sums_NM = no_sums(x_Ms, BLOCK_N, tl.int32 if IS_INT and not IS_SCALED else tl.float32)
    for start in tl.range(first, last, STEP, num_stages=STAGES):
        codes = tl.load(code_at + start)
        if IS_INT and not IS_SCALED:
            sums_NM = products(codes, x_Ms, None, start + k, sums_NM, True)
        else:
            scale_N, group = None, start // STEP
            if IS_SCALED:
                scale_N = group_scales(scale_GN + group * stride_g + at_N, live_N, IS_EXPONENT)
            parts = products(codes, x_Ms, None, start + k, None, IS_INT)
            sums_NM = plus(sums_NM, parts, scale_N, scale_Ms if X_GROUP > 0 else None, group)
    return sums_NM
