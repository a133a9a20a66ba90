"""Autoregressive draft heads: one or a few layers that follow a target model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.batch.share import Divided, divided
from thalweg.config.model import ModelFacts
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import ResidualStream
from thalweg.layers.module import Module
from thalweg.layers.residual import stream
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.interface import Target
from thalweg.parallel.axis import width_of
from thalweg.weights.table import WeightTable, table_of


class DraftHead(Module, ABC):
    """An autoregressive draft head.

    Its KV entry at position p is made of token p and of a state of position p - 1: from the target's hidden states
    there, or what the head returned there itself; zeros before position 0. So an entry depends on the tokens up to p
    alone, like everything else in a page.
    """

    def __init__(self, facts: ModelFacts, factory: LayerFactory, main: Target) -> None:
        super().__init__()
        self.facts, self.factory = facts, factory  # of its own layers
        self.main = (main,)  # the target, whose embedding, rotary table or head it uses; in a tuple: no child of this
        self.index = main.facts.layers  # of its first layer among the planes' layers
        self.width, self.dtype = facts.hidden, factory.dtype  # of a state
        self.ids_D: Tensor | None = None  # int64 [D]: the token of each of its logits; None: the target's vocabulary
        self.shared_topk = 0  # positions of the selection that the steps of a draft share; 0: each step selects
        # a head with weights of its own keeps the tokens of all ranks that share a context: so many pages in each
        self.parts = main.factory.layout.dcp.size // factory.layout.dcp.size
        self.attends = False  # whether `write_kv` attends to earlier entries, as a head of several layers must

    @abstractmethod
    def planes(self) -> tuple[PlaneSpec, ...]:
        """Cache planes, on the same pages as the target's."""

    def table(self) -> WeightTable:
        """Mapping of checkpoint tensors to its parameters."""
        return table_of(self)

    def draft_state(self, hidden_TX: Tensor) -> Tensor:
        """[T, width]: the states of positions whose hidden states `Model.forward` has returned; those after the
        target's final norm.
        """
        return hidden_TX[:, : self.width]

    def forward(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        """The states behind the entries, [T, width]; writes their KV.

        ids_T: the tokens of the entries. state_TW: of the positions before them. batch: their positions, and the
        context before them.
        """
        own = self._divided(batch)
        whole_TW = own.whole(self.own_states(own.take(ids_T), own.take(state_TW), own.batch, planes))
        own.store_selection(batch)
        return whole_TW

    def write_kv(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        """Writes the KV that `forward` would write, and computes nothing else where that is possible."""
        own = self._divided(batch)
        self.write_own_kv(own.take(ids_T), own.take(state_TW), own.batch, planes)

    def _divided(self, batch: Batch) -> Divided:
        layout, parts = self.main[0].factory.layout, self.parts
        if parts > 1:
            part_S = torch.arange(parts, dtype=batch.table_RP.dtype, device=batch.table_RP.device)
            batch = replace(batch, table_RP=(batch.table_RP.unsqueeze(-1) * parts + part_S).flatten(1))
        return divided(batch, layout.cp, layout.cp_strategy)

    @abstractmethod
    def own_states(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        """`forward` of the tokens of this rank."""

    @abstractmethod
    def write_own_kv(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        """`write_kv` of the tokens of this rank."""

    def logits(self, state_NW: Tensor) -> Tensor:
        """float32 [N, D] of the next token, by the target's head."""
        return self.main[0].logits(state_NW)


class EntryProjection(Module):
    """A projection that a residual stream begins with. Each tensor-parallel rank reads some of its input columns."""

    def __init__(self, factory: LayerFactory, name: str, shape: tuple[int, int], has_bias: bool = False) -> None:
        super().__init__()
        tp, self.factory = factory.layout.tp, factory
        self.columns = None if tp.size == 1 else width_of(shape[1], tp)
        self.linear = factory.row(name, shape, self.columns, has_bias)

    def start(self, x_TX: Tensor) -> ResidualStream:
        """The stream of its result."""
        if self.columns is None:
            return stream(self.factory.layout, self.linear.forward(x_TX))
        part_TX = x_TX[:, self.columns.start : self.columns.stop].contiguous()
        return stream(self.factory.layout, self.linear.forward(part_TX), is_partial=True)


class DraftEmbedding(Module):
    """The embedding that a head reads: its own, or the target's."""

    def __init__(self, factory: LayerFactory, name: str, facts: ModelFacts, main: Target, is_own: bool) -> None:
        super().__init__()
        self.factory, self.main = factory, (main,)
        self.own = factory.vocabulary(name, facts.vocab, facts.hidden) if is_own else None
        if not is_own:
            self.weights.skips.append(rf"{name}\.weight")

    def forward(self, ids_T: Tensor) -> Tensor:
        """[T, H]."""
        if self.own is None:
            return self.main[0].embed(ids_T)
        return stream(self.factory.layout, self.own.forward(ids_T), self.own.is_partial).value()
