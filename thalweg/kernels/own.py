"""Where the project's own kernels run."""

from __future__ import annotations

import importlib.util

import torch


def runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels do: on a GPU, where Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def available() -> bool:
    """Whether there is a GPU for them on this machine."""
    return torch.cuda.is_available() and runs_on(torch.device("cuda"))
