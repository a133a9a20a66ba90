"""From files to a GPU as fast as the page cache or the disk gives: threads read pieces into a ring of pinned memory, a
side stream copies them.

The host holds the ring and nothing else. A piece's slot is read into again as soon as its copy is done, so reading,
copying and what the caller does with the tensors run at the same time; the caller gets them in order.

A rank copies only the bytes that it holds. What several ranks of a host hold comes from the disk once, since all read
through the page cache, in the same order.
"""

from __future__ import annotations

import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from mmap import ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from thalweg.core.errors import CheckpointError

PIECE = 8 << 20  # bytes: an expert of DeepSeek's is one piece; pinning memory takes 0.5 s a GB, so the ring is small
THREADS = 8  # one of them copies some 6 GB/s out of the page cache
SLOTS = 2 * THREADS  # while half of the ring is read into, the other half is copied


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A tensor in a file: runs of equally many bytes, the first at byte `offset`."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    rest: tuple[slice, ...] = ()  # what is still to be cut out of it, once it is there
    runs: int = 1
    pitch: int = 0  # bytes from the start of a run to that of the next

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def taken(self, take: tuple[slice, ...]) -> FileSlice:
        """A slice of a whole tensor. Rows and one more dim are cut in the file, others on the device."""
        shape, rest, offset, runs, pitch = list(self.shape), list(take), self.offset, 1, 0
        for dim, part in enumerate(take):
            start, stop, step = part.indices(self.shape[dim])
            if (start, stop, step) != (0, self.shape[dim], 1):
                if step != 1 or runs > 1:
                    break
                size = math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize
                offset, pitch = offset + start * size, self.shape[dim] * size
                runs, shape[dim] = math.prod(shape[:dim]), max(stop - start, 0)
            rest[dim] = slice(None)
        is_cut = any(part != slice(None) for part in rest)
        return FileSlice(self.path, offset, tuple(shape), self.dtype, tuple(rest) if is_cut else (), runs, pitch)


class FilePiece(NamedTuple):
    """Bytes `at` and on of span number `span`: runs of `run` bytes of a file, `pitch` apart, the first at `offset`."""

    span: int
    path: Path
    offset: int
    at: int
    run: int
    runs: int
    pitch: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.run * self.runs

    def read(self, file: int, into: memoryview) -> None:
        """Only these bytes are copied. Raises CheckpointError for a file that ends before it should."""
        if self.runs > 1:  # a mapping: a system call for each run would take longer than all of the tensor in one
            before = self.offset % ALLOCATIONGRANULARITY
            end = before + (self.runs - 1) * self.pitch + self.run
            try:
                mapped = mmap(file, end, access=ACCESS_READ, offset=self.offset - before)
            except ValueError:
                raise _ends(self.path, os.fstat(file).st_size) from None
            shape = (self.runs, self.run)
            there = np.ndarray(shape, np.uint8, mapped, before, (self.pitch, 1))
            np.copyto(np.ndarray(shape, np.uint8, into), there)
            return
        done = 0
        while done < self.size:
            count = os.preadv(file, [into[done : self.size]], self.offset + done)
            if not count:
                raise _ends(self.path, self.offset + done)
            done += count


def _ends(path: Path, byte: int) -> CheckpointError:
    return CheckpointError(f"{path} ends at byte {byte}: download it again")


def pieces(spans: Sequence[FileSlice], most: int = PIECE) -> Iterator[FilePiece]:
    """The spans in order, cut into pieces of up to `most` bytes; an empty one is a piece of 0."""
    for number, span in enumerate(spans):
        run = span.size // max(span.runs, 1)
        runs = max(most // max(run, 1), 1)  # of a piece
        for first, start in product(range(0, max(span.runs, 1), runs), range(0, max(run, 1), most)):
            offset, some = span.offset + first * span.pitch + start, min(runs, span.runs - first)
            yield FilePiece(number, span.path, offset, first * run + start, min(most, run - start), some, span.pitch)


class RingSlot:
    """A part of the ring. copied: when what lies in it has left."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.bytes = memory, memory.numpy().data
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, file: int, piece: FilePiece) -> None:
        """Reads a piece, in a thread of the pool. Raises CheckpointError as `FilePiece.read`."""
        self.copied.synchronize()
        piece.read(file, self.bytes)


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
