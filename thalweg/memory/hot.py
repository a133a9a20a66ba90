"""The device's part of planes whose pages are in host memory: a hot set of entries for each slot and layer."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.core.plan import PAGE
from thalweg.kernels.swap_in.ref import HotSet

STATE = 8  # bytes of an entry beside its latent: what it holds, and when it was used
LOOKUP = 2  # bytes of a position of the context


def hot_sets(
    layers: Sequence[int], entries: int, slots: int, context: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[dict[int, HotSet], tuple[Tensor, ...]]:
    """Empty hot sets of these layers, of `entries` vectors [width] of `dtype` for each slot; and what becomes 0 in row
    `slot` of dim 1 when the slot gets another request.
    """
    count = len(layers)
    position_NSH, last_use_NSH = (
        torch.zeros(count, slots, entries, dtype=torch.int32, device=device) for _ in range(2)
    )
    clock_NS = torch.zeros(count, slots, dtype=torch.int32, device=device)
    pages = -(-slots * entries // PAGE)
    table_1P = torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0)
    sets = {
        layer: HotSet(
            torch.zeros(pages * PAGE, width, dtype=dtype, device=device),
            table_1P,
            torch.zeros(slots, context, dtype=torch.int16, device=device),
            position_NSH[i],
            last_use_NSH[i],
            clock_NS[i],
        )
        for i, layer in enumerate(layers)
    }
    return sets, (position_NSH, last_use_NSH, clock_NS)


def host_zeros(rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Zeros in host memory, uint8 [rows, row_bytes], that kernels of the device can address. Raises MemoryError where
    its pages cannot be locked.

    They are locked by cudaHostRegister: torch's allocator of pinned memory rounds sizes up to a power of two.
    """
    if device.type != "cuda":
        return torch.zeros(rows, row_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, rows * row_bytes)
    zeros = torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)
    lock_pages(zeros.data_ptr(), zeros.nbytes)
    weakref.finalize(memory, unlock_pages, zeros.data_ptr())  # the tensors hold `memory`, which then is unmapped
    return zeros


def lock_pages(address: int, size: int) -> None:
    """Raises MemoryError."""
    error = int(_cuda_runtime().cudaHostRegister(address, size, 0))
    if error:
        raise MemoryError(f"{size} bytes of host memory cannot be locked: cudaHostRegister returns {error}")


def unlock_pages(address: int) -> None:
    _cuda_runtime().cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
