"""Where Triton's kernels run, and the options of their launches.

Programmatic dependent launch: on Hopper a kernel may start while the kernel before it ends. It waits for that kernel's
results itself.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


def supports_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run there: a GPU, with Triton installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def triton_available() -> bool:
    """Whether this machine has a GPU for Triton's kernels."""
    return torch.cuda.is_available() and supports_triton(torch.device("cuda"))


@cache
def _overlaps(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Keyword arguments of a Triton launch on this tensor's device: the constexpr PDL, and the launch attribute if it
    is true.
    """
    if tensor.is_cuda and _overlaps(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def launch_config(tensor: Tensor, warps: int, stages: int = 1) -> dict[str, int | bool]:
    """`launch_options` with the number of warps and of pipeline stages."""
    return {"num_warps": warps, "num_stages": stages, **launch_options(tensor)}
