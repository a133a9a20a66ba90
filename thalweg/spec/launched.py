"""What lies between a head's computations, in a launch each where the device has kernels for it."""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch

from thalweg.kernels.draft import ref as draft
from thalweg.kernels.grow import ref as grow
from thalweg.kernels.launch import supports_triton
from thalweg.kernels.prepare import ref as prepare
from thalweg.sampling.catalog import sampling_on
from thalweg.sampling.sample import REFERENCE, Sampling


class Kernels(NamedTuple):
    """See `kernels.prepare.ref` and `kernels.draft.ref`; sampling: what draws a token by kernels."""

    decode: Callable[..., prepare.Decoded]
    carry: Callable[..., torch.Tensor]
    conclude: Callable[..., None]
    sampling: Sampling


class Growth(NamedTuple):
    """See `kernels.grow.ref`."""

    best: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    advance: Callable[..., tuple[grow.Level, grow.Placed]]
    settle: Callable[..., None]


PLAIN = Kernels(prepare.decode, draft.carry, draft.conclude, REFERENCE)


def kernels_on(device: torch.device) -> Kernels | None:
    """None where there are none: a CPU does with less than `PLAIN`, which is for tests."""
    if not supports_triton(device):
        return None
    from thalweg.kernels.draft import triton as drafting  # needs Triton
    from thalweg.kernels.prepare import triton as preparing

    return Kernels(preparing.decode, drafting.carry, drafting.conclude, sampling_on(device))


def growth_on(device: torch.device) -> Growth:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    if not supports_triton(device):
        return Growth(grow.best, grow.advance, grow.settle)
    from thalweg.kernels.grow import triton as growing  # needs Triton

    return Growth(growing.best, growing.advance, growing.settle)
