"""What models are built from. A model names its layers; a `LayerFactory` makes them: in plain torch, or on a GPU's
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from thalweg.attention.context import Span, Work
from thalweg.attention.selection import Choices
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts, Moe
from thalweg.layers.linear import Part
from thalweg.layers.residual import Activation, Addend, Norm, ResidualStream
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.parallel.layout import Layout
from thalweg.quant.catalog import Schemes
from thalweg.weights.table import Transform, unchanged


class PackedLinear(Protocol):
    """A linear layer whose weight is that of several published ones, below one another."""

    def forward(self, x: Activation) -> Tensor: ...

    def split(self, x: Activation) -> tuple[Tensor, ...]:
        """The result of each part."""

    def swiglu(self, x: Activation) -> Tensor:
        """silu(gate) · up, of the parts gate and up."""


class Vocabulary(Protocol):
    """The token embedding, or the head."""

    is_partial: bool  # this rank has some of its rows

    def forward(self, ids_T: Tensor) -> Tensor:
        """[T, hidden]; a partial sum if it is partial."""

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, rows on this rank]."""


class MetadataBuilder(Protocol):
    """Makes of a batch what the layers of a forward share. Owns the rotary table."""

    def build(self, batch: Batch, planes: Planes) -> ForwardMetadata: ...


class ForwardMetadata(Protocol):
    """What a model itself reads of it; its attention layers know more."""

    @property
    def batch(self) -> Batch: ...

    @property
    def spans(self) -> tuple[Span, ...]:
        """One for each selection of context that a layer makes and hands on."""


class LatentAttention(Protocol):
    """Multi-head latent attention; see `layers.mla.Mla`. metadata: as the same factory's builder makes it."""

    def add_to(self, h: ResidualStream, x: Activation, metadata: Any, earlier: Choices) -> Choices:
        """h += attention(x). Returns the selection of context made here, or `earlier` in a layer without an indexer."""

    def write_kv(self, x: Activation, metadata: Any) -> None:
        """Stores what attention would store, and computes nothing else."""


class GroupedAttention(Protocol):
    """Grouped-query attention; see `layers.gqa.Gqa`."""

    def add_to(self, h: ResidualStream, x: Activation, metadata: Any) -> None:
        """h += attention(x)."""

    def write_kv(self, x: Activation, metadata: Any) -> None:
        """Stores what attention would store, and computes projections only."""


class FeedForward(Protocol):
    """An MLP or a mixture of experts."""

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += mlp(x). real_T: False where a token is padding, which no expert need compute."""


class LayerFactory(Protocol):
    """Makes the layers of one model. Layers declare the published tensors that fill them; `name` is a published
    layer's.
    """

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""

    @property
    def device(self) -> torch.device: ...

    @property
    def published(self) -> torch.dtype:
        """Of an unquantized checkpoint's tensors."""

    @property
    def layout(self) -> Layout: ...

    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> LayerFactory:
        """Layers of a model that drafts for one of these: its KV lies in the same pages, and its attention may be of
        another kind.
        """

    def stream(self, x_TH: Tensor, is_partial: bool = False) -> ResidualStream:
        """A residual stream that begins with x. is_partial: x is this rank's part of a sum over tensor-parallel
        ranks.
        """

    def norm(self, name: str, dim: int, eps: float, reorder: Transform = unchanged) -> Norm: ...

    def packed(self, parts: Sequence[Part], inputs: int, has_bias: bool = False) -> PackedLinear: ...

    def row(self, name: str, shape: tuple[int, int], columns: range | None = None, has_bias: bool = False) -> Addend:
        """A linear layer of published shape (outputs, inputs). columns: the inputs on this rank, whose result is a
        partial sum; None is all.
        """

    def vocabulary(self, name: str, vocab: int, hidden: int) -> Vocabulary: ...

    def mla(self, facts: ModelFacts, layer: int, name: str, is_indexed: bool) -> LatentAttention: ...

    def gqa(
        self, facts: ModelFacts, layer: int, name: str, *, qk_norm: bool, out_bias: bool, inputs: int = 0
    ) -> GroupedAttention:
        """inputs: numbers that queries, keys and values are made of; 0 is as many as the hidden state has."""

    def mlp(self, name: str, hidden: int, intermediate: int, has_bias: bool = False) -> FeedForward: ...

    def moe(self, name: str, moe: Moe, hidden: int) -> FeedForward: ...

    def metadata(self, facts: ModelFacts, work: Work) -> MetadataBuilder: ...

    def plane(self, name: str, layer: int, dim: int, shard: str = "replicated") -> PlaneSpec:
        """A plane of one vector a token, in the KV cache's type."""

    def mla_planes(self, facts: ModelFacts, layer: int) -> tuple[PlaneSpec, ...]:
        """What `mla` keeps of each token, without the indexer's key."""
