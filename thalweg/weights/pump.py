"""From files to a GPU as fast as the page cache or the disk gives: threads read pieces into a ring of pinned memory, a
side stream copies them.

The host holds the ring and nothing else. A piece's slot is read into again as soon as its copy is done, so reading,
copying and what the caller does with the tensors run at the same time; the caller gets them in order.
"""

from __future__ import annotations

import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError

PIECE = 8 << 20  # bytes: an expert of DeepSeek's is one piece; pinning memory takes 0.5 s a GB, so the ring is small
THREADS = 8  # one of them copies some 6 GB/s out of the page cache
SLOTS = 2 * THREADS  # while half of the ring is read into, the other half is copied


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A tensor in a file: row-major at byte `offset`. rest: what is still to be cut out of it, once it is there."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    rest: tuple[slice, ...] = ()

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def taken(self, take: tuple[slice, ...]) -> FileSlice:
        """A slice of it. Rows are left in the file; what is cut of the other dims is read and left out on the
        device.
        """
        if not take:
            return self
        first, stop, step = take[0].indices(self.shape[0])
        if step != 1:
            return FileSlice(self.path, self.offset, self.shape, self.dtype, take)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(stop - first, 0), *self.shape[1:])
        rest = (slice(None), *take[1:]) if len(take) > 1 else ()
        return FileSlice(self.path, self.offset + first * row, shape, self.dtype, rest)


class FilePiece(NamedTuple):
    """Bytes `offset` to `offset + size` of a file are bytes `at` and on of span number `span`."""

    span: int
    path: Path
    offset: int
    at: int
    size: int


def pieces(spans: Sequence[FileSlice], most: int = PIECE) -> Iterator[FilePiece]:
    """The spans in order, cut into pieces of up to `most` bytes; an empty one is a piece of 0."""
    for number, span in enumerate(spans):
        for at in range(0, max(span.size, 1), most):
            yield FilePiece(number, span.path, span.offset + at, at, min(most, span.size - at))


class RingSlot:
    """A part of the ring. copied: when what lies in it has left."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.bytes = memory, memory.numpy().data
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, file: int, piece: FilePiece) -> None:
        """Reads a piece, in a thread of the pool. Raises CheckpointError for a file that ends before it should."""
        self.copied.synchronize()
        done = 0
        while done < piece.size:
            count = os.preadv(file, [self.bytes[done : piece.size]], piece.offset + done)
            if not count:
                raise CheckpointError(f"{piece.path} ends at byte {piece.offset + done}: download it again")
            done += count


def pinned(size: int) -> Tensor:
    """Bytes that the device's copy engines reach."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pump(spans: Sequence[FileSlice], device: torch.device) -> Iterator[Tensor]:
    """The tensors of these spans, in order, each ready on the device's current stream."""
    side, own = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
    ring = [RingSlot(part) for part in torch.split(pinned(SLOTS * PIECE), PIECE)]
    todo = pieces(spans)
    under_way: deque[tuple[FilePiece, RingSlot, Future[None]]] = deque()
    with ExitStack() as stack, ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
        files: dict[Path, int] = {}

        def start(slot: RingSlot) -> None:
            piece = next(todo, None)
            if piece is None:
                return
            if piece.path not in files:
                files[piece.path] = os.open(piece.path, os.O_RDONLY)
                stack.callback(os.close, files[piece.path])
            under_way.append((piece, slot, pool.submit(slot.fill, files[piece.path], piece)))

        for slot in ring:
            start(slot)
        made = torch.empty(0)
        while under_way:
            piece, slot, filled = under_way.popleft()
            filled.result()
            span = spans[piece.span]
            with torch.cuda.stream(side):
                if piece.at == 0:
                    made = torch.empty(span.size, dtype=torch.uint8, device=device)
                made[piece.at : piece.at + piece.size].copy_(slot.memory[: piece.size], non_blocking=True)
                slot.copied.record(side)
            start(slot)
            if piece.at + piece.size == span.size:
                own.wait_stream(side)
                made.record_stream(own)
                tensor = made.view(span.dtype).view(span.shape)
                yield tensor[span.rest] if span.rest else tensor
