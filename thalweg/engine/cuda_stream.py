"""The stream of a GPU worker."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Callable, TypeVar

import torch
from torch import Tensor

from thalweg.engine.worker import Draft, InlineStream, Sample, Sampling
from thalweg.sampling.sample import Sampled
from thalweg.spec.drafter import DraftOutput

Tensors = TypeVar("Tensors", Sampled | None, DraftOutput | None)


class CudaStream(InlineStream):
    """The current CUDA stream, on which every submission only enqueues. A side stream copies results to the host."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def submit_sampling(self, sample: Sample, draft: Draft) -> Sampling:
        torch.cuda.current_stream().wait_event(self.copied)  # sampling may write the buffers of the copy before
        sampled = sample()
        tokens = self._copy(sampled)
        return tokens, self._copy(draft(sampled))

    def _copy(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Copies results of the work so far; the current stream does not wait for it."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            on_host = _to_host(tensors)
            copied = self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self.side)

        def wait() -> Tensors:
            copied.synchronize()
            return on_host

        return wait


def _to_host(tensors: Tensors) -> Tensors:
    """The same values with the tensors in pinned memory."""
    if tensors is None:
        return None
    values = ((field.name, getattr(tensors, field.name)) for field in fields(tensors))
    pinned: dict[str, Any] = {name: _pinned(value) for name, value in values if isinstance(value, Tensor)}
    return replace(tensors, **pinned)


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, under way on the current stream."""
    tensor.record_stream(torch.cuda.current_stream())
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
