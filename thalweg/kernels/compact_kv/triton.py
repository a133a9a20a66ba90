"""`ref.move` in one launch for all planes; torch takes two for each plane, 122 for the layers of DeepSeek-V3.

Bytes: what is moved, twice: 70 KB for each token of V3, some ns; the launch is the floor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_launch, pdl_wait

PAGE = 64  # tokens
WORD = 4  # bytes


@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["froms", "tos"])
def _move(planes, froms, tos, places, PAGE: constexpr, BLOCK: constexpr, PDL: constexpr):
    """Program (p, e): the places of row e in plane p, one after the other."""
    pdl_wait(PDL)
    pdl_launch(PDL)
    plane, row = tl.program_id(0), tl.program_id(1)
    memory = tl.load(planes + 3 * plane).to(tl.pointer_type(tl.int32))
    words, page, word = tl.load(planes + 3 * plane + 1), tl.load(planes + 3 * plane + 2), tl.arange(0, BLOCK)
    for place in range(places):
        source, target = tl.load(froms + row * places + place), tl.load(tos + row * places + place)
        if source != target:
            read = memory + source // PAGE * page + source % PAGE * words
            write = memory + target // PAGE * page + target % PAGE * words
            for first in range(0, words, BLOCK):
                inside = first + word < words
                tl.store(write + first + word, tl.load(read + first + word, mask=inside), mask=inside)


def table(planes: Sequence[Tensor]) -> Tensor:
    """Addresses of planes, uint8 [P, PAGE, bytes] as of `Planes.entries`, words of a row and of a page: int64
    [planes, 3], on their device. Planes must not move.
    """
    lines = []
    for plane in planes:
        page, size = plane.stride(0), plane.shape[2]
        assert size % WORD == page % WORD == 0, f"a plane of {size} bytes a token, {page} a page"
        lines.append((plane.data_ptr(), size // WORD, page // WORD))
    return torch.tensor(lines, dtype=torch.int64).to(planes[0].device)


def move(table_P3: Tensor, from_ED: Tensor, to_ED: Tensor) -> None:
    """Rows `from` to rows `to` (int64 [E, D], contiguous) in every plane of the table. A row's places are moved in
    order: what is read must not be written before, nor by another row, but for what is moved onto itself.
    """
    rows, places = from_ED.shape
    _move[(len(table_P3), rows)](
        table_P3, from_ED, to_ED, places, PAGE=PAGE, BLOCK=512, num_warps=4, **launch_options(from_ED)
    )
