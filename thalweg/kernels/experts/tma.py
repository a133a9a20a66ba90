"""Grouped products of many tokens in bf16 whose weights come by TMA, on a Hopper: the kernels of path "tma".

Gate and up rows are one box of three dims, [2, columns, H], so that one instruction multiplies 256 columns and reads
its rows of x from shared memory once. Rows of x are gathered by pointers, since TMA reads neighbours only; those of the
inner activations are neighbours. A tile past the end of its expert reads rows that it does not store.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.silu_mul.triton import gated


@triton.jit
def up_by_tma(
    inner_PI, x_TH, w13, order, tile_expert, tile_row, end_N, total_tiles,
    HIDDEN: constexpr, INNER: constexpr, K: constexpr,
    BLOCK_M: constexpr, BLOCK_I: constexpr, BLOCK_H: constexpr, STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """inner[position] = silu(gate(x)) · up(x), BLOCK_I columns of one tile. w13: [2 N, I, H]; HIDDEN is a multiple of
    BLOCK_H. Columns run fastest, so that programs that run together share rows of x and an expert's weights.
    """
    BLOCKS: constexpr = (INNER + BLOCK_I - 1) // BLOCK_I
    tile, column = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK_I
    pdl_wait(PDL)
    pdl_launch(PDL)
    if tile < tl.load(total_tiles):
        expert = tl.load(tile_expert + tile)
        row, i = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_I)
        live = (row < tl.load(end_N + expert))[:, None]
        token = tl.load(order + row[:, None], mask=live, other=0) // K
        x_at = x_TH + token.to(tl.int64) * HIDDEN + tl.arange(0, BLOCK_H)[None, :]
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_I], tl.float32)
        for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=STAGES):
            x = tl.load(x_at + start, mask=live, other=0.0)
            w = w13.load([2 * expert, column, start]).reshape(2 * BLOCK_I, BLOCK_H)
            acc = tl.dot(x, w.T, acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_I)), (0, 2, 1)))
        at = inner_PI + row[:, None].to(tl.int64) * INNER + i[None, :]
        tl.store(at, gated(gate, up).to(inner_PI.dtype.element_ty), mask=live & (i < INNER)[None, :])


@triton.jit
def down_by_tma(
    y_PH, inner_PI, w2, order, tile_expert, tile_row, end_N, total_tiles,
    HIDDEN: constexpr, INNER: constexpr, BLOCK_M: constexpr, BLOCK_H: constexpr, BLOCK_I: constexpr,
    STAGES: constexpr, PROGRAMS: constexpr, PDL: constexpr,
):  # fmt: skip
    """y[pair] = w2 · inner[position of the pair], BLOCK_H columns of one tile after the other. w2: [N, H, I]. The loops
    over tiles and over their steps are one pipeline, which loads the next tile's first operands while the last one's
    results are stored.
    """
    BLOCKS: constexpr = (HIDDEN + BLOCK_H - 1) // BLOCK_H
    pdl_wait(PDL)
    pdl_launch(PDL)
    for program in tl.range(tl.program_id(0), tl.load(total_tiles) * BLOCKS, PROGRAMS, flatten=True):
        tile, column = program // BLOCKS, program % BLOCKS * BLOCK_H
        expert, first = tl.load(tile_expert + tile), tl.load(tile_row + tile)
        acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        for step in tl.range(0, (INNER + BLOCK_I - 1) // BLOCK_I, num_stages=STAGES):
            w = w2.load([expert, column, step * BLOCK_I]).reshape(BLOCK_H, BLOCK_I)
            acc = tl.dot(inner_PI.load([first, step * BLOCK_I]), w.T, acc)
        row, h = first + tl.arange(0, BLOCK_M)[:, None], column + tl.arange(0, BLOCK_H)[None, :]
        live = row < tl.load(end_N + expert)
        at = y_PH + tl.load(order + row, mask=live, other=0).to(tl.int64) * HIDDEN + h
        tl.store(at, acc.to(y_PH.dtype.element_ty), mask=live & (h < HIDDEN))
