"""What the runner asks of a model, and what a drafter asks of the model that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.layers import parts
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
        """hidden [T, X] of every token of the step: first what `logits` is made of, after the final norm, and behind it what a drafter watches
        (`Target`). Writes the step's KV into the planes."""

    def logits(self, hidden_NX: Tensor) -> Tensor:
        """float32 [N, vocabulary]."""

    def table(self) -> Table:
        """How the published tensors map onto its parameters."""


class Target(Model, Protocol):
    """A model that others can draft for."""

    embedding: parts.Table

    def watch(self, layers: Sequence[int]) -> None:
        """From now on `forward` returns, behind the H numbers of the final hidden state, the residual streams that enter these layers (of number
        `facts.layers` that behind the last): [T, H · (1 + watched)]."""


class Streams:
    """Collects the residual streams of one forward that are watched. layers: which; of none there is nothing to do."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.found: dict[int, Tensor] = {}

    def enter(self, layer: int, h_TH: Tensor) -> None:
        """The stream enters this layer, which will edit it in place."""
        if layer in self.layers:
            self.found[layer] = h_TH.clone()

    def behind(self, hidden_TH: Tensor) -> Tensor:
        """The final hidden state with them behind it, in the order of `layers`."""
        if not self.layers:
            return hidden_TH
        return torch.cat([hidden_TH, *(self.found[layer] for layer in self.layers)], 1)
