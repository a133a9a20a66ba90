"""One-sided dispatch and combine between the ranks of a host, one launch each: ranks write into each other's memory
(`kernels.peer_words`).

Rows are bytes of any kind. A row goes to the ranks that have one of its experts, or to all. The receiver's memory has a
count and a row area for each sender, whose rows come first in it. So shapes are static, and the counts stay on the
device. Each program sends all its rows before it waits for others.

Dispatch and combine have separate memory, with two sets of buffers each. A rank that finishes a dispatch has the counts
of all ranks, so all have begun that dispatch and finished the combine before it. Two sets are therefore enough.

Floor of 64 rows of 7.4 KB to 3 other GPUs: 2.8 MB in words of twice the size, 6.3 us at 450 GB/s. Combine sends bf16
results, 12.2 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

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
    receive,
    send,
)

ALL, SEND, RECEIVE = (constexpr(phase) for phase in range(3))


@dataclass(frozen=True, slots=True)
class PeerRows(PeerMemory):
    """See `ref.bytes_for`."""

    rows: int  # the most of a rank
    words: int  # the most of a row


class Destinations(NamedTuple):
    """Where the rows of a rank go."""

    goes_RN: Tensor  # bool: whether a row goes to a rank
    places_RN: Tensor  # int32: where it lies among those that go there
    counts_R: Tensor  # int32: how many go there

    @classmethod
    def of(cls, goes_RN: Tensor) -> Destinations:
        counts_RN = goes_RN.cumsum(1, dtype=torch.int32)
        return cls(goes_RN, counts_RN - 1, counts_RN[:, -1].contiguous())


@triton.jit
def _set(memory, call, W: constexpr, capacity):
    """Where a set of buffers begins: first the numbers of rows of each rank, then their rows."""
    return memory + (call & 1).to(tl.int64) * W * (1 + capacity)


ARGUMENTS = ["rank", "rows", "capacity"]


@triton.jit(do_not_specialize=ARGUMENTS)
def _dispatch(
    x, goes, places, counts, out, counts_out, peers, state, failed, rank, rows, capacity,
    WORDS: constexpr, BLOCK: constexpr, MARKED: constexpr, W: constexpr, PHASE: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program i: rows i, i + programs, ..., to and from each rank."""
    first, every = tl.program_id(0), tl.num_programs(0)
    pdl_wait(PDL)
    call = begin(state, every, PHASE == ALL or PHASE == RECEIVE)
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    if PHASE == ALL or PHASE == SEND:
        if first < W:
            send(tl.load(counts + first), call, _set(memory_of(peers, first), call, W, capacity) + rank, None)
        for row in range(first, rows, every):
            words = tl.load(x + row * WORDS + word, mask=inside, other=0)
            for step in tl.static_range(W):  # each rank begins with another peer
                to = (rank + step) % W
                if tl.load(goes + to * rows + row):
                    at = _set(memory_of(peers, to), call, W, capacity) + W + rank * capacity
                    send(words, call, at + tl.load(places + to * rows + row) * WORDS + word, inside)
    if PHASE == ALL or PHASE == RECEIVE:
        own = _set(memory_of(peers, rank), call, W, capacity)
        for source in tl.static_range(W):
            count = tl.max(receive(own + source + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1), call, failed))
            count = tl.minimum(count, rows)
            if first == 0:
                tl.store(counts_out + source, count)
            for row in range(first, rows, every):
                place = row * WORDS + word
                if row < count:
                    got = receive(own + W + source * capacity + place, inside, call, failed)
                else:
                    got = tl.where(word < MARKED, -1, 0)
                tl.store(out + source * rows * WORDS + place, got, mask=inside)


@triton.jit(do_not_specialize=ARGUMENTS)
def _combine(
    results, goes, places, counts, out, peers, state, failed, rank, rows, capacity,
    WORDS: constexpr, BLOCK: constexpr, W: constexpr, PHASE: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program i: rows i, i + programs, ... counts: rows that came from each rank."""
    first, every = tl.program_id(0), tl.num_programs(0)
    pdl_wait(PDL)
    call = begin(state, every, PHASE == ALL or PHASE == RECEIVE)
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    if PHASE == ALL or PHASE == SEND:
        for step in tl.static_range(W):
            home = (rank + step) % W
            at = _set(memory_of(peers, home), call, W, capacity) + W + rank * capacity
            for row in range(first, tl.load(counts + home), every):
                place = row * WORDS + word
                words = tl.load(results + home * rows * WORDS + place, mask=inside, other=0)
                send(words, call, at + place, inside)
    if PHASE == ALL or PHASE == RECEIVE:
        own = _set(memory_of(peers, rank), call, W, capacity) + W
        for row in range(first, rows, every):
            low = tl.zeros([BLOCK], tl.float32)
            high = tl.zeros([BLOCK], tl.float32)
            for source in tl.static_range(W):
                if tl.load(goes + source * rows + row):
                    at = own + source * capacity + tl.load(places + source * rows + row) * WORDS
                    words = receive(at + word, inside, call, failed)
                    low += low_half(words)
                    high += high_half(words)
            number = tl.arange(0, 2 * BLOCK)
            sums = tl.reshape(tl.join(low, high), [2 * BLOCK])
            tl.store(out + row * 2 * WORDS + number, sums, mask=number < 2 * WORDS)


def warps_for(block: int) -> int:
    """block: words of a row, rounded up to a power of two."""
    return most_warps(block, 8 if block >= 2048 else 4)


def _options(x: Tensor, rows: int, words: int) -> tuple[tuple[int], int, dict[str, Any]]:
    """Grid, block, and how it is launched."""
    block = triton.next_power_of_2(words)
    return (max(min(rows, PROGRAMS), 8),), block, launch_config(x, warps_for(block))


def dispatch(
    rows_NW: Tensor, to: Destinations, memory: PeerRows, marked: int, phase: constexpr = ALL
) -> tuple[Tensor, Tensor]:
    """See `ref.dispatch`, of this rank: → int32 [R, N, W] and how many rows came from each rank, int32 [R]. rows:
    int32, contiguous. phase: one of the parts that follow each other, for a test on one GPU.
    """
    rows, words = rows_NW.shape
    assert rows <= memory.rows and words <= memory.words and memory.size <= 8, "the memory is made for other rows"
    out, arrived_R = rows_NW.new_empty(memory.size, rows, words), torch.empty_like(to.counts_R)
    grid, block, config = _options(rows_NW, rows, words)
    _dispatch[grid](
        rows_NW, to.goes_RN, to.places_RN, to.counts_R, out, arrived_R, memory.peers_W, memory.state, memory.failed,
        memory.rank, rows, memory.rows * memory.words, WORDS=words, BLOCK=block, MARKED=marked, W=memory.size,
        PHASE=phase, **config,
    )  # fmt: skip
    return out, arrived_R


def combine(
    results_RNH: Tensor, to: Destinations, arrived_R: Tensor, memory: PeerRows, phase: constexpr = ALL
) -> Tensor:
    """See `ref.combine`, of this rank: results bf16 [R, N, H] of the rows that came → float32 [N, H]. to: as of
    `dispatch`, and arrived what it returned.
    """
    _, rows, width = results_RNH.shape
    words = width // 2
    assert rows <= memory.rows and words <= memory.words, "the memory is made for other rows"
    out = torch.empty(rows, width, dtype=torch.float32, device=results_RNH.device)
    grid, block, config = _options(results_RNH, rows, words)
    _combine[grid](
        results_RNH.view(torch.int32), to.goes_RN, to.places_RN, arrived_R, out, memory.peers_W, memory.state,
        memory.failed, memory.rank, rows, memory.rows * memory.words, WORDS=words, BLOCK=block, W=memory.size,
        PHASE=phase, **config,
    )  # fmt: skip
    return out
