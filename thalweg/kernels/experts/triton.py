"""SwiGLU experts, shared ones too, added to the residual: out[t] += Σ_k weight[t, k] · down(silu(gate(x[t])) ·
up(x[t])) (as `ref.py`).

T tokens, K experts a token (topk + shared), P = T · K pairs, N experts in the stack, H hidden, I inner. Shared experts
are the last of the stack; every token chooses them with weight 1. Expert N is none (padding).

Floor: the weights of the chosen experts, 3 · H · I each, read once: 17.3 MB in bf16 for V2-Lite, 44.0 MB in FP8 for
V3. For one token (8 and 9 experts) that is 138 MB, 45 µs, and 396 MB, 128 µs at 3.1 TB/s; for 1,024 tokens of V2-Lite
all 66, 1.14 GB, 368 µs.

- One or two tokens in bf16: no sorting. `_up_pairs` is a matrix-vector product for each pair. `_down_tokens` takes all
  of the token's K experts in one program for each block of H, sums them in float32 and adds the residual. The norm
  before them costs no launch: 51 µs with norm and router for one token of V2-Lite on an H100, whose weights take 44.
- Up to four tokens in FP8: `_up` and `_down` with a tile for each pair, then `combine`. A tile of 16 rows is mostly
  empty, but unpacking e4m3 for FMAs takes four instructions an element, more than a multiprocessor has time for
  (measured: 0.41 of the floor).
- More: pairs are sorted by expert (`moe_align/`), and `_up`, `_down` are grouped GEMMs over tiles of BLOCK_M pairs of
  one expert. The grid is for the worst case; idle programs leave at once. `combine` sums each token's rows. There are
  no atomics: results repeat bit by bit. Up to SHARED_FIRST tokens the shared experts run while router and sort still
  work, because their tokens are known. Beyond, their many tiles, which compute, are spread among those of the others,
  which wait for weights (`_spread`): 640 tokens of V2-Lite take 302 and 157 µs so, otherwise 320 and 163.
- From MANY tokens on in bf16, on a Hopper: the same by the kernels of `tma.py`.

FP8: weights are e4m3 with a scale for each 128 × 128 block. The router quantizes x. The inner activations are rounded
to bf16 and quantized in the kernel that writes or reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from thalweg.kernels.experts.tma import down_by_tma, up_by_tma
from thalweg.kernels.launch import SMS, has_tma, launch_config
from thalweg.kernels.moe_align.triton import SortedPairs, combine, sort
from thalweg.kernels.norm.triton import LazyNorm, Rows, deferred_norm, rows_of
from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.quantize.triton import encode, quantize, scales_like
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.silu_mul.triton import gated
from thalweg.kernels.tuned import TUNED

SHARED_FIRST = 256  # tokens up to which the shared experts of sorted pairs start before the choice
# Tokens from which bf16 weights come by TMA. Both products of V2-Lite on an H100, us with TMA and without: 1,024 tokens
# 494 and 467, 2,048 649 and 676, 8,192 1,883 and 2,159; on an H200 1,024 tokens 412 and 403, 1,536 tokens 612 and 671.
MANY = 1536


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The stacks of the experts: bf16, or e4m3 with scales and H and I multiples of 128. All contiguous."""

    w13_NIH: Tensor  # gate rows, then up rows [N, 2 I, H]
    w2_NHI: Tensor  # [N, H, I]
    s13: Tensor | None = None  # float32 [N, 2 I / 128, H / 128]
    s2: Tensor | None = None  # float32 [N, ceil(H / 128), I / 128]

    @property
    def fp8(self) -> bool:
        return self.w13_NIH.dtype == torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The tile of one program."""

    m: int  # rows of pairs
    n: int  # columns, of gate and of up each, or of H
    k: int  # of the summed axis
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of both kernels."""

    up: ExpertTile
    down: ExpertTile
    ahead: int = 0  # steps of the down projection whose weights are loaded before the wait (path "pairs" only)


TMA_TILES = ExpertTiles(ExpertTile(128, 128, 64, 4, 8), ExpertTile(128, 256, 64, 3, 8))  # of path "tma"


def serves_tma(w2_NHI: Tensor) -> bool:
    """Whether the kernels of `tma.py` serve weights of these dims in bf16: H in whole steps, rows of whole 16 bytes."""
    _, hidden, inner = w2_NHI.shape
    return hidden % 128 == 0 and inner % 8 == 0 and has_tma(w2_NHI)


def path(tokens: int, fp8: bool, deterministic: bool, tma: bool) -> str:
    """pairs: matrix-vector products; direct: a GEMM tile for each pair; sorted: tiles of pairs of one expert; tma: the
    same by the kernels of `tma.py`, where they serve the weights.
    """
    if deterministic or tokens > 4:
        return "tma" if tma and tokens >= MANY and not deterministic else "sorted"
    if fp8:
        return "direct"
    return "pairs" if tokens <= 2 else "sorted"


def tabled(by: str, tokens: int, topk: int, experts: int, fp8: bool, deterministic: bool = False) -> ExpertTiles:
    """The tiles of a path, by the expected rows of an expert. FP8: n is one block of scales, because `_up` quantizes
    its result.
    """
    if by == "pairs":
        return ExpertTiles(ExpertTile(1, 16, 256, 4, 4), ExpertTile(1, 8, 128, 3, 8), 2)
    if by == "direct":
        # three stages leave room for a second program on each multiprocessor: 144 programs would take two turns
        return ExpertTiles(ExpertTile(16, 128, 128, 3, 4), ExpertTile(16, 128, 128, 3, 4))
    if by == "tma":
        return TMA_TILES
    rows = tokens * topk / experts
    m = 64 if deterministic else 16 if rows <= 12 else 32 if rows <= 24 else 64 if rows <= 72 else 128
    if fp8:
        # products of 32 rows would be in float16; 512 tokens of V3 take 4,178 µs so, and 4,048 in tiles of 64 that
        # wait for weights
        stages = 3 if m == 32 else 4
        m = 16 if m == 16 else 64
        return ExpertTiles(ExpertTile(m, 128, 128, stages, 8 if m == 64 else 4), ExpertTile(m, 128, 128, stages, 4))
    if m == 128:
        return ExpertTiles(ExpertTile(128, 128, 64, 4, 8), ExpertTile(128, 256, 64, 4, 8))
    if m == 64:
        return ExpertTiles(ExpertTile(64, 64, 64, 4, 4), ExpertTile(64, 128, 64, 4, 4))
    return ExpertTiles(ExpertTile(m, 64, 128, 3, 4), ExpertTile(m, 64, 128, 4, 4))


Plan = tuple[str, ExpertTiles]  # path and tiles


def plan_of(tokens: int, topk: int, weights: ExpertWeights, deterministic: bool) -> Plan:
    """The table's choice, or what `thalweg tune` has found for these weights here."""
    shape, fp8 = weights.w2_NHI.shape, weights.fp8
    by = path(tokens, fp8, deterministic, not fp8 and serves_tma(weights.w2_NHI))
    tiles = tabled(by, tokens, topk, shape[0], fp8, deterministic)
    return by, tiles if deterministic else tuned(by, tiles, weights)


def tuned(by: str, tiles: ExpertTiles, weights: ExpertWeights) -> ExpertTiles:
    """These tiles of the table, or what `thalweg tune` has found in their place."""
    return TUNED.lookup("experts", (by, *weights.w2_NHI.shape, int(weights.fp8)), tiles)


def run_experts(
    out_TH: Tensor,
    x: Rows,
    routed: RouterOutput,
    weights: ExpertWeights,
    accumulate: bool = True,
    deterministic: bool = False,
    plan: Plan | None = None,
) -> None:
    """Adds the experts' sum to out_TH [T, H], or stores it there: accumulate=False, for one rank's part of a sum.

    out: bf16. x: bf16 [T, H], contiguous, or a norm of such. FP8 weights read routed.codes_TH, or quantize x
    themselves. deterministic: a token's result does not depend on the others. plan: in place of `plan_of`.
    """
    tokens, columns = routed.ids_TK.shape
    if not tokens:
        return
    by, tiles = plan or plan_of(tokens, columns, weights, deterministic)
    if by == "pairs":
        return _pairs(out_TH, x, routed, weights, tiles, accumulate)
    codes, scales = routed.codes_TH, routed.scales_TG
    if not weights.fp8:
        codes, scales = rows_of(x), None
    elif codes is None or scales is None:
        codes, scales = quantize(rows_of(x))
        routed = routed._replace(shared=0)  # x is not there yet when the next kernel starts
    # shared experts start before the choice is made, if x was complete when the router started
    early = by == "direct" or tokens <= SHARED_FIRST and not deterministic and not isinstance(x, LazyNorm)
    spread = routed.shared if tokens > SHARED_FIRST else 0
    routed = routed._replace(codes_TH=codes, scales_TG=scales, shared=routed.shared if early else 0)
    y_PH = _grouped(out_TH.dtype, routed, weights, tiles, by, spread)
    combine(out_TH, y_PH, None, routed.ids_TK, routed.weights_TK, len(weights.w2_NHI), accumulate)


def coverage(ids_TK: Tensor, experts: int) -> Tensor:
    """Distinct routed experts (0 … experts - 1) among these ids, as an int64 scalar on their device: what the floor
    of a step counts.
    """
    return torch.bincount(ids_TK.flatten().clamp(max=experts), minlength=experts + 1)[:experts].count_nonzero()


def _pairs(
    out_TH: Tensor, x: Rows, routed: RouterOutput, weights: ExpertWeights, tiles: ExpertTiles,
    accumulate: bool,
) -> None:  # fmt: skip
    x_TH, norm_H, eps = deferred_norm(x)
    tokens, columns = routed.ids_TK.shape
    experts, hidden, inner = weights.w2_NHI.shape
    up, down = tiles.up, tiles.down
    inner_PI = torch.empty(tokens * columns, inner, dtype=x_TH.dtype, device=out_TH.device)
    _up_pairs[(tokens, triton.cdiv(inner, up.n), columns)](
        inner_PI, x_TH, norm_H, weights.w13_NIH, routed.ids_TK, eps, experts, hidden, inner, columns, routed.shared,
        up.n, up.k, up.stages, **launch_config(x_TH, up.warps),
    )  # fmt: skip
    ahead = min(tiles.ahead, triton.cdiv(inner, down.k))
    _down_tokens[(tokens, triton.cdiv(hidden, down.n))](
        out_TH, inner_PI, weights.w2_NHI, routed.ids_TK, routed.weights_TK, experts, hidden, inner, columns,
        triton.next_power_of_2(columns), down.n, down.k, ahead, down.stages, accumulate,
        **launch_config(x_TH, down.warps),
    )  # fmt: skip


def _grouped(
    dtype: torch.dtype, routed: RouterOutput, weights: ExpertWeights, tiles: ExpertTiles, path: str, spread: int
) -> Tensor:
    """Each pair's result [P, H] in `dtype`. routed: with x, or its codes and scales."""
    direct = path == "direct"
    (tokens, columns), (experts, hidden, inner) = routed.ids_TK.shape, weights.w2_NHI.shape
    x_TH, scales, shared = routed.codes_TH, routed.scales_TG, routed.shared
    assert x_TH is not None, "the rows or codes of x"
    pairs, device, up, down = tokens * columns, x_TH.device, tiles.up, tiles.down
    count, rows, ahead = pairs, pairs, 0
    table: tuple[Tensor | None, ...] = (None, routed.ids_TK, None, None, None)
    if not direct:
        by = sort(routed.ids_TK, experts, up.m)
        count, table = by.most_tiles, (by.pair, by.tile_expert, by.tile_row, by.end_N, by.tiles)
        rows, ahead = pairs + shared * tokens, shared * triton.cdiv(tokens, up.m)
    y_PH = torch.empty(pairs, hidden, dtype=dtype, device=device)
    if path == "tma":
        inner_PI = tma_up(x_TH, columns, by, weights, up)
        down_by_tma[(SMS,)](
            y_PH, TensorDescriptor.from_tensor(inner_PI, [down.m, down.k]),
            TensorDescriptor.from_tensor(weights.w2_NHI, [1, down.n, down.k]), *table, hidden, inner,
            down.m, down.n, down.k, down.stages, SMS, **launch_config(x_TH, down.warps, down.stages),
        )  # fmt: skip
        return y_PH
    inner_PI = torch.empty(rows, inner, dtype=x_TH.dtype, device=device)
    inner_scales = None if scales is None else scales_like(rows, inner, device)
    stride, scales_stride = (0 if each is None else each.stride(1) for each in (inner_scales, scales))
    sizes = experts, hidden, inner, columns, shared, spread, direct
    _up[((count + ahead) * triton.cdiv(inner, up.n),)](
        inner_PI, inner_scales, x_TH, scales, weights.w13_NIH, weights.s13, *table, tokens, stride, scales_stride,
        *sizes, up.m, up.n, up.k, up.stages, **launch_config(x_TH, up.warps),
    )  # fmt: skip
    _down[(count * triton.cdiv(hidden, down.n),)](
        y_PH, inner_PI, inner_scales, weights.w2_NHI, weights.s2, *table, tokens, stride, *sizes,
        down.m, down.n, down.k, down.stages, **launch_config(x_TH, down.warps),
    )  # fmt: skip
    return y_PH


def tma_up(x_TH: Tensor, columns: int, by: SortedPairs, weights: ExpertWeights, tile: ExpertTile) -> Tensor:
    """`up_by_tma` of sorted pairs, `columns` of each token: → [positions, I], undefined where there is no pair."""
    _, hidden, inner = weights.w2_NHI.shape
    inner_PI = torch.empty(len(by.pair), inner, dtype=x_TH.dtype, device=x_TH.device)
    w13 = TensorDescriptor.from_tensor(weights.w13_NIH.view(-1, inner, hidden), [2, tile.n, tile.k])
    up_by_tma[(by.most_tiles * triton.cdiv(inner, tile.n),)](
        inner_PI, x_TH, w13, by.pair, by.tile_expert, by.tile_row, by.end_N, by.tiles, hidden, inner, columns,
        tile.m, tile.n, tile.k, tile.stages, **launch_config(x_TH, tile.warps, tile.stages),
    )  # fmt: skip
    return inner_PI


@triton.jit
def _up_pairs(
    inner_PI, x_TH, norm_H, w13, ids_TK, eps,
    N: constexpr, HIDDEN: constexpr, INNER: constexpr, K: constexpr, SHARED: constexpr,
    BLOCK_I: constexpr, BLOCK_H: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """inner[pair] = silu(gate · x) · (up · x) for BLOCK_I rows of the pair's expert; with norm_H of the normed x.
    Shared experts come first and do not wait for the choice: x was there before the kernel that chooses began. Tokens
    run fastest over the grid, so that a second one finds the shared experts' rows in L2.
    """
    token, block, k = tl.program_id(0), tl.program_id(1), K - 1 - tl.program_id(2)
    i, h = block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_H)
    expert = (N - K + k).to(tl.int32)
    if k < K - SHARED:
        pdl_wait(PDL)
        expert = tl.load(ids_TK + token * K + k)
    pdl_launch(PDL)
    if expert < N:
        gate_at = w13 + expert.to(tl.int64) * (2 * INNER * HIDDEN) + i[:, None] * HIDDEN + h[None, :]
        gate, up = tl.zeros([BLOCK_I, BLOCK_H], tl.float32), tl.zeros([BLOCK_I, BLOCK_H], tl.float32)
        square = tl.zeros([BLOCK_H], tl.float32)
        for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=STAGES):
            some = start + h < HIDDEN
            x = tl.load(x_TH + token * HIDDEN + start + h, mask=some, other=0.0).to(tl.float32)
            if norm_H is not None:
                square += x * x
                x *= tl.load(norm_H + start + h, mask=some, other=0.0)
            live = (i < INNER)[:, None] & some[None, :]
            w_gate = tl.load(gate_at + start, mask=live, other=0.0).to(tl.float32)
            w_up = tl.load(gate_at + start + INNER * HIDDEN, mask=live, other=0.0).to(tl.float32)
            gate += w_gate * x[None, :]
            up += w_up * x[None, :]
        scale = 1.0 if norm_H is None else tl.rsqrt(tl.sum(square) / HIDDEN + eps)
        y = gated(tl.sum(gate, 1) * scale, tl.sum(up, 1) * scale).to(inner_PI.dtype.element_ty)
        pdl_wait(PDL)
        tl.store(inner_PI + (token * K + k) * INNER + i, y, mask=i < INNER)


@triton.jit
def _down_tokens(
    out_TH, inner_PI, w2, ids_TK, weights_TK,
    N: constexpr, HIDDEN: constexpr, INNER: constexpr, K: constexpr, BLOCK_K: constexpr,
    BLOCK_H: constexpr, BLOCK_I: constexpr, AHEAD: constexpr, STAGES: constexpr,
    ACCUMULATE: constexpr, PDL: constexpr,
):  # fmt: skip
    """out[token] (+)= Σ_k weight_k · (w2 of expert k) · inner_k for BLOCK_H of H, in steps of BLOCK_I columns of all
    the token's experts. The choice was there when the kernel before this one passed its wait and let this one start: so
    the last AHEAD steps' weights are loaded before the wait for that kernel's results.
    """
    token, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    h, i = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_I)
    STEPS: constexpr = (INNER + BLOCK_I - 1) // BLOCK_I
    expert = tl.load(ids_TK + token * K + k, mask=k < K, other=N, cache_modifier=".cg")
    used = expert < N
    w_at = w2 + tl.where(used, expert, 0).to(tl.int64)[:, None, None] * (HIDDEN * INNER) + h[None, :, None] * INNER
    rows = used[:, None, None] & (h < HIDDEN)[None, :, None]
    ahead = ()
    for step in tl.static_range(STEPS - AHEAD, STEPS):
        at = step * BLOCK_I + i
        w = tl.load(w_at + at[None, None, :], mask=rows & (at < INNER)[None, None, :], other=0.0)
        ahead = ahead + (w,)  # type: ignore[assignment]
    pdl_launch(PDL)
    pdl_wait(PDL)
    weight = tl.load(weights_TK + token * K + k, mask=used, other=0.0)
    y_at = inner_PI + (token * K + k)[:, None] * INNER
    acc = tl.zeros([BLOCK_K, BLOCK_H, BLOCK_I], tl.float32)
    for step in tl.range(0, STEPS - AHEAD, num_stages=STAGES):
        at = step * BLOCK_I + i
        w = tl.load(w_at + at[None, None, :], mask=rows & (at < INNER)[None, None, :], other=0.0)
        y = tl.load(y_at + at[None, :], mask=used[:, None] & (at < INNER)[None, :], other=0.0)
        acc += w.to(tl.float32) * (y.to(tl.float32) * weight[:, None])[:, None, :]
    for step in tl.static_range(STEPS - AHEAD, STEPS):
        at = step * BLOCK_I + i
        y = tl.load(y_at + at[None, :], mask=used[:, None] & (at < INNER)[None, :], other=0.0)
        acc += ahead[step - STEPS + AHEAD].to(tl.float32) * (y.to(tl.float32) * weight[:, None])[:, None, :]
    out_at = out_TH + token * HIDDEN + h
    total = tl.sum(tl.sum(acc, 2), 0)
    if ACCUMULATE:
        total += tl.load(out_at, mask=h < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out_TH.dtype.element_ty), mask=h < HIDDEN)


@triton.jit(do_not_specialize=["tokens", "inner_stride", "scales_stride"])
def _up(
    inner_PI, inner_scales_GP, x_TH, scales_GT, w13, s13, order, tile_expert, tile_row, end_N, total_tiles,
    tokens, inner_stride, scales_stride,
    N: constexpr, HIDDEN: constexpr, INNER: constexpr, K: constexpr, SHARED: constexpr,
    SPREAD: constexpr, DIRECT: constexpr, BLOCK_M: constexpr, BLOCK_I: constexpr, BLOCK_H: constexpr,
    STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """inner[position] = silu(gate(x)) · up(x) of one tile, BLOCK_I columns of gate and the same of up; columns run
    fastest, so that an expert's weights are read by programs that run together. Direct: a tile is a pair, its position
    the pair's number, tile_expert the ids. The SHARED experts come first and do not wait for the choice, as in
    `_up_pairs`. Where pairs are sorted, their rows follow all positions, one for each token, and the tiles that the
    sort gives them stay idle.
    """
    BLOCKS: constexpr = (INNER + BLOCK_I - 1) // BLOCK_I
    EVEN: constexpr = HIDDEN % BLOCK_H == 0 and INNER % BLOCK_I == 0
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    if DIRECT:
        k = K - 1 - tile // tokens
        begin = tile % tokens * K + k
        end = begin + 1
        expert = N - K + k
        if k < K - SHARED:
            pdl_wait(PDL)
            expert = tl.load(tile_expert + begin)
        used = expert < N
    elif tile < SHARED * tl.cdiv(tokens, BLOCK_M):
        which, first = tile // tl.cdiv(tokens, BLOCK_M), tile % tl.cdiv(tokens, BLOCK_M) * BLOCK_M
        expert, end = N - SHARED + which, tokens * K + (which + 1) * tokens
        begin, used = end - tokens + first, which >= 0
    else:
        tile -= SHARED * tl.cdiv(tokens, BLOCK_M)
        pdl_wait(PDL)
        used, block, expert, begin, end = _sorted_tile(
            tile, block, tile_expert, tile_row, end_N, total_tiles, N, SPREAD, BLOCKS, BLOCK_M
        )
        used = used & (expert < N - SHARED)
    pdl_launch(PDL)
    if used:
        row = begin + tl.arange(0, BLOCK_M)
        live = row < end
        if DIRECT:
            token = tl.where(live, row, begin) // K
        else:
            sorted_M = live & (row < tokens * K)
            token = tl.load(order + row, mask=sorted_M, other=0) // K
            token = tl.where(live & (row >= tokens * K), row - (end - tokens), token)
        i, h = block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_H)
        x_at = x_TH + token[:, None].to(tl.int64) * HIDDEN + h[None, :]
        gate_at = w13 + expert.to(tl.int64) * (2 * INNER * HIDDEN) + i[None, :] * HIDDEN + h[:, None]
        gate, up = tl.zeros([BLOCK_M, BLOCK_I], tl.float32), tl.zeros([BLOCK_M, BLOCK_I], tl.float32)
        for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=STAGES):
            x = _load(
                x_at + start, live[:, None], (start + h < HIDDEN)[None, :], HIDDEN % BLOCK_H == 0 and BLOCK_M < 64
            )
            w_gate = _load(gate_at + start, (i < INNER)[None, :], (start + h < HIDDEN)[:, None], EVEN)
            w_up = _load(gate_at + start + INNER * HIDDEN, (i < INNER)[None, :], (start + h < HIDDEN)[:, None], EVEN)
            if scales_GT is not None:
                scale = tl.load(scales_GT + start // 128 * scales_stride + token, mask=live, other=0.0)
                s_at = s13 + (expert * (2 * INNER // 128) + block * BLOCK_I // 128) * (HIDDEN // 128) + start // 128
                gate += tl.dot(x, w_gate) * (scale * tl.load(s_at))[:, None]
                up += tl.dot(x, w_up) * (scale * tl.load(s_at + (INNER // 128) * (HIDDEN // 128)))[:, None]
            else:
                gate = tl.dot(x, w_gate, gate, input_precision="ieee")
                up = tl.dot(x, w_up, up, input_precision="ieee")
        y = gated(gate, up)
        if SHARED > 0:
            pdl_wait(PDL)
        at = inner_PI + row[:, None].to(tl.int64) * INNER + i[None, :]
        if scales_GT is not None:
            codes, scale = encode(y.to(tl.bfloat16).to(tl.float32))
            tl.store(at, codes, mask=live[:, None])
            tl.store(inner_scales_GP + block * inner_stride + row, scale, mask=live)
        else:
            tl.store(at, y.to(inner_PI.dtype.element_ty), mask=live[:, None] & (i < INNER)[None, :])


@triton.jit
def _sorted_tile(
    tile, block, tile_expert, tile_row, end_N, total_tiles,
    N: constexpr, SPREAD: constexpr, BLOCKS: constexpr, BLOCK_M: constexpr,
):  # fmt: skip
    """Whether this tile of sorted pairs is used, its block of columns, its expert, its first row and the expert's
    end.
    """
    used = tile < tl.load(total_tiles)
    if SPREAD > 0:
        tile, block = _spread(tl.load(total_tiles), end_N, N, SPREAD, BLOCKS, BLOCK_M)
    expert = tl.load(tile_expert + tile, mask=used, other=0)
    return used, block, expert, tl.load(tile_row + tile, mask=used, other=0), tl.load(end_N + expert)


@triton.jit
def _spread(total, end_N, N: constexpr, SPREAD: constexpr, BLOCKS: constexpr, BLOCK_M: constexpr):
    """→ tile and block of this program. After every so many programs of the routed experts, tile by tile, come those
    of one block of columns of a shared expert, which read its weights together. A shared expert has `each` tiles,
    the last in use.
    """
    each = tl.cdiv(tl.load(end_N + N - 1) - tl.load(end_N + N - 2), BLOCK_M)
    units: constexpr = SPREAD * BLOCKS
    every = (total * BLOCKS - units * each) // units
    program = tl.program_id(0)
    unit, place = program // tl.maximum(every + each, 1), program % tl.maximum(every + each, 1)
    routed = tl.where(unit < units, unit * every + place, program - units * each)
    shared = (unit < units) & (place >= every)
    tile = tl.where(shared, total - SPREAD * each + unit // BLOCKS * each + place - every, routed // BLOCKS)
    return tile, tl.where(shared, unit % BLOCKS, routed % BLOCKS)


@triton.jit
def _load(at, rows, columns, EVEN: constexpr):
    """A tile of an operand, masked unless its blocks divide the array. Rows of x past the end read row 0, unless there
    may be many of them.
    """
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=rows & columns, other=0.0)


@triton.jit(do_not_specialize=["tokens", "inner_stride"])
def _down(
    y_PH, inner_PI, inner_scales_GP, w2, s2, order, tile_expert, tile_row, end_N, total_tiles, tokens, inner_stride,
    N: constexpr, HIDDEN: constexpr, INNER: constexpr, K: constexpr, SHARED: constexpr,
    SPREAD: constexpr, DIRECT: constexpr, BLOCK_M: constexpr, BLOCK_H: constexpr, BLOCK_I: constexpr,
    STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """y[pair] = w2 · inner[position of the pair], BLOCK_H columns of one tile."""
    BLOCKS: constexpr = (HIDDEN + BLOCK_H - 1) // BLOCK_H
    EVEN: constexpr = HIDDEN % BLOCK_H == 0 and INNER % BLOCK_I == 0
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    pdl_wait(PDL)
    pdl_launch(PDL)
    if DIRECT:
        expert = tl.load(tile_expert + tile)
        used, begin, end = expert < N, tile, tile + 1
    else:
        used, block, expert, begin, end = _sorted_tile(
            tile, block, tile_expert, tile_row, end_N, total_tiles, N, SPREAD, BLOCKS, BLOCK_M
        )
    if used:
        row = begin + tl.arange(0, BLOCK_M)
        live = row < end
        pair = row if DIRECT else tl.load(order + row, mask=live, other=0)
        row = tl.where(live, row, begin)
        if SHARED > 0 and not DIRECT:  # see `_up`
            row = tl.where(expert < N - SHARED, row, tokens * K + (expert - N + SHARED) * tokens + pair // K)
        h, i = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_I)
        inner_at = inner_PI + row[:, None].to(tl.int64) * INNER + i[None, :]
        w_at = w2 + expert.to(tl.int64) * (HIDDEN * INNER) + h[None, :] * INNER + i[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        for start in tl.range(0, INNER, BLOCK_I, num_stages=STAGES):
            x = _load(
                inner_at + start, live[:, None], (start + i < INNER)[None, :], INNER % BLOCK_I == 0 and BLOCK_M != 64
            )
            w = _load(w_at + start, (h < HIDDEN)[None, :], (start + i < INNER)[:, None], EVEN)
            if inner_scales_GP is not None:
                scale = tl.load(inner_scales_GP + start // 128 * inner_stride + row, mask=live, other=0.0)
                s_at = s2 + (expert * ((HIDDEN + 127) // 128) + block * BLOCK_H // 128) * (INNER // 128) + start // 128
                acc += tl.dot(x, w) * (scale * tl.load(s_at))[:, None]
            else:
                acc = tl.dot(x, w, acc, input_precision="ieee")
        at = y_PH + pair[:, None].to(tl.int64) * HIDDEN + h[None, :]
        tl.store(at, acc.to(y_PH.dtype.element_ty), mask=live[:, None] & (h < HIDDEN)[None, :])
