"""The sum over ranks of one host, residual addition and RMSNorm in one launch, without barriers, by words of two
bf16 numbers (`kernels.peer_words`).

- one-shot (few rows): each rank sends its rows to all, and each adds up all of them.
- two-shot: row r is added up by rank r mod W, which sends the result to all. 2 (W - 1) / W of a row leave a rank for
  each row, instead of W - 1 rows.

All ranks call the same kernels with as many rows, in the same order. Sums are float32 in one order everywhere, so the
bits are equal on all ranks. Programs wait for each other: there are never more than fit on the GPU at once.

Floor of one row of 7,168 on 4 GPUs: 86 KB to the others, 0.2 us at 450 GB/s, and one way through NVLink, about 1 us.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.all_reduce.ref import NormedRows
from thalweg.kernels.launch import launch_config
from thalweg.kernels.pdl import pdl_wait
from thalweg.kernels.peer_words import (
    PROGRAMS,
    PeerMemory,
    begin,
    high_half,
    low_half,
    memory_of,
    most_warps,
    packed_halves,
    receive,
    send,
)
from thalweg.kernels.quantize.triton import encode, scales_like

MOST_PARTS = 8  # programs of a row
WARPS, WIDE = 16, 1 << 14  # words that so many warps hold at a time
ALL, SEND, ADD, RECEIVE = (constexpr(phase) for phase in range(4))


@dataclass(frozen=True, slots=True)
class PeerBuffers(PeerMemory):
    """See `bytes_for`."""

    rows: int  # the most of a call
    width: int  # of a row, in numbers


def bytes_for(ranks: int, rows: int, width: int) -> int:
    """Memory of a rank: twice what all ranks send, and what the owners of rows do."""
    return 2 * (ranks + 1) * rows * (width // 2) * 8


@triton.jit
def _weights(weight, WORDS: constexpr, BLOCK: constexpr):
    """Of the norm, for the low and the high halves of words. They depend on nothing in the step."""
    word = tl.arange(0, BLOCK)
    low = tl.load(weight + 2 * word, mask=word < WORDS, other=0.0)
    return low, tl.load(weight + 2 * word + 1, mask=word < WORDS, other=0.0)


@triton.jit
def _store_normed(
    low, high, row, first, low_weight, high_weight, x_out, rows_out, codes, scales, scales_stride, eps,
    WORDS: constexpr, BLOCK: constexpr, PART: constexpr,
):  # fmt: skip
    """Stores PART words from the first on of a row of the stream, and of its norm."""
    word = tl.arange(0, BLOCK)
    own = (word >= first) & (word < tl.minimum(first + PART, WORDS))
    tl.store(x_out + row * WORDS + word, packed_halves(low, high), mask=own)
    scale = tl.rsqrt(tl.sum(low * low + high * high) / (2 * WORDS) + eps)
    words = packed_halves(low * scale * low_weight, high * scale * high_weight)
    tl.store(rows_out + row * WORDS + word, words, mask=own)
    if codes is not None:
        packed, scale_G = encode(tl.reshape(tl.join(low_half(words), high_half(words)), [BLOCK // 64, 128]))
        group, lane = tl.arange(0, BLOCK // 64), tl.arange(0, 128)
        here = (group * 64 >= first) & (group * 64 < tl.minimum(first + PART, WORDS))
        tl.store(codes + row * 2 * WORDS + group[:, None] * 128 + lane[None, :], packed, mask=here[:, None])
        tl.store(scales + group.to(tl.int64) * scales_stride + row, scale_G, mask=here)


@triton.jit
def _sum(old, got):
    """Words of the stream and of all ranks → what the sum is, in bf16 numbers."""
    return packed_halves(low_half(old) + tl.sum(low_half(got), 0), high_half(old) + tl.sum(high_half(got), 0))


ARGUMENTS = ["rank", "rows", "scales_stride"]


@triton.jit(do_not_specialize=ARGUMENTS)
def _one_shot(
    partial, x, weight, x_out, rows_out, codes, scales, peers, state, failed, rank, rows, capacity, scales_stride, eps,
    WORDS: constexpr, BLOCK: constexpr, PART: constexpr, BLOCK_PART: constexpr, W: constexpr, PHASE: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Program (r, p): part p of row r."""
    row, first = tl.program_id(0), tl.program_id(1) * PART
    low_weight, high_weight = _weights(weight, WORDS, BLOCK)
    own, memories = memory_of(peers, rank), ()
    for step in tl.static_range(W):  # each rank begins with another peer
        memories = memories + (memory_of(peers, (rank + step) % W),)  # type: ignore[assignment]
    pdl_wait(PDL)
    call = begin(state, tl.num_programs(0) * tl.num_programs(1), PHASE == ALL or PHASE == RECEIVE)
    base = (call & 1).to(tl.int64) * (W + 1) * capacity
    if PHASE == ALL or PHASE == SEND:
        lane = tl.arange(0, BLOCK_PART)
        mine = first + lane
        is_mine = (lane < PART) & (mine < WORDS)
        words = tl.load(partial + row * WORDS + mine, mask=is_mine, other=0)
        for step in tl.static_range(W):
            send(words, call, memories[step] + base + rank * capacity + row * WORDS + mine, is_mine)
    if PHASE == ALL or PHASE == RECEIVE:
        word, source = tl.arange(0, BLOCK), tl.arange(0, W)
        inside = word < WORDS
        old = tl.load(x + row * WORDS + word, mask=inside, other=0)
        at = own + base + source[:, None] * capacity + row * WORDS + word[None, :]
        new = _sum(old, receive(at, inside[None, :] & (source[:, None] < W), call, failed))
        _store_normed(
            low_half(new), high_half(new), row, first, low_weight, high_weight, x_out, rows_out, codes, scales,
            scales_stride, eps, WORDS, BLOCK, PART,
        )  # fmt: skip


@triton.jit(do_not_specialize=ARGUMENTS)
def _two_shot(
    partial, x, weight, x_out, rows_out, codes, scales, peers, state, failed, rank, rows, capacity, scales_stride, eps,
    WORDS: constexpr, BLOCK: constexpr, PART: constexpr, BLOCK_PART: constexpr, W: constexpr, PHASE: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Program (i, p): part p of rows i, i + programs of axis 0, ...: first it sends all of them, then it adds up those
    that this rank owns, then it takes the results.
    """
    first, every = tl.program_id(1) * PART, tl.num_programs(0)
    low_weight, high_weight = _weights(weight, WORDS, BLOCK)
    pdl_wait(PDL)
    call = begin(state, every * tl.num_programs(1), PHASE == ALL or PHASE == RECEIVE)
    base = (call & 1).to(tl.int64) * (W + 1) * capacity
    lane = tl.arange(0, BLOCK_PART)
    mine = first + lane
    is_mine = (lane < PART) & (mine < WORDS)
    if PHASE == ALL or PHASE == SEND:
        for row in range(tl.program_id(0), rows, every):
            at = row * WORDS + mine
            to = memory_of(peers, row % W) + base + rank * capacity + at
            send(tl.load(partial + at, mask=is_mine, other=0), call, to, is_mine)
    if PHASE == ALL or PHASE == ADD:
        source = tl.arange(0, W)
        for row in range(tl.program_id(0), rows, every):
            if row % W == rank:
                at = row * WORDS + mine
                old = tl.load(x + at, mask=is_mine, other=0)
                sent = memory_of(peers, rank) + base + source[:, None] * capacity + at[None, :]
                new = _sum(old, receive(sent, is_mine[None, :] & (source[:, None] < W), call, failed))
                for step in tl.static_range(W):
                    to = memory_of(peers, (rank + step) % W) + base + W * capacity
                    send(new, call, to + at, is_mine)
    if PHASE == ALL or PHASE == RECEIVE:
        word = tl.arange(0, BLOCK)
        for row in range(tl.program_id(0), rows, every):
            sent = memory_of(peers, rank) + base + W * capacity + row * WORDS + word
            new = receive(sent, word < WORDS, call, failed)
            _store_normed(
                low_half(new), high_half(new), row, first, low_weight, high_weight, x_out, rows_out, codes, scales,
                scales_stride, eps, WORDS, BLOCK, PART,
            )  # fmt: skip


def warps_for(ranks: int, block: int, block_part: int, two_shot: bool) -> int:
    """block, block_part: words of a row and of a program's part of it, rounded up to a power of two."""
    received = min(ranks * block_part, block) if two_shot else ranks * block  # words of the smallest tile
    return most_warps(received, WARPS if ranks * block <= WIDE else 2 * WARPS)


def add_norm(
    partial_TH: Tensor,
    x_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    buffers: PeerBuffers,
    *,
    two_shot: bool,
    with_codes: bool = False,
    phase: constexpr = ALL,
) -> NormedRows:
    """See `ref.add_norm`: every rank calls it with its own part of the sum. bf16, contiguous; H a multiple of 128.
    one-shot takes up to PROGRAMS rows. phase: one of the parts that follow each other, for a test on one GPU.
    """
    rows, width = x_TH.shape
    assert rows <= buffers.rows and width == buffers.width and width % 128 == 0, "the buffers are made for other rows"
    assert two_shot or rows <= PROGRAMS, "programs wait for each other: all must run at once"
    words, block = width // 2, triton.next_power_of_2(width // 2)
    parts = 1 << min(max(PROGRAMS // rows, 1), MOST_PARTS).bit_length() - 1
    part = triton.cdiv(triton.cdiv(words, parts), 64) * 64  # whole groups of 128 numbers
    x_out, rows_out = torch.empty_like(x_TH), torch.empty_like(x_TH)
    codes = torch.empty_like(x_TH, dtype=torch.float8_e4m3fn) if with_codes else None
    scales = scales_like(rows, width, x_TH.device) if with_codes else None
    tensors = (x.view(torch.int32) for x in (partial_TH, x_TH))
    outputs = x_out.view(torch.int32), rows_out.view(torch.int32), codes, scales
    grid = min(rows, PROGRAMS // parts) if two_shot else rows, triton.cdiv(words, part)
    block_part = triton.next_power_of_2(part)
    config = launch_config(x_TH, warps_for(buffers.size, block, block_part, two_shot))
    (_two_shot if two_shot else _one_shot)[grid](
        *tensors, weight_H, *outputs, buffers.peers_W, buffers.state, buffers.failed, buffers.rank, rows,
        buffers.rows * words, 0 if scales is None else scales.stride(1), eps,
        WORDS=words, BLOCK=block, PART=part, BLOCK_PART=block_part, W=buffers.size, PHASE=phase,
        **config,
    )  # fmt: skip
    return NormedRows(x_out, rows_out, codes, scales)
