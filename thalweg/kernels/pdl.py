"""Programmatic dependent launch: on Hopper a kernel may start while the one before it ends, and waits for its results
itself.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def _overlaps(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Keyword arguments of a Triton launch on this tensor's device: the constexpr flag PDL, and the launch attribute
    where it is true.
    """
    if tensor.is_cuda and _overlaps(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
