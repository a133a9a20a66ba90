"""y = x Wᵀ and experts with weights of 4-bit or 8-bit codes (`ref.KernelCodes`) and 16-bit activations, or 8-bit ones
(`eight_bit.py`).

Floor: the codes, read once: 0.52 bytes a weight of INT4 in groups of 128. A program owns BLOCK_N rows of the weight. It
computes Wxᵀ, so that codes become bf16 in registers and are the left operand from there: they never pass through
shared memory.

Codes of 4 bits become numbers two at a time, by the bits of their word (`ref.arranged`); all are exact. Integers q are
the bf16 number 128 + q, from which their zero is taken. The sums of a group are scaled in float32, but for groups of
16, which share a product. Codes of 8 bits in groups of less than a step are scaled in bf16. The scale of a row is
applied at the end.

A tile of experts may have a tail: its rows are two blocks, of which each has a product with the same numbers.

Few rows of x: a weight with too few rows to fill the machine is cut along K, too, and a second launch adds the parts in
order. Results repeat bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue
from thalweg.kernels.launch import SMS, launch_config
from thalweg.kernels.moe_align.triton import combine, sort
from thalweg.kernels.norm.triton import Rows, rows_of
from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.quantize.triton import quantize_rows
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.silu_mul.triton import gated
from thalweg.kernels.weight_only.eight_bit import (
    beside,
    byte_sum,
    group_scales,
    int4_sum,
    no_sums,
    plus,
    products,
    times,
)
from thalweg.kernels.weight_only.ref import FOUR_BITS, KernelCodes

DETERMINISTIC = 48  # rows of an expert for which tiles are chosen where bits must not depend on the batch
LONG_STEP = 256  # columns of a step of codes of 4 bits, with few rows, in groups of whole blocks of 128
MULTIPLY, SUBTRACT = (constexpr(f"{name}.rn.bf16x2 $0, $1, $2;") for name in ("mul", "sub"))
DIRECT = 4  # tokens up to which each pair of token and expert is a tile


@dataclass(frozen=True, slots=True)
class WeightOnlyTile:
    """The tile of one program."""

    m: int  # rows of x
    n: int  # rows of the weight
    k: int  # columns of a step
    stages: int
    warps: int
    splits: int = 1  # parts of K, of `linear`
    # of experts:
    tail: int = 0  # more rows of x, in a product of their own: 128 and 32 hold 143 rows with less padding than 256
    registers: int = 0  # of a thread at most; 0: as many as it takes


def linear_tile(rows: int, weight: KernelCodes) -> WeightOnlyTile:
    """From times of V3's and Qwen2.5-7B's shapes on an H100; for INT8 in blocks with many rows, from compiled code.
    With many rows, more of them share the numbers that a code becomes.
    """
    outputs, inputs, group, is_paired = len(weight.codes), weight.columns, weight.group, weight.kind in FOUR_BITS
    k = 64 if inputs % 128 or not is_paired and group in (16, 32, 64) else 128
    if rows <= 32 and is_paired and _has_long_steps(inputs, group):
        short, long = (_programs(outputs, 64, inputs // step) for step in (k, LONG_STEP))
        k = LONG_STEP if long == short else k  # rather than fewer parts of K
    if rows > 64:
        m, n, stages, warps = 64 if rows <= 128 else 128, 128, 3, 8
        if _has_groups_of_x(weight):
            m, n, warps = 128, 64, 4  # as in `expert_tile`
    else:
        m, n, warps = 16 if rows <= 16 else 32 if rows <= 32 else 64, 64, 4
        stages = 3 if k == LONG_STEP else 4
        if is_paired and m == 16 and _programs(outputs, 128, inputs // k) >= 2 * SMS:
            n, warps = 128, 8
    blocks = -(-outputs // n) * -(-rows // m)
    return WeightOnlyTile(m, n, k, stages, warps, _splits(blocks, inputs // k))


def _splits(blocks: int, steps: int) -> int:
    """Parts of K that fill the machine."""
    splits = 1
    while splits < 8 and blocks * splits < 4 * SMS and steps % (2 * splits) == 0 and steps > 4 * splits:
        splits *= 2
    return splits


def _programs(outputs: int, n: int, steps: int) -> int:
    blocks = -(-outputs // n)
    return blocks * _splits(blocks, steps)


def _has_long_steps(inputs: int, group: int) -> bool:
    return inputs % LONG_STEP == 0 and group % 128 == 0


def _has_groups_of_x(weight: KernelCodes) -> bool:
    """Whether each step of a product reads a scale for each row of x."""
    return weight.activations is not None and weight.activations.group > 0


def expert_tile(rows: float, weight: KernelCodes) -> WeightOnlyTile:
    """From times of V3's experts on an H200, with up to 150 rows; the last two tiles from compiled code alone. rows:
    those that an expert is expected to have.
    """
    inputs, group, is_paired = weight.columns, weight.group, weight.kind in FOUR_BITS
    has_8bit_activations = weight.activations is not None
    k = 64 if inputs % 128 or group == 64 else 128
    m = 16 if rows <= 12 else 32 if rows <= 24 else 64
    if is_paired and _has_long_steps(inputs, group) and rows <= 192:
        if m < 64:
            n, warps = (64, 4) if m == 16 and not has_8bit_activations else (128, 8)
            return WeightOnlyTile(m, n, LONG_STEP, 3, warps)
        if has_8bit_activations and rows > 48:
            return WeightOnlyTile(64, 128, LONG_STEP, 3, 4)
        return WeightOnlyTile(64, 128, k, 4, 8)
    if rows <= 48 or _has_groups_of_x(weight) and rows <= 64:
        return WeightOnlyTile(m, 64, k, 4, 4)
    if _has_groups_of_x(weight):
        # 4 warps copy the scales of 128 rows once, and with 8 each thread copies those of its columns, 32 in each step
        return WeightOnlyTile(128, 64, k, 3, 4)
    # the loop of INT8 takes fewer, so that two programs find room on a multiprocessor
    registers = 128 if has_8bit_activations and weight.kind == "int8" and not group and rows > 128 else 0
    return WeightOnlyTile(64 if rows <= 128 else 128, 128, 64 if group % 128 else k, 3, 8, registers=registers)


@triton.jit
def _masked_or(words, mask: constexpr, bits, PTX: constexpr):
    """words & mask | bits, which the compiler does not fuse where both are constants."""
    if PTX:
        asm: constexpr = "lop3.b32 $0, $1, $2, $3, 0xEA;"
        return tl.inline_asm_elementwise(asm, "=r,r,r,r", [words, mask, bits], tl.int32, is_pure=True, pack=1)
    else:
        return words & mask | bits


@triton.jit
def _twice(values):
    """Two bf16 numbers in an int32."""
    return values.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) * 0x00010001


@triton.jit
def _pairs(words, zero, factor, i: constexpr, KIND: constexpr, PTX: constexpr):
    """bf16 numbers [N, 2 W] of nibbles i and i + 4 of words [N, W], side by side; all are exact. zero [N, 1]: of
    integers, see `_zeros`. factor [N, W]: of floats, in place of 2^126.
    """
    if KIND == "e2m1":  # the exponent's and the fraction's bits where bf16 has them, 126 binades too low
        at: constexpr = 6 - 4 * i
        magnitudes = (words << at if i < 2 else words >> -at) & 0x01C001C0
        bits = _masked_or(words << 12 - 4 * i, -0x7FFF8000, magnitudes, PTX)
    else:
        bits = _masked_or(words >> 4 * i, 0x000F000F, 0x43004300, PTX)  # 128 + code
    if PTX:
        asm: constexpr = MULTIPLY if KIND == "e2m1" else SUBTRACT
        if KIND == "e2m1":
            both = 0x7E807E80 if factor is None else _twice(factor)
        else:
            both = _twice(zero) if KIND == "uint4" else 0x43084308
        bits = tl.inline_asm_elementwise(asm, "=r,r,r", [bits, both], tl.int32, is_pure=True, pack=1)
        low = (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (bits >> 16 & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        low, high = (bits << 16).to(tl.float32, bitcast=True), (bits >> 16 << 16).to(tl.float32, bitcast=True)
        if KIND == "e2m1":
            by = 8.507059173023462e37 if factor is None else factor
            low, high = low * by, high * by
        else:
            low, high = low - zero, high - zero
        low, high = low.to(tl.bfloat16), high.to(tl.bfloat16)
    return tl.reshape(tl.join(low, high), (low.shape[0], 2 * low.shape[1]))


@triton.jit
def _numbers(words, zero, factor, first: constexpr, COUNT: constexpr, KIND: constexpr, PTX: constexpr):
    """`_pairs` of COUNT nibbles from the first on, 1, 2 or 4, side by side."""
    numbers = _pairs(words, zero, factor, first, KIND, PTX)
    if COUNT >= 2:
        numbers = beside(numbers, _pairs(words, zero, factor, first + 1, KIND, PTX))
    if COUNT == 4:
        numbers = beside(numbers, _numbers(words, zero, factor, first + 2, 2, KIND, PTX))
    return numbers


@triton.jit
def _zeros(zero_GN, at, live_N, KIND: constexpr):
    """128 + the code that is 0, float32 [N]."""
    if KIND == "uint4":
        return tl.load(zero_GN + at, mask=live_N, other=0).to(tl.float32) + 128.0
    return tl.full([live_N.shape[0]], 136.0, tl.float32)


@triton.jit
def _paired_sum(
    words_NK, scale_GN, zero_GN, n_N, at_N, live_N, x_Ms, live_Ms, first, last, stride_g,
    K: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr, PTX: constexpr,
):  # fmt: skip
    """`_sums` of codes of 4 bits. A step has blocks of columns, with a product for each group. The scales of a step,
    but the second of two groups in a product, are on their way while its products are computed.
    """
    BLOCK: constexpr = 64 if K % 128 else 128
    STEP: constexpr = max(BLOCK, BLOCK_K)
    MIN_K: constexpr = BLOCK // 4
    IS_SMALL: constexpr = GROUP > 0 and GROUP < MIN_K  # two groups in a product: numbers are scaled, not sums
    DOT_K: constexpr = BLOCK if GROUP == 0 or GROUP > BLOCK else MIN_K if IS_SMALL else GROUP  # columns of a product
    IS_LATE: constexpr = STEP // DOT_K <= 2  # few products of a step wait for their scales; more take registers
    c, k = tl.arange(0, BLOCK // 8), tl.arange(0, DOT_K)
    sums_NM = no_sums(x_Ms, BLOCK_N, tl.float32)
    word_at = words_NK + n_N[:, None] * (K // 8) + c[None, :]
    for start in tl.range(first, last, STEP, num_stages=STAGES):
        scales, zero_codes, parts = (), (), ()
        for group in tl.static_range(0, STEP, DOT_K):
            at = (start + group) // (GROUP if GROUP else DOT_K) * stride_g + at_N
            zero_codes = zero_codes + (_zeros(zero_GN, at, live_N, KIND),)  # type: ignore[assignment]
            if scale_GN is not None:
                scales = scales + (group_scales(scale_GN + at, live_N, IS_EXPONENT),)  # type: ignore[assignment]
        for block in tl.static_range(0, STEP, BLOCK):
            words = tl.load(word_at + (start + block) // 8)  # rows past the end read another row
            for g in tl.static_range(BLOCK // DOT_K):
                zero, factor = zero_codes[block // DOT_K + g], None  # type: ignore[var-annotated]
                if IS_SMALL:
                    at = (start + block + g * DOT_K) // GROUP * stride_g + at_N
                    second_N = group_scales(scale_GN + at + stride_g, live_N, IS_EXPONENT)
                    factor = tl.where(c[None, :] < MIN_K // 4, scales[block // DOT_K + g][:, None], second_N[:, None])
                    factor *= 1.2980742146337069e33  # 2^110
                numbers_NK = _numbers(words, zero[:, None], factor, g * DOT_K // MIN_K, DOT_K // MIN_K, KIND, PTX)
                at_K = start + block + g * DOT_K + k
                if scale_GN is None or IS_SMALL:
                    sums_NM = products(numbers_NK, x_Ms, live_Ms, at_K, sums_NM)
                else:
                    part_NM = products(numbers_NK, x_Ms, live_Ms, at_K, None)
                    if IS_LATE:
                        parts = parts + (part_NM,)  # type: ignore[assignment]
                    else:
                        sums_NM = plus(sums_NM, part_NM, scales[block // DOT_K + g], None, 0)
        if scale_GN is not None and not IS_SMALL and IS_LATE:
            for i in tl.static_range(STEP // DOT_K):
                sums_NM = plus(sums_NM, parts[i], scales[i], None, 0)
    return times(sums_NM, 65536.0) if IS_SMALL else sums_NM


@triton.jit
def _spread(values_NG, BLOCK_N: constexpr, GROUPS: constexpr, COLUMNS: constexpr):
    """Each group's value for each of its columns: [N, COLUMNS]."""
    wide = tl.broadcast_to(values_NG[:, :, None], (BLOCK_N, GROUPS, COLUMNS // GROUPS))
    return tl.reshape(wide, (BLOCK_N, COLUMNS))


@triton.jit
def _byte_sum(
    codes_NK, scale_GN, n_N, at_N, live_N, x_Ms, live_Ms, first, last, stride_g,
    K: constexpr, GROUP: constexpr, IS_EXPONENT: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr,
):  # fmt: skip
    """`_sums` of codes of 8 bits."""
    ALL: constexpr = K if GROUP == 0 else GROUP
    GROUPS: constexpr = BLOCK_K // ALL if ALL < BLOCK_K else 1  # in a step
    k, g = tl.arange(0, BLOCK_K), tl.arange(0, GROUPS)
    sums_NM = no_sums(x_Ms, BLOCK_N, tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        codes = tl.load(codes_NK + n_N[:, None] * K + start + k[None, :])  # rows past the end read another row
        number, scale_N = codes.to(tl.float32), None
        at = (start // ALL) * stride_g + at_N
        if GROUPS > 1:
            scale_NG = group_scales(scale_GN + at[:, None] + g[None, :] * stride_g, live_N[:, None], IS_EXPONENT)
            number *= _spread(scale_NG, BLOCK_N, GROUPS, BLOCK_K)
        elif scale_GN is not None:
            scale_N = group_scales(scale_GN + at, live_N, IS_EXPONENT)
        sums_NM = plus(sums_NM, products(number, x_Ms, live_Ms, start + k, None), scale_N, None, 0)
    return sums_NM


@triton.jit
def _sums(
    codes_NK, scale_GN, zero_GN, n_N, at_N, live_N, x_MK, x_scale_MG, row_Ms, stride_x, live_Ms, first, last, stride_g,
    K: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr, X_GROUP: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr, PTX: constexpr,
):  # fmt: skip
    """[N, M] of each block of rows of x: rows n of the weight times these over columns first to last, without the
    scales that `_finished` has. at_N: where the scales of a row's first group are, those of the next group stride_g
    later. X_GROUP: columns of x that share a scale, 0 for all; -1 where x has 16 bits.
    """
    x_Ms, scale_Ms = (), ()
    for i in tl.static_range(len(row_Ms)):
        row_M = tl.where(live_Ms[i], row_Ms[i], 0).to(tl.int64)
        x_Ms = x_Ms + (x_MK + row_M * stride_x,)  # type: ignore[assignment]
        if X_GROUP > 0:
            scale_Ms = scale_Ms + (x_scale_MG + row_M * (K // X_GROUP),)  # type: ignore[assignment]
    if X_GROUP >= 0:
        if KIND == "int4":
            return int4_sum(
                codes_NK, scale_GN, n_N, at_N, live_N, x_Ms, first, last, stride_g,
                K, GROUP, IS_EXPONENT, BLOCK_N, BLOCK_K, STAGES, PTX,
            )  # fmt: skip
        else:
            return byte_sum(
                codes_NK, scale_GN, n_N, at_N, live_N, x_Ms, scale_Ms, first, last, stride_g,
                K, GROUP, IS_EXPONENT, X_GROUP, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
    elif KIND == "int8" or KIND == "e4m3":
        return _byte_sum(
            codes_NK, scale_GN, n_N, at_N, live_N, x_Ms, live_Ms, first, last, stride_g,
            K, GROUP, IS_EXPONENT, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    else:
        return _paired_sum(
            codes_NK, scale_GN, zero_GN, n_N, at_N, live_N, x_Ms, live_Ms, first, last, stride_g,
            K, GROUP, KIND, IS_EXPONENT, BLOCK_N, BLOCK_K, STAGES, PTX,
        )  # fmt: skip


@triton.jit
def _finished(sums_NM, row, n_N, live_N, x_scale_MG, row_M, live_M, X_GROUP: constexpr):
    """float32: the sums of a block of rows of x, times the scales of whole rows of x and of the weight, if any."""
    sums_NM = sums_NM.to(tl.float32)
    if X_GROUP == 0:
        sums_NM *= tl.load(x_scale_MG + tl.where(live_M, row_M, 0))[None, :]
    if row is not None:
        sums_NM *= tl.load(row + n_N, mask=live_N, other=0.0)[:, None]
    return sums_NM


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_MK, x_scale_MG, codes_NK, scale_GN, zero_GN, row_N, residual_MN, y_MN, parts_SMN, M, N, stride_x, stride_y,
    K: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr, X_GROUP: constexpr, SPLITS: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """y = x Wᵀ (+ residual), or the sums over one of SPLITS parts of K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live_N, live_M = n < N, m < M
    n_N = tl.where(live_N, n, 0).to(tl.int64)
    pdl_wait(PDL)
    pdl_launch(PDL)
    first = tl.program_id(2) * (K // SPLITS)
    sums = _sums(
        codes_NK, scale_GN, zero_GN, n_N, n, live_N, x_MK, x_scale_MG, (m,), stride_x, (live_M,),
        first, first + K // SPLITS, N, K, GROUP, KIND, IS_EXPONENT, X_GROUP, BLOCK_N, BLOCK_K, STAGES, PDL,
    )  # fmt: skip
    sums_NM = _finished(sums[0], row_N, n, live_N, x_scale_MG, m, live_M, X_GROUP)
    inside = live_N[:, None] & live_M[None, :]
    if SPLITS > 1:
        at = parts_SMN + (tl.program_id(2) * M + m[None, :]).to(tl.int64) * N + n[:, None]
        tl.store(at, sums_NM, mask=inside)
    else:
        at = m[None, :].to(tl.int64) * stride_y + n[:, None]
        if residual_MN is not None:
            sums_NM += tl.load(residual_MN + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_MN + at, sums_NM.to(y_MN.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _add_parts(
    parts_SMN, residual_MN, y_MN, M, N, stride_y, SPLITS: constexpr, BLOCK_N: constexpr, PDL: constexpr
):  # fmt: skip
    """y = the sum of the parts of K (+ residual), in their order."""
    m, n = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pdl_wait(PDL)
    pdl_launch(PDL)
    total = tl.zeros([BLOCK_N], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts_SMN + (part * M + m).to(tl.int64) * N + n, mask=n < N, other=0.0)
    at = m.to(tl.int64) * stride_y + n
    if residual_MN is not None:
        total += tl.load(residual_MN + at, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_MN + at, total.to(y_MN.dtype.element_ty), mask=n < N)


def linear(x: Rows, weight: KernelCodes, epilogue: Epilogue = PLAIN, deterministic: bool = False) -> Tensor:
    """y [M, N] of x [M, K], bf16, or a norm of such; K a multiple of 64. A bias is not supported. deterministic: a
    row's bits depend on nothing but the row.
    """
    assert epilogue.bias_N is None, "no layer of codes has a bias"
    x_MK, outputs = rows_of(x), len(weight.codes)
    rows = len(x_MK)
    tile = linear_tile(1 if deterministic else rows, weight)
    y, residual = epilogue.result(rows, outputs, x_MK), epilogue.residual_MN
    x_MK, x_scale = _quantized(x_MK, weight)
    parts = torch.empty(tile.splits, rows, outputs, dtype=torch.float32, device=y.device) if tile.splits > 1 else None
    if not rows:
        return y
    _linear[(triton.cdiv(outputs, tile.n), triton.cdiv(rows, tile.m), tile.splits)](
        x_MK, x_scale, *_tensors(weight), residual, y, parts, rows, outputs, x_MK.stride(0), y.stride(0),
        *_constants(weight), tile.splits, tile.m, tile.n, tile.k, tile.stages,
        **launch_config(x_MK, tile.warps, tile.stages),
    )  # fmt: skip
    if parts is not None:
        _add_parts[(triton.cdiv(outputs, 256), rows)](
            parts, residual, y, rows, outputs, y.stride(0), tile.splits, 256, **launch_config(x_MK, 2)
        )  # fmt: skip
    return y


def _quantized(x_MK: Tensor, weight: KernelCodes) -> tuple[Tensor, Tensor | None]:
    """x as products with this weight read it: rows, or codes and their scales."""
    rule = weight.activations
    return (x_MK, None) if rule is None else quantize_rows(x_MK, rule.kind, rule.group, weight.inputs)


def _tensors(weight: KernelCodes) -> tuple[Tensor | None, ...]:
    codes, scale = weight.codes, weight.scale
    if scale is not None and scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    has_words = weight.kind in FOUR_BITS and weight.activations is None
    return codes.view(torch.int32) if has_words else codes, scale, weight.zero, weight.row


def _constants(weight: KernelCodes) -> tuple[int, int, str, bool, int]:
    """K, group, kind, whether scales are exponents, and columns of x that share a scale (`_sums`)."""
    is_exponent = weight.scale is not None and weight.scale.dtype == torch.float8_e8m0fnu
    x_group = -1 if weight.activations is None else weight.activations.group
    return weight.columns, weight.group, weight.kind, is_exponent, x_group


@triton.jit
def _tile_of(
    tile, ids_or_experts, tile_row, end_N, total_tiles, N: constexpr, IS_DIRECT: constexpr
):  # fmt: skip
    """→ whether the tile is used, its expert, its first row and the expert's end."""
    if IS_DIRECT:
        expert = tl.load(ids_or_experts + tile)
        used, begin, end = expert < N, tile, tile + 1
    else:
        used = tile < tl.load(total_tiles)
        expert = tl.load(ids_or_experts + tile, mask=used, other=0)
        begin, end = tl.load(tile_row + tile, mask=used, other=0), tl.load(end_N + expert)
    return used, expert.to(tl.int64), begin, end


@triton.jit
def _rows_of(begin, end, order, BLOCK_M: constexpr, TAIL: constexpr, IS_DIRECT: constexpr, AGAIN: constexpr = False):
    """→ of each block of a tile's rows: positions, pairs, and which there are. AGAIN: pairs are read once more, since
    those that stay in registers through the products leave less room for these.
    """
    positions, pairs, lives = (begin + tl.arange(0, BLOCK_M),), (), ()
    if TAIL > 0:
        positions = positions + (begin + BLOCK_M + tl.arange(0, TAIL),)  # type: ignore[assignment]
    for i in tl.static_range(len(positions)):
        live_M = positions[i] < end
        pair = positions[i] if IS_DIRECT else tl.load(order + positions[i], mask=live_M, other=0, volatile=AGAIN)
        pairs, lives = pairs + (pair,), lives + (live_M,)  # type: ignore[assignment]
    return positions, pairs, lives


@triton.jit
def _up(
    inner_PI, x_TH, x_scale_TG, codes, scale, zero, row, order, tile_expert, tile_row, end_N, total_tiles, stride_x,
    HIDDEN: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr, X_GROUP: constexpr,
    N: constexpr, INNER: constexpr, CHOICES: constexpr, IS_DIRECT: constexpr,
    BLOCK_M: constexpr, TAIL: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """inner[position] = silu(gate(x)) · up(x) for one tile of pairs of an expert, and BLOCK_N / 2 of its columns."""
    HALF: constexpr = BLOCK_N // 2
    BLOCKS: constexpr = (INNER + HALF - 1) // HALF
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    pdl_wait(PDL)
    pdl_launch(PDL)
    used, expert, begin, end = _tile_of(tile, tile_expert, tile_row, end_N, total_tiles, N, IS_DIRECT)
    if used:
        positions, pairs, lives = _rows_of(begin, end, order, BLOCK_M, TAIL, IS_DIRECT)
        i_N = block * HALF + tl.arange(0, BLOCK_N) % HALF
        live_N = i_N < INNER
        row_N = i_N + tl.arange(0, BLOCK_N) // HALF * INNER
        n_N, groups = expert * (2 * INNER) + tl.where(live_N, row_N, 0), HIDDEN // GROUP if GROUP else 1
        rows = ()
        for i in tl.static_range(len(pairs)):
            rows = rows + (pairs[i] // CHOICES,)  # type: ignore[assignment]
        sums = _sums(
            codes, scale, zero, n_N, expert * (groups * 2 * INNER) + row_N, live_N,
            x_TH, x_scale_TG, rows, stride_x, lives, 0, HIDDEN, 2 * INNER,
            HIDDEN, GROUP, KIND, IS_EXPONENT, X_GROUP, BLOCK_N, BLOCK_K, STAGES, PDL,
        )  # fmt: skip
        column = block * HALF + tl.arange(0, HALF)
        positions, pairs, lives = _rows_of(begin, end, order, BLOCK_M, TAIL, IS_DIRECT, True)
        for i in tl.static_range(len(sums)):
            sums_NM = _finished(sums[i], row, n_N, live_N, x_scale_TG, pairs[i] // CHOICES, lives[i], X_GROUP)
            gate, up = tl.split(tl.permute(tl.reshape(sums_NM, (2, HALF, sums_NM.shape[1])), (1, 2, 0)))
            at = inner_PI + positions[i][None, :].to(tl.int64) * INNER + column[:, None]
            inside = (column < INNER)[:, None] & lives[i][None, :]
            tl.store(at, gated(gate, up).to(inner_PI.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    y_PH, inner_PI, inner_scale_PG, codes, scale, zero, row, order, tile_expert, tile_row, end_N, total_tiles,
    INNER: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr, X_GROUP: constexpr,
    N: constexpr, HIDDEN: constexpr, IS_DIRECT: constexpr,
    BLOCK_M: constexpr, TAIL: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """y[pair] = w2 · inner[position of the pair] for one tile of pairs, and BLOCK_N of its columns."""
    BLOCKS: constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    pdl_wait(PDL)
    pdl_launch(PDL)
    used, expert, begin, end = _tile_of(tile, tile_expert, tile_row, end_N, total_tiles, N, IS_DIRECT)
    if used:
        positions, pairs, lives = _rows_of(begin, end, order, BLOCK_M, TAIL, IS_DIRECT)
        h = block * BLOCK_N + tl.arange(0, BLOCK_N)
        live_N = h < HIDDEN
        n_N, groups = expert * HIDDEN + tl.where(live_N, h, 0), INNER // GROUP if GROUP else 1
        sums = _sums(
            codes, scale, zero, n_N, expert * (groups * HIDDEN) + h, live_N,
            inner_PI, inner_scale_PG, positions, INNER, lives, 0, INNER, HIDDEN,
            INNER, GROUP, KIND, IS_EXPONENT, X_GROUP, BLOCK_N, BLOCK_K, STAGES, PDL,
        )  # fmt: skip
        positions, pairs, lives = _rows_of(begin, end, order, BLOCK_M, TAIL, IS_DIRECT, True)
        for i in tl.static_range(len(sums)):
            sums_NM = _finished(sums[i], row, n_N, live_N, inner_scale_PG, positions[i], lives[i], X_GROUP)
            at = y_PH + pairs[i][None, :].to(tl.int64) * HIDDEN + h[:, None]
            tl.store(at, sums_NM.to(y_PH.dtype.element_ty), mask=live_N[:, None] & lives[i][None, :])


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """The stacks of the experts: gate rows, then up rows [N, 2 I, H]; [N, H, I]."""

    w13: KernelCodes
    w2: KernelCodes


def run_experts(
    out_TH: Tensor,
    x: Rows,
    routed: RouterOutput,
    weights: CodedExperts,
    accumulate: bool = True,
    deterministic: bool = False,
) -> None:
    """Adds the experts' sum to out_TH [T, H], or stores it there, as `experts.triton.run_experts`."""
    x_TH, (tokens, choices) = rows_of(x), routed.ids_TK.shape
    if not tokens:
        return
    w13, w2 = weights.w13, weights.w2
    experts, hidden, inner = w2.codes.shape[0], w2.codes.shape[1], w2.columns
    rows = tokens * choices / experts
    rows = DETERMINISTIC if deterministic else rows
    up, down = expert_tile(rows, w13), expert_tile(rows, w2)
    is_direct, pairs = tokens <= DIRECT and not deterministic, tokens * choices
    count = pairs
    table: tuple[Tensor | None, ...] = (None, routed.ids_TK, None, None, None)
    if not is_direct:
        by = sort(routed.ids_TK, experts, up.m + up.tail)
        count, table = by.most_tiles, (by.pair, by.tile_expert, by.tile_row, by.end_N, by.tiles)
    inner_PI = torch.empty(pairs, inner, dtype=x_TH.dtype, device=x_TH.device)
    y_PH = torch.empty(pairs, hidden, dtype=out_TH.dtype, device=x_TH.device)
    x_TH, x_scale = _quantized(x_TH, w13)
    _up[(count * triton.cdiv(inner, up.n // 2),)](
        inner_PI, x_TH, x_scale, *_tensors(w13), *table, x_TH.stride(0), *_constants(w13), experts, inner, choices,
        is_direct, up.m, up.tail, up.n, up.k, up.stages, **launch_config(x_TH, up.warps, up.stages, up.registers),
    )  # fmt: skip
    inner_PI, inner_scale = _quantized(inner_PI, w2)
    _down[(count * triton.cdiv(hidden, down.n),)](
        y_PH, inner_PI, inner_scale, *_tensors(w2), *table, *_constants(w2), experts, hidden, is_direct,
        up.m, up.tail, down.n, down.k, down.stages, **launch_config(x_TH, down.warps, down.stages, down.registers),
    )  # fmt: skip
    combine(out_TH, y_PH, None, routed.ids_TK, routed.weights_TK, experts, accumulate)
