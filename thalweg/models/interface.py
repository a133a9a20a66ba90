"""Protocols: a model as the runner and drafters use it, and a layer as a model uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from thalweg.attention.selection import SelectedContexts
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import MetadataBuilder, ResidualStream
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.parallel.vocabulary import VocabularyShards
from thalweg.weights.table import WeightTable


class Model(Protocol):
    """A model, as the runner uses it. It is an nn.Module too; everything runs under torch.inference_mode."""

    facts: ModelFacts
    factory: LayerFactory
    metadata: MetadataBuilder
    border_topk: int  # positions of a selection of context that crosses a border of this pipeline stage; 0: none does

    def planes(self) -> tuple[PlaneSpec, ...]:
        """Cache tensors per token."""

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        """Hidden states [T, X] of every token of the step: first the H numbers that `logits` reads, then the watched
        streams (`Target.watch`).

        Writes the step's KV into the planes.
        """

    def logits(self, hidden_NX: Tensor) -> Tensor:
        """float32 [N, vocabulary]."""

    @property
    def shards(self) -> VocabularyShards:
        """The token ids whose logits this rank computes."""

    def shard_logits(self, hidden_NX: Tensor) -> Tensor:
        """float32 [N, token ids of this rank]: none on a pipeline stage before the last."""

    def table(self) -> WeightTable:
        """Mapping of checkpoint tensors to its parameters."""


class Target(Model, Protocol):
    """A model that others can draft for."""

    def embed(self, ids_T: Tensor) -> Tensor:
        """[T, H]: the embeddings of tokens."""

    def watch(self, layers: Sequence[int]) -> None:
        """From now on `forward` returns, behind the H numbers of the final hidden state, the residual streams that
        enter these layers (number `facts.layers` is behind the last): [T, H · (1 + watched)].
        """


class WrappedModel:
    """A model whose `forward` runs in another way; the rest is its own."""

    def __init__(self, model: Model) -> None:
        self.model, self.facts, self.factory, self.metadata = model, model.facts, model.factory, model.metadata
        self.planes, self.table, self.shards = model.planes, model.table, model.shards
        self.border_topk = model.border_topk

    def logits(self, hidden_NX: Tensor) -> Tensor:
        return self.model.logits(hidden_NX)

    def shard_logits(self, hidden_NX: Tensor) -> Tensor:
        return self.model.shard_logits(hidden_NX)


class DecoderLayer(Protocol):
    """One layer of a family. `layers.factory` makes its parts."""

    def __call__(self, h: ResidualStream, metadata: Any, selections: SelectedContexts) -> SelectedContexts:
        """Adds to the stream. Returns the selection of context that later layers may share."""

    def planes(self) -> tuple[PlaneSpec, ...]:
        """Cache tensors of its attention per token."""
