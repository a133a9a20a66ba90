"""Protocols of layers, as models use them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from thalweg.attention.context import AttentionGroup
from thalweg.attention.selection import SelectedContexts
from thalweg.batch.batch import Batch
from thalweg.memory.planes import Planes

Activation = Any  # a Tensor [T, H], or a norm that its readers compute (`kernels.norm.triton.LazyNorm`)


class Norm(Protocol):
    """A norm over the last dim."""

    @property
    def weight(self) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor: ...

    def forward_(self, x: Tensor) -> Tensor:
        """The same, in place."""

    def lazy(self, x: Tensor) -> Activation:
        """The norm of x for readers that may compute it themselves. x must not change before they have."""


class Addend(Protocol):
    """A linear layer whose result is added to the stream."""

    is_partial: bool  # the result is one rank's part of a sum

    def forward(self, x: Activation) -> Tensor:
        """In new memory, which the stream may edit."""

    def add_(self, h: Tensor, x: Activation) -> Tensor:
        """h += forward(x), in place."""


class ExpertBlock(Protocol):
    """A mixture of experts."""

    @property
    def is_partial(self) -> bool:
        """Whether `partial` computes it, and not `add_`."""

    def add_(self, h_TH: Tensor, x: Activation, real_T: Tensor | None) -> None:
        """h += moe(x), in place, as one rank that has all experts. real_T: False where a token is padding."""

    def partial(self, x: Activation, real_T: Tensor | None) -> Tensor:
        """This rank's part of the sum over tensor-parallel ranks, [T, H] in new memory, which the stream may edit; for
        experts divided over ranks.
        """


class ResidualStream(Protocol):
    """The hidden state [T, H] between sublayers."""

    def add(self, linear: Addend, x: Activation) -> None:
        """stream += linear(x)."""

    def add_experts(self, experts: ExpertBlock, x: Activation, real_T: Tensor | None) -> None:
        """stream += experts(x)."""

    def normed(self, norm: Norm) -> Activation:
        """Input of the next sublayer. It must be read before the stream is added to."""

    def value(self) -> Tensor:
        """[T, H], with everything added: the memory that later additions edit."""


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

    def captured_cached_tokens(self, wish: int, planes: Planes) -> int | None:
        """Cached tokens that the prompts of a captured step may have (`batch.PromptRows.cached`), if there should be
        room for `wish`. None: attention to prompts cannot be captured.
        """

    @property
    def captured_context(self) -> int | None:
        """The longest context of a row of such a step; None: as long as any."""


class ForwardMetadata(Protocol):
    """Metadata of a forward pass, as a model reads it; its attention layers know more."""

    @property
    def batch(self) -> Batch: ...

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """One for each selection of context that a layer makes and hands on."""

    def packed(self, selections: SelectedContexts, topk: int) -> Tensor:
        """The selection that layers share, for another pipeline stage: columns of each token's context, int32 [T,
        topk], negative for a filler. Of a group that sees its whole context nothing is read.
        """

    def unpacked(self, packed_TK: Tensor) -> SelectedContexts:
        """Inverse of `packed`, in metadata of the same step."""


class LatentAttention(Protocol):
    """Multi-head latent attention; see `layers.mla.Mla`. metadata: as the same factory's builder makes it."""

    def add_to(self, h: ResidualStream, x: Activation, metadata: Any, earlier: SelectedContexts) -> SelectedContexts:
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
