"""What the runner asks of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.layers.parts import Parts, Steps
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.weights.table import Table


class Model(Protocol):
    """A decoder. It is an nn.Module too; everything runs under torch.inference_mode."""

    facts: ModelFacts
    parts: Parts
    steps: Steps

    def planes(self) -> tuple[PlaneSpec, ...]:
        """What it keeps of each token."""

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        """hidden [T, H] of every token of the step, after the final norm; writes the step's KV into the planes."""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, vocabulary]."""

    def table(self) -> Table:
        """How the published tensors map onto its parameters."""
