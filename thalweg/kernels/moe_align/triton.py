"""Between tokens and experts: pairs of (token, chosen expert) sorted by expert, rows gathered in that order, results
summed by token.

T tokens, K experts a token, P = T · K pairs numbered t · K + k, N experts; the id N is none. Everything stays on the
device and every grid depends on shapes only. Floors: the sort moves 12 bytes a pair, which is launch time (many pairs
take three launches: counts of each chunk, their sums over the chunks, places); `combine` reads P · H bf16 and rewrites
the residual, 8,192 tokens of V2-Lite in 109 µs at 3.1 TB/s.
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
from thalweg.kernels.quantize.triton import scales_like

CHUNK = 128  # pairs of one program of the sort, which compares them with one another


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs sorted by expert: int32 tensors on the device, each with a little more room than it needs."""

    pair: Tensor  # position → pair
    position_P: Tensor  # pair → position
    tile_expert: Tensor  # of each tile of `block` positions
    tile_row: Tensor  # first position of each tile
    end_N: Tensor  # the position after an expert's last one
    tiles: Tensor  # [1] tiles in use
    most_tiles: int  # the most that can be in use: the grid
    block: int  # positions of a tile


def way_of(pairs: int) -> str:
    """The way the sort's programs share their counts. "alone": one program. "few": each program adds up all counts.
    "many": a kernel of its own adds them up. (288 pairs on an H100: 6.9 us, by one program 32.9.)
    """
    return "alone" if pairs <= CHUNK else "few" if pairs <= 16 * CHUNK else "many"


def sort(ids_TK: Tensor, experts: int, block_m: int, aligned: bool = False) -> SortedPairs:
    """Sorts pairs by expert, stably; expert `experts` comes last and gets no tile. aligned: each expert's first
    position is a multiple of block_m (the places between are undefined). Otherwise experts are packed.
    """
    pairs = ids_TK.numel()
    way = way_of(pairs)
    chunks, bins = triton.cdiv(pairs, CHUNK), triton.next_power_of_2(experts + 1)
    most = min(pairs, (pairs + min(experts, pairs) * (block_m - 1)) // block_m)
    counts = 0 if way == "alone" else (chunks + 1) * bins
    sizes = [most * block_m if aligned else pairs, pairs, most, most, bins, 1, counts]
    # in units of 16 bytes: a kernel is compiled for the alignment of its arguments
    sizes = [triton.cdiv(size, 4) * 4 for size in sizes]
    parts = torch.split(torch.empty(sum(sizes), dtype=torch.int32, device=ids_TK.device), sizes)
    config = launch_config(ids_TK, 4)
    if way != "alone":
        _count[(chunks,)](parts[6], ids_TK, pairs, CHUNK, bins, **config)
    if way == "many":
        _sum[(triton.cdiv(bins, 4),)](parts[6], chunks, bins, **config)
    _place[(chunks,)](*parts, ids_TK, pairs, chunks, experts, CHUNK, bins, block_m, aligned, way, **config)
    pair, position, tile_expert, tile_row, end, tiles, _ = parts
    return SortedPairs(pair, position, tile_expert, tile_row, end, tiles[:1], most, block_m)


def gather(
    x_TH: Tensor, scales_TG: Tensor | None, by: SortedPairs, ids_TK: Tensor, experts: int
) -> tuple[Tensor, Tensor | None]:
    """→ the rows [R, H] of an order of these ids, and where x is e4m3 their scales [R, H / 128] (MN-major); undefined
    where there is no pair.
    """
    (tokens, hidden), rows, device = x_TH.shape, by.most_tiles * by.block, x_TH.device
    a_RH = torch.empty(rows, hidden, dtype=x_TH.dtype, device=device)
    a_scales = None if scales_TG is None else scales_like(rows, hidden, device)
    _gather[(tokens,)](
        a_RH, a_scales, x_TH, scales_TG, by.position_P, ids_TK,
        0 if a_scales is None else a_scales.stride(1), 0 if scales_TG is None else scales_TG.stride(1),
        experts, hidden, ids_TK.shape[1], triton.next_power_of_2(hidden), **launch_config(x_TH, 4),
    )  # fmt: skip
    return a_RH, a_scales


def combine(
    out_TH: Tensor,
    y_RH: Tensor,
    position_P: Tensor | None,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: int,
    accumulate: bool = True,
) -> None:
    """out[t] (+)= Σ_k weight[t, k] · y[position of pair (t, k)] in float32. Without positions, a pair's row is its own
    number. accumulate=False stores the sum.
    """
    tokens, columns = ids_TK.shape
    hidden = out_TH.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        out_TH, y_RH, position_P, ids_TK, weights_TK, experts, hidden, columns, block, accumulate,
        **launch_config(out_TH, 4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs"])
def _count(counts_CB, ids_P, pairs, CHUNK: constexpr, BINS: constexpr, PDL: constexpr):
    """Pairs of each expert in each chunk."""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    pdl_launch(PDL)  # the next kernel may have work that needs no order
    pdl_wait(PDL)
    ids = tl.load(ids_P + at, mask=at < pairs, other=0)
    tl.store(counts_CB + chunk * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS, mask=at < pairs))


@triton.jit(do_not_specialize=["chunks"])
def _sum(counts_CB, chunks, BINS: constexpr, PDL: constexpr):
    """Each chunk's counts become the sums of the chunks before it, and the row after the last the sums of all."""
    bins, c = tl.program_id(0) * 4 + tl.arange(0, 4), tl.arange(0, 256)
    pdl_wait(PDL)
    pdl_launch(PDL)
    total = tl.zeros([4], tl.int32)
    for first in range(0, chunks, 256):
        at = counts_CB + (first + c)[:, None] * BINS + bins[None, :]
        inside = (first + c < chunks)[:, None] & (bins < BINS)[None, :]
        part = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(part, 0) - part, mask=inside)
        total += tl.sum(part, 0)
    tl.store(counts_CB + chunks * BINS + bins, total, mask=bins < BINS)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _place(
    pair, position_P, tile_expert, tile_row, end_B, total_tiles, counts_CB, ids_P, pairs, chunks,
    N: constexpr, CHUNK: constexpr, BINS: constexpr, BLOCK_M: constexpr, ALIGNED: constexpr,
    WAY: constexpr, PDL: constexpr,
):  # fmt: skip
    """A pair's position: where its expert starts, plus the expert's pairs in the chunks before, plus those before it in
    its own chunk.
    """
    chunk, bins = tl.program_id(0), tl.arange(0, BINS)
    i = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + i < pairs
    pdl_launch(PDL)  # the next kernel may have work that needs no order
    pdl_wait(PDL)
    ids = tl.load(ids_P + chunk * CHUNK + i, mask=inside, other=N)
    if WAY == "alone":
        count, before = tl.histogram(ids, BINS, mask=inside), tl.zeros([BINS], tl.int32)
    elif WAY == "few":
        c = tl.arange(0, 16)
        part = tl.load(counts_CB + c[:, None] * BINS + bins[None, :], mask=(c < chunks)[:, None], other=0)
        count, before = tl.sum(part, 0), tl.sum(tl.where((c < chunk)[:, None], part, 0), 0)
    else:
        count, before = tl.load(counts_CB + chunks * BINS + bins), tl.load(counts_CB + chunk * BINS + bins)
    each = tl.where(bins < N, (count + BLOCK_M - 1) // BLOCK_M, 0)
    room = tl.where(bins < N, each * BLOCK_M, count) if ALIGNED else count
    start = tl.cumsum(room, 0) - room
    rank = tl.zeros([CHUNK], tl.int32)
    for first in range(0, CHUNK, 32):
        j = first + tl.arange(0, 32)
        other = tl.load(ids_P + chunk * CHUNK + j, mask=chunk * CHUNK + j < pairs, other=-1)
        # others are the rows: a thread then adds up its own columns
        rank += tl.sum(((other[:, None] == ids[None, :]) & (j[:, None] < i[None, :])).to(tl.int32), 0)
    position = tl.gather(start + before, ids, 0) + rank
    placed = inside & (ids < N) if ALIGNED else inside
    tl.store(pair + position, chunk * CHUNK + i, mask=placed)
    tl.store(position_P + chunk * CHUNK + i, position, mask=inside)
    if chunk == 0:
        tl.store(end_B + bins, start + count)
        tl.store(total_tiles, tl.sum(each, 0))
    first_tile = tl.cumsum(each, 0) - each
    for j in range(chunk, tl.max(each, 0), chunks):
        tl.store(tile_expert + first_tile + j, bins, mask=j < each)
        tl.store(tile_row + first_tile + j, start + j * BLOCK_M, mask=j < each)


@triton.jit
def _combine(
    out_TH, y_RH, position_P, ids_TK, weights_TK,
    N: constexpr, HIDDEN: constexpr, K: constexpr, BLOCK: constexpr, ACCUMULATE: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Rows of no expert were never written: they are not read."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_launch(PDL)
    at = out_TH + token * HIDDEN + h
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        chosen = tl.load(ids_TK + token * K + k) < N
        row = token * K + k
        if position_P is not None:
            row = tl.load(position_P + row).to(tl.int64)
        y = tl.load(y_RH + row * HIDDEN + h, mask=chosen & (h < HIDDEN), other=0.0)
        total += tl.load(weights_TK + token * K + k) * y.to(tl.float32)
    if ACCUMULATE:
        total += tl.load(at, mask=h < HIDDEN, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_TH.dtype.element_ty), mask=h < HIDDEN)


@triton.jit(do_not_specialize=["a_stride", "scales_stride"])
def _gather(
    a_RH, a_scales_GR, x_TH, scales_GT, position_P, ids_TK, a_stride, scales_stride,
    N: constexpr, HIDDEN: constexpr, K: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    """One token's row and scales to the positions of all its pairs: x is read once."""
    token, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    group = tl.arange(0, (BLOCK + 127) // 128)
    pdl_wait(PDL)
    pdl_launch(PDL)
    rows, chosen = (), ()
    for k in tl.static_range(K):  # before the stores, which the compiler moves no load over
        rows = rows + (tl.load(position_P + token * K + k).to(tl.int64),)  # type: ignore[assignment]
        chosen = chosen + (tl.load(ids_TK + token * K + k) < N,)  # type: ignore[assignment]
    x = tl.load(x_TH + token * HIDDEN + h, mask=h < HIDDEN)
    if scales_GT is not None:
        scales = tl.load(scales_GT + group * scales_stride + token, mask=group < HIDDEN // 128)
    for k in tl.static_range(K):
        tl.store(a_RH + rows[k] * HIDDEN + h, x, mask=chosen[k] & (h < HIDDEN))
        if scales_GT is not None:
            at = a_scales_GR + group.to(tl.int64) * a_stride + rows[k]
            tl.store(at, scales, mask=chosen[k] & (group < HIDDEN // 128))
