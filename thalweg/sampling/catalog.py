"""What accept is made of on a device."""

from __future__ import annotations

import importlib.util

import torch

from thalweg.sampling.sample import REFERENCE, Sampling


def sampling_on(device: torch.device) -> Sampling:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return REFERENCE
    from thalweg.sampling.launched import Launched  # needs Triton

    return Launched()
