"""Where the project's own kernels run."""

from __future__ import annotations

import importlib.util

import torch


def runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels do: on a GPU, where Triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
