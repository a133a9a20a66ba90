"""A stream of tensors that are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thalweg.quant.scheme import Read, TensorSpec


class InMemory:
    """A source of checkpoint tensors for `weights.loader.load`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        for name, take in reads:
            yield (self._tensors[name][take] if take else self._tensors[name]).to(device)
