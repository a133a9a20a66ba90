"""Host numbers to the device without waiting for it."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def upload(values: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these numbers. To a GPU the copy goes through pinned memory in stream order; torch's allocator keeps
    the pinned block until the copy is done.
    """
    made = torch.tensor(values, dtype=dtype)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def refill(out: Tensor, values: Numbers) -> None:
    """Overwrites a tensor on a GPU with these numbers, in stream order, in one copy."""
    out.copy_(torch.tensor(values, dtype=out.dtype).pin_memory(), non_blocking=True)
