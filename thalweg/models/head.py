"""What drafts by itself, one token behind the other: a layer or a few behind a target model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.base import Model
from thalweg.weights.table import Table


class Head(Protocol):
    """Its entry at position p is made of token p and of a state of position p - 1, `width` numbers: what the target's hidden states there say, or
    what it returned there itself; before position 0 they are zeros. So it depends on the tokens up to p alone, like all else in a page. It is an
    nn.Module too.

    main: whose embedding, rotary table or head it uses, and which is no child of it; facts: of its own layers; index: of its first layer among
    the planes' layers. ids_D: the token that each of its logits is of, int64 [D]; None where they are those of the target's vocabulary. attends:
    whether `observe` attends to what stands before, as that of more than one layer does."""

    facts: ModelFacts
    index: int
    width: int
    dtype: torch.dtype
    ids_D: Tensor | None
    attends: bool

    @property
    def main(self) -> tuple[Model, ...]: ...

    def planes(self) -> tuple[PlaneSpec, ...]:
        """Of the same pages as the target's."""

    def table(self) -> Table:
        """How the published tensors map onto its parameters."""

    def learned(self, hidden_TX: Tensor) -> Tensor:
        """[T, width]: the states of positions whose hidden states of the target are known, as `Model.forward` returns them."""

    def forward(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        """ids_T: the tokens of the entries; state_TW: of the positions before them; batch: where they stand, and what stands before them. → the
        states behind them, [T, width]; writes their KV."""

    def observe(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        """Writes the KV that `forward` would write, and computes nothing else where that is possible."""

    def logits(self, state_NW: Tensor) -> Tensor:
        """float32 [N, D]: of the token behind."""
