"""The device of Triton kernels, and the options of their launches.

Programmatic dependent launch: on Hopper a kernel may start while the kernel before it ends. It waits for that kernel's
results itself.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

SMS = 132  # multiprocessors of an H100 or H200; a wrong number costs speed only


def supports_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run there: a GPU, with Triton installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@cache
def implementation(folder: str, device: torch.device) -> Any:
    """The module of a kernel folder that runs there: `triton.py`, or else `ref.py`, in plain torch."""
    return importlib.import_module(f"thalweg.kernels.{folder}.{'triton' if supports_triton(device) else 'ref'}")


def triton_available() -> bool:
    """Whether this machine has a GPU for Triton's kernels."""
    return torch.cuda.is_available() and supports_triton(torch.device("cuda"))


def hopper_has(*modules: str) -> bool:
    """Whether these modules are installed and the current device is a Hopper."""
    is_installed = all(importlib.util.find_spec(module) is not None for module in modules)
    is_nvidia = torch.version.hip is None and torch.cuda.is_available()
    return is_installed and is_nvidia and torch.cuda.get_device_capability()[0] == 9


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)  # an MI355X says (9, 5)


def capability(tensor: Tensor) -> tuple[int, int]:
    """Compute capability of its NVIDIA GPU; (0, 0) elsewhere. All that kernels choose by device follows from it."""
    return _capability(tensor.device) if tensor.is_cuda else (0, 0)


def has_tma(tensor: Tensor) -> bool:
    """Whether its device has TMA, and shared memory for deep pipelines, which consumer cards (12.x) have not."""
    return capability(tensor)[0] in (9, 10)


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Keyword arguments of a Triton launch on this tensor's device: the constexpr PDL, and the launch attribute if it
    is true. Kernels have inline PTX only where PDL is true.
    """
    return {"PDL": True, "launch_pdl": True} if capability(tensor) >= (9, 0) else {"PDL": False}


def max_registers(tensor: Tensor, registers: int) -> dict[str, int]:
    """The keyword argument of a Triton launch that limits a thread's registers (0: not); AMD's compiler has none."""
    return {"maxnreg": registers} if registers and capability(tensor) > (0, 0) else {}


def launch_config(tensor: Tensor, warps: int, stages: int = 1, registers: int = 0) -> dict[str, int | bool]:
    """`launch_options` with the number of warps and of pipeline stages, and `max_registers`."""
    return {"num_warps": warps, "num_stages": stages, **launch_options(tensor), **max_registers(tensor, registers)}
