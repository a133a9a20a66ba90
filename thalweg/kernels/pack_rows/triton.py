"""See `ref.py`: one launch each way, by words of 4 bytes. With few rows a launch is the floor: torch takes one for each
tensor.

Tensors whose rows are no whole words, and more than MOST, are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.launch import launch_config
from thalweg.kernels.pack_rows import ref
from thalweg.kernels.pdl import pdl_launch, pdl_wait

MOST = 4  # tensors of a launch


@triton.jit
def _move(packed, part, row, width, row_step, column_step, first, WORDS: constexpr, IS_BACK: constexpr):
    """A row of one tensor, to or from its place in the packed row."""
    word = tl.arange(0, triton.next_power_of_2(WORDS))
    inside, at, place = word < WORDS, part + row * row_step + word * column_step, packed + row * width + first + word
    if IS_BACK:
        tl.store(at, tl.load(place, mask=inside, other=0), mask=inside)
    else:
        tl.store(place, tl.load(at, mask=inside, other=0), mask=inside)


@triton.jit
def _move_all(
    packed, a, b, c, d, width, a_row, a_column, b_row, b_column, c_row, c_column, d_row, d_column,
    A: constexpr, B: constexpr, C: constexpr, D: constexpr, IS_BACK: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program i: row i."""
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    pdl_launch(PDL)
    _move(packed, a, row, width, a_row, a_column, 0, A, IS_BACK)
    if B:
        _move(packed, b, row, width, b_row, b_column, A, B, IS_BACK)
    if C:
        _move(packed, c, row, width, c_row, c_column, A + B, C, IS_BACK)
    if D:
        _move(packed, d, row, width, d_row, d_column, A + B + C, D, IS_BACK)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """See `ref.packed`."""
    if not _fits(tensors):
        return ref.packed(tensors)
    rows, words = len(tensors[0]), sum(map(ref.row_bytes, tensors)) // 4
    out_NW = torch.empty(rows, words, dtype=torch.int32, device=tensors[0].device)
    _launch(out_NW, tensors, is_back=False)
    return out_NW.view(torch.uint8)


def unpacked(bytes_NB: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """See `ref.unpacked`. A tensor that was column-major, as scales are (`quantize.scales_like`), is so again."""
    if not _fits(like) or bytes_NB.shape[1] % 4:
        return ref.unpacked(bytes_NB, like)
    made = tuple(_made(x, len(bytes_NB)) for x in like)
    if len(bytes_NB):
        _launch(bytes_NB.contiguous().view(torch.int32), made, is_back=True)
    return made


def _fits(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) <= MOST and all(len(x) and _has_words(x) for x in tensors)


def _has_words(x: Tensor) -> bool:
    if x.dtype.itemsize == 4:
        return x.dim() == 2 or x.is_contiguous()
    places = x.storage_offset(), x.stride(0), x.shape[1:].numel()
    return x[0].is_contiguous() and all(place * x.dtype.itemsize % 4 == 0 for place in places)


def _made(x: Tensor, rows: int) -> Tensor:
    if x.dim() == 2 and x.shape[1] > 1 and x.stride(0) == 1 != x.stride(1):
        return x.new_empty(x.shape[1], -(-rows // 4) * 4)[:, :rows].t()
    return x.new_empty(rows, *x.shape[1:])


def _launch(packed_NW: Tensor, tensors: Sequence[Tensor], *, is_back: bool) -> None:
    parts = [x.flatten(1).view(torch.int32) for x in tensors]
    missing = MOST - len(parts)
    steps = [step for part in parts for step in part.stride()] + [0, 0] * missing
    words = [part.shape[1] for part in parts] + [0] * missing
    _move_all[(len(packed_NW),)](
        packed_NW, *parts, *[None] * missing, packed_NW.shape[1], *steps, *words, is_back,
        **launch_config(packed_NW, 8 if max(words) >= 1024 else 4),
    )  # fmt: skip
