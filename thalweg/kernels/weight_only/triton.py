"""y = x Wᵀ and experts with weights of 4-bit or 8-bit codes (`ref.Codes`) and 16-bit activations.

Floor: the codes, read once: 0.52 bytes a weight of INT4 in groups of 128. A program owns BLOCK_N rows of the weight. It
computes Wxᵀ, so that codes become bf16 in registers and are the left operand from there: they never pass through
shared memory. Codes become numbers by their bits: 4-bit integers q are the bf16 number 128 + q, less 128 + zero; all
are exact. Two numbers of a byte are an even and an odd column, so x is split into its even and odd columns and each
tile takes two products.

Groups of at least a tile's columns scale the tile's sum, in float32. Smaller groups scale the numbers, in bf16. The
scale of a row is applied once, at the end.

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
from thalweg.kernels.launch import launch_config
from thalweg.kernels.moe_align.triton import combine, sort
from thalweg.kernels.norm.triton import Rows, rows_of
from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.silu_mul.triton import gated
from thalweg.kernels.weight_only.ref import Codes

PROGRAMS = 2 * 132  # that fill an H100
DETERMINISTIC = 48  # rows of an expert for which tiles are chosen where bits must not depend on the batch
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


def linear_tile(rows: int, outputs: int, inputs: int, group: int) -> WeightOnlyTile:
    """By arithmetic: no table was measured. Few rows read the weight at the speed of memory; many use larger tiles."""
    k = 64 if inputs % 128 or group == 64 else 128
    if rows > 64:
        return WeightOnlyTile(64 if rows <= 256 else 128, 128, 64 if k == 64 or group not in (0, 128) else k, 3, 8)
    m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    splits, steps = 1, inputs // k
    while splits < 8 and -(-outputs // 64) * splits < PROGRAMS and steps % (2 * splits) == 0 and steps > 4 * splits:
        splits *= 2
    return WeightOnlyTile(m, 64, k, 4, 4, splits)


def expert_tile(rows: float, inputs: int, group: int) -> WeightOnlyTile:
    """rows: those that an expert is expected to have."""
    k = 64 if inputs % 128 or group == 64 else 128
    if rows <= 48:
        return WeightOnlyTile(16 if rows <= 12 else 32 if rows <= 24 else 64, 64, k, 4, 4)
    return WeightOnlyTile(64 if rows <= 128 else 128, 128, 64 if group not in (0, 128) else k, 3, 8)


@triton.jit
def _numbers(codes, zero, KIND: constexpr):
    """Exact bf16 numbers of codes, without their scales."""
    if KIND == "int8" or KIND == "e4m3":
        number = codes.to(tl.float32)
    elif KIND == "e2m1":  # the exponent's and the fraction's bits where float32 has them, 126 binades too low
        bits = (codes & 7).to(tl.uint32) << 22 | (codes & 8).to(tl.uint32) << 28
        number = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        number = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True).to(tl.float32)
        number -= zero.to(tl.float32) + 128.0 if KIND == "uint4" else 136.0
    return number.to(tl.bfloat16)


@triton.jit
def _scales(at, mask, IS_EXPONENT: constexpr):
    """float32 scales; bytes of exponents (e8m0) are powers of two."""
    if IS_EXPONENT:
        return (tl.load(at, mask=mask, other=127).to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _spread(values_NG, BLOCK_N: constexpr, GROUPS: constexpr, COLUMNS: constexpr):
    """Each group's value for each of its columns: [N, COLUMNS]."""
    wide = tl.broadcast_to(values_NG[:, :, None], (BLOCK_N, GROUPS, COLUMNS // GROUPS))
    return tl.reshape(wide, (BLOCK_N, COLUMNS))


@triton.jit
def _sum(
    codes_NK, scale_NG, zero_NG, n_N, live_N, x_M, live_M, first, last,
    K: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr,
):  # fmt: skip
    """float32 [N, M]: rows n of the weight times rows of x, whose addresses are x_M, over columns first to last."""
    PAIRED: constexpr = KIND == "int4" or KIND == "uint4" or KIND == "e2m1"
    BYTES: constexpr = 2 if PAIRED else 1
    COLUMNS: constexpr = BLOCK_K // BYTES
    ALL: constexpr = K if GROUP == 0 else GROUP
    GROUPS: constexpr = BLOCK_K // ALL if ALL < BLOCK_K else 1  # in a step
    c, k, g = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_K), tl.arange(0, GROUPS)
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    code_at = codes_NK + n_N[:, None] * (K // BYTES) + c[None, :]
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        codes = tl.load(code_at + start // BYTES)  # rows past the end read another row
        x_MK = tl.load(x_M[:, None] + start + k[None, :], mask=live_M[:, None], other=0.0)
        at = n_N[:, None] * (K // ALL) + start // ALL + g[None, :]
        zero = 0
        if zero_NG is not None:
            zero = _spread(tl.load(zero_NG + at, mask=live_N[:, None], other=0), BLOCK_N, GROUPS, COLUMNS)
        if PAIRED:
            low, high = _numbers(codes & 15, zero, KIND), _numbers(codes >> 4, zero, KIND)
        else:
            low = _numbers(codes, zero, KIND)
            high = low
        if GROUPS > 1:
            scale = _spread(_scales(scale_NG + at, live_N[:, None], IS_EXPONENT), BLOCK_N, GROUPS, COLUMNS)
            low, high = low.to(tl.float32) * scale, high.to(tl.float32) * scale
        low, high = low.to(x_MK.dtype), high.to(x_MK.dtype)
        if PAIRED:
            even, odd = tl.split(tl.reshape(x_MK, (BLOCK_M, COLUMNS, 2)))
            part = tl.dot(high, odd.T, tl.dot(low, even.T, input_precision="ieee"), input_precision="ieee")
        else:
            part = tl.dot(low, x_MK.T, input_precision="ieee")
        if GROUPS == 1 and scale_NG is not None:
            one = n_N * (K // ALL) + start // ALL
            part *= _scales(scale_NG + one, live_N, IS_EXPONENT)[:, None]
        acc_NM += part
    return acc_NM


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_MK, codes_NK, scale_NG, zero_NG, row_N, residual_MN, y_MN, parts_SMN, M, N, stride_x, stride_y,
    K: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr, SPLITS: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """y = x Wᵀ (+ residual), or the sums over one of SPLITS parts of K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live_N, live_M = n < N, m < M
    n_N = tl.where(live_N, n, 0).to(tl.int64)
    x_M = x_MK + tl.where(live_M, m, 0).to(tl.int64) * stride_x
    pdl_wait(PDL)
    pdl_launch(PDL)
    first = tl.program_id(2) * (K // SPLITS)
    sums_NM = _sum(
        codes_NK, scale_NG, zero_NG, n_N, live_N, x_M, live_M, first, first + K // SPLITS,
        K, GROUP, KIND, IS_EXPONENT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    if row_N is not None:
        sums_NM *= tl.load(row_N + n, mask=live_N, other=0.0)[:, None]
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


def linear(x: Rows, weight: Codes, epilogue: Epilogue = PLAIN, deterministic: bool = False) -> Tensor:
    """y [M, N] of x [M, K], bf16, or a norm of such; K a multiple of 64. A bias is not supported. deterministic: a
    row's bits depend on nothing but the row.
    """
    assert epilogue.bias_N is None, "no layer of codes has a bias"
    x_MK, outputs, inputs = rows_of(x), len(weight.codes), weight.columns
    rows, group = len(x_MK), weight.group if weight.scale is not None else 0
    tile = linear_tile(1 if deterministic else rows, outputs, inputs, group)
    y, residual = epilogue.result(rows, outputs, x_MK), epilogue.residual_MN
    parts = torch.empty(tile.splits, rows, outputs, dtype=torch.float32, device=y.device) if tile.splits > 1 else None
    if not rows:
        return y
    _linear[(triton.cdiv(outputs, tile.n), triton.cdiv(rows, tile.m), tile.splits)](
        x_MK, *_tensors(weight), residual, y, parts, rows, outputs, x_MK.stride(0), y.stride(0),
        *_constants(weight), tile.splits, tile.m, tile.n, tile.k, tile.stages,
        **launch_config(x_MK, tile.warps, tile.stages),
    )  # fmt: skip
    if parts is not None:
        _add_parts[(triton.cdiv(outputs, 256), rows)](
            parts, residual, y, rows, outputs, y.stride(0), tile.splits, 256, **launch_config(x_MK, 2)
        )  # fmt: skip
    return y


def _tensors(weight: Codes) -> tuple[Tensor | None, ...]:
    scale = weight.scale
    if scale is not None and scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    return weight.codes, scale, weight.zero, weight.row


def _constants(weight: Codes) -> tuple[int, int, str, bool]:
    """K, group, kind, and whether scales are exponents."""
    is_exponent = weight.scale is not None and weight.scale.dtype == torch.float8_e8m0fnu
    return weight.columns, weight.group, weight.kind, is_exponent


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
def _up(
    inner_PI, x_TH, codes, scale, zero, row, order, tile_expert, tile_row, end_N, total_tiles, stride_x,
    HIDDEN: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr,
    N: constexpr, INNER: constexpr, CHOICES: constexpr, IS_DIRECT: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """inner[position] = silu(gate(x)) · up(x) for one tile of pairs of an expert, and BLOCK_N / 2 of its columns."""
    HALF: constexpr = BLOCK_N // 2
    BLOCKS: constexpr = (INNER + HALF - 1) // HALF
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    pdl_wait(PDL)
    pdl_launch(PDL)
    used, expert, begin, end = _tile_of(tile, tile_expert, tile_row, end_N, total_tiles, N, IS_DIRECT)
    if used:
        position = begin + tl.arange(0, BLOCK_M)
        live_M = position < end
        pair = position if IS_DIRECT else tl.load(order + position, mask=live_M, other=0)
        x_M = x_TH + tl.where(live_M, pair // CHOICES, 0).to(tl.int64) * stride_x
        i_N = block * HALF + tl.arange(0, BLOCK_N) % HALF
        live_N = i_N < INNER
        n_N = expert * (2 * INNER) + tl.where(live_N, i_N + tl.arange(0, BLOCK_N) // HALF * INNER, 0)
        sums_NM = _sum(
            codes, scale, zero, n_N, live_N, x_M, live_M, 0, HIDDEN,
            HIDDEN, GROUP, KIND, IS_EXPONENT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        if row is not None:
            sums_NM *= tl.load(row + n_N, mask=live_N, other=0.0)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(sums_NM, (2, HALF, BLOCK_M)), (1, 2, 0)))
        i = block * HALF + tl.arange(0, HALF)
        at = inner_PI + position[None, :].to(tl.int64) * INNER + i[:, None]
        inside = (i < INNER)[:, None] & live_M[None, :]
        tl.store(at, gated(gate, up).to(inner_PI.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    y_PH, inner_PI, codes, scale, zero, row, order, tile_expert, tile_row, end_N, total_tiles,
    INNER: constexpr, GROUP: constexpr, KIND: constexpr, IS_EXPONENT: constexpr,
    N: constexpr, HIDDEN: constexpr, IS_DIRECT: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """y[pair] = w2 · inner[position of the pair] for one tile of pairs, and BLOCK_N of its columns."""
    BLOCKS: constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    pdl_wait(PDL)
    pdl_launch(PDL)
    used, expert, begin, end = _tile_of(tile, tile_expert, tile_row, end_N, total_tiles, N, IS_DIRECT)
    if used:
        position = begin + tl.arange(0, BLOCK_M)
        live_M = position < end
        pair = position if IS_DIRECT else tl.load(order + position, mask=live_M, other=0)
        x_M = inner_PI + tl.where(live_M, position, begin).to(tl.int64) * INNER
        h = block * BLOCK_N + tl.arange(0, BLOCK_N)
        live_N = h < HIDDEN
        n_N = expert * HIDDEN + tl.where(live_N, h, 0)
        sums_NM = _sum(
            codes, scale, zero, n_N, live_N, x_M, live_M, 0, INNER,
            INNER, GROUP, KIND, IS_EXPONENT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        if row is not None:
            sums_NM *= tl.load(row + n_N, mask=live_N, other=0.0)[:, None]
        at = y_PH + pair[None, :].to(tl.int64) * HIDDEN + h[:, None]
        tl.store(at, sums_NM.to(y_PH.dtype.element_ty), mask=live_N[:, None] & live_M[None, :])


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """The stacks of the experts: gate rows, then up rows [N, 2 I, H]; [N, H, I]."""

    w13: Codes
    w2: Codes


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
    up, down = expert_tile(rows, hidden, w13.group), expert_tile(rows, inner, w2.group)
    is_direct, pairs = tokens <= DIRECT and not deterministic, tokens * choices
    count = pairs
    table: tuple[Tensor | None, ...] = (None, routed.ids_TK, None, None, None)
    if not is_direct:
        by = sort(routed.ids_TK, experts, up.m)
        count, table = by.most_tiles, (by.pair, by.tile_expert, by.tile_row, by.end_N, by.tiles)
    inner_PI = torch.empty(pairs, inner, dtype=x_TH.dtype, device=x_TH.device)
    y_PH = torch.empty(pairs, hidden, dtype=out_TH.dtype, device=x_TH.device)
    _up[(count * triton.cdiv(inner, up.n // 2),)](
        inner_PI, x_TH, *_tensors(w13), *table, x_TH.stride(0), *_constants(w13), experts, inner, choices, is_direct,
        up.m, up.n, up.k, up.stages, **launch_config(x_TH, up.warps, up.stages),
    )  # fmt: skip
    _down[(count * triton.cdiv(hidden, down.n),)](
        y_PH, inner_PI, *_tensors(w2), *table, *_constants(w2), experts, hidden, is_direct,
        up.m, down.n, down.k, down.stages, **launch_config(x_TH, down.warps, down.stages),
    )  # fmt: skip
    combine(out_TH, y_PH, None, routed.ids_TK, routed.weights_TK, experts, accumulate)
