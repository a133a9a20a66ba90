"""The hands of a rank on a GPU: its stream is the device's own, so nothing here waits but `output`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Mapping, Sequence, TypeVar

import torch
from torch import Tensor

from thalweg.core.plan import GrammarState, Output, Shape, StepPlan
from thalweg.engine.worker import Halves, Masker
from thalweg.runner.runner import ForwardResult, StepResult
from thalweg.sampling.sample import Sampled
from thalweg.spec.drafter import DraftOutput

Made = TypeVar("Made", Sampled | None, DraftOutput | None)


class GpuWorker:
    """Drives one Runner on the current CUDA stream. A step's output is copied to pinned memory on a side stream behind
    B, and B of the next step, which may write the same buffers, waits for that copy.
    """

    def __init__(self, runner: Halves, masker: Masker) -> None:
        self.runner, self.masker = runner, masker
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.forwarded: dict[int, ForwardResult | None] = {}
        self.result: dict[int, tuple[StepResult | None, torch.cuda.Event]] = {}
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def forward(self, plan: StepPlan, shape: Shape) -> None:
        self.forwarded[plan.step] = self.runner.forward(plan)

    def sample(self, plan: StepPlan, masks: Mapping[int, GrammarState], width: int) -> None:
        made = self.masker.fill(plan, masks)
        torch.cuda.current_stream().wait_event(self.copied)
        result = self.runner.sample(self.forwarded.pop(plan.step), made, width)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            host = None if result is None else _to_host(result)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record(self.side)
        self.result[plan.step] = host, self.copied

    def output(self, plan: StepPlan) -> Sequence[Output]:
        result, copied = self.result.pop(plan.step)
        copied.synchronize()
        return self.runner.outputs(result)


def _to_host(result: StepResult) -> StepResult:
    return replace(result, sampled=_copied(result.sampled), proposed=_copied(result.proposed))


def _copied(made: Made) -> Made:
    """The same with its tensors in pinned memory."""
    if made is None:
        return None
    tensors = {field.name: getattr(made, field.name) for field in fields(made)}
    return replace(made, **{name: _pinned(tensor) for name, tensor in tensors.items() if tensor is not None})


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, under way on the current stream."""
    tensor.record_stream(torch.cuda.current_stream())
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
