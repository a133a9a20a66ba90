"""The hands of a rank on a GPU: its stream is the device's own, so nothing here waits but `output`."""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import Tensor

from thalweg.core.plan import MaskState, Output, Shape, StepPlan
from thalweg.engine.worker import Halves, Masker
from thalweg.runner.runner import Forwarded, Published, outputs
from thalweg.sampling.sample import Sampled


class GpuWorker:
    """Drives one Runner on the current CUDA stream. A step's output is copied to pinned memory on a side stream behind B, and B of the next
    step, which may write the same buffers, waits for that copy."""

    def __init__(self, runner: Halves, masker: Masker) -> None:
        self.runner, self.masker = runner, masker
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.forwarded: dict[int, Forwarded | None] = {}
        self.published: dict[int, tuple[Published | None, torch.cuda.Event]] = {}
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def forward(self, plan: StepPlan, shape: Shape) -> None:
        self.forwarded[plan.step] = self.runner.forward(plan)

    def sample(self, plan: StepPlan, masks: Mapping[int, MaskState], width: int) -> None:
        made = self.masker.fill(plan, masks)
        torch.cuda.current_stream().wait_event(self.copied)
        published = self.runner.sample(self.forwarded.pop(plan.step), made)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            host = None if published is None else Published(published.forwarded, _to_host(published.sampled))
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record(self.side)
        self.published[plan.step] = host, self.copied

    def output(self, plan: StepPlan) -> Sequence[Output]:
        published, copied = self.published.pop(plan.step)
        copied.synchronize()
        return outputs(published)


def _to_host(sampled: Sampled | None) -> Sampled | None:
    if sampled is None:
        return None
    parts = (
        sampled.tokens_E,
        sampled.done_E,
        sampled.live_E,
        sampled.logprob_E,
        sampled.top_ids_EK,
        sampled.top_logprobs_EK,
    )
    return Sampled(*map(_pinned, parts))  # type: ignore[arg-type]


def _pinned(tensor: Tensor | None) -> Tensor | None:
    """A copy in pinned memory, under way on the current stream."""
    if tensor is None:
        return None
    tensor.record_stream(torch.cuda.current_stream())
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
