"""Words that the GPUs of a host write into each other's memory (torch's symmetric memory), without barriers.

A word has 64 bits: 32 bits of data, and above them the number of the call. It arrives whole, so a rank that reads this
call's number has the data too, and nothing has to be cleared. An operation uses two sets of buffers in turn. Two are
enough if no rank can finish a call before all others have begun it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

PROGRAMS = 128  # They wait for each other, so all must run at once. An H100 has 132 multiprocessors, an H200 too.
COUNTS = constexpr(256)  # more than PROGRAMS
TRIES = constexpr(1 << 26)  # reads before a kernel gives up, so that it does not wait forever for a rank that has ended


@cache
def failed_on(device: torch.device) -> Tensor:
    """int32 [1]: 1 once a kernel on this device has given up waiting for another rank. Its results are invalid."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """What a rank receives into, and where its peers receive."""

    peers_W: Tensor  # int64: address of each rank's memory as seen from here, this rank's too
    state: Tensor  # int64 [1]: COUNTS times the number of the call, and the programs that have begun it
    failed: Tensor  # int32 [1], see `failed_on`
    rank: int

    @classmethod
    def of(cls, addresses: list[int], rank: int, device: torch.device, **more: Any) -> Self:
        """addresses: of zeroed memory on each rank. more: the fields of a subclass."""
        peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(peers, torch.tensor([int(COUNTS)], device=device), failed_on(device), rank, **more)

    @property
    def call(self) -> int:
        """The number of the next call."""
        return int(self.state) // int(COUNTS)

    @property
    def size(self) -> int:
        return len(self.peers_W)


def most_warps(words: int, wanted: int) -> int:
    """Of these warps, how many a program may have that waits for tiles of so many words or more: each word in one
    thread. Where several threads hold a word they look at different times, and `receive` asks only one of them.
    """
    assert words >= 32, "threads of a warp would hold a word twice"
    return min(wanted, words // 32)


@triton.jit
def low_half(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def packed_halves(low, high):
    """int32 of two float32, rounded to bf16."""
    bits = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return bits | (low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def memory_of(peers, rank):
    return tl.load(peers + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def send(words, call, to, mask):
    tl.store(to, (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF), mask=mask)


@triton.jit
def receive(at, mask, call, failed):
    """Waits until the words at these addresses are of this call. → their data, int32. Sets `failed` if it gives up.

    Only words that have not come are read again: a tile may have 130 KB, and all programs of a GPU poll. The program
    has at most `most_warps`.
    """
    got = tl.load(at, mask=mask, other=0, volatile=True)
    missing = mask & ((got >> 32).to(tl.int32) != call)
    tries = 0
    while (tl.max(missing.to(tl.int32)) > 0) & (tries < TRIES):
        got = tl.where(missing, tl.load(at, mask=missing, other=0, volatile=True), got)
        missing = mask & ((got >> 32).to(tl.int32) != call)
        tries += 1
    if tl.max(missing.to(tl.int32)) > 0:
        tl.store(failed, 1)
    return got.to(tl.int32)


@triton.jit
def begin(state, programs, IS_COUNTED: constexpr):
    """→ the number of the call, one read for all threads of a program. IS_COUNTED: this is the launch that ends the
    call. Its last program to come here sets the next number: all others have this one by then. (A count at the end of a
    program would wait for what that has sent.)
    """
    if IS_COUNTED:
        before = tl.atomic_add(state, 1, sem="relaxed")
        if before % COUNTS == programs - 1:
            tl.atomic_add(state, COUNTS - programs, sem="relaxed")
    else:
        before = tl.load(state)
    return (before // COUNTS).to(tl.int32)
