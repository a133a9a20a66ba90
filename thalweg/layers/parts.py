"""What a model is put together from. A model names its parts; `Parts` makes them: the reference's, or the kernels' of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thalweg.attention.context import Span, Step, Work, counting, step_of
from thalweg.attention.selection import Choices, Selection, best
from thalweg.batch.batch import Batch
from thalweg.config import model as config
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelConfig
from thalweg.layers import rotary
from thalweg.layers.gqa import Gqa
from thalweg.layers.linear import Embedding, Linear
from thalweg.layers.mha import Mha
from thalweg.layers.mla import Mla
from thalweg.layers.mlp import Mlp
from thalweg.layers.moe import MoeBlock
from thalweg.layers.norm import RMSNorm
from thalweg.memory.planes import FP8, Planes, PlaneSpec, kept, vectors


class Norm(Protocol):
    """A norm over the last dim."""

    def forward(self, x: Tensor) -> Tensor: ...

    def before(self, x: Tensor) -> Any:
        """What attention and MLP of the same parts take for forward(x), which they may compute themselves: x must not change before."""


class Projection(Protocol):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor: ...

    def add_(self, h: Tensor, x: Tensor) -> Tensor:
        """h += forward(x), in place."""


class Table(Protocol):
    """The token embedding, or the head."""

    def forward(self, ids_T: Tensor) -> Tensor: ...

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, vocabulary]."""


class LatentAttention(Protocol):
    """Multi-head latent attention; see `layers.mla.Mla`. step: what the same parts' `Steps` made."""

    def add_(self, h_TH: Tensor, x_TH: Tensor, step: Any, earlier: Choices) -> Choices:
        """h += attention(x), in place."""

    def observe(self, x_TH: Tensor, step: Any) -> None:
        """Stores what attention would store, and computes nothing else."""


class GroupedAttention(Protocol):
    """Grouped-query attention; see `layers.gqa.Gqa`. step: what the same parts' `Steps` made."""

    def add_(self, h_TH: Tensor, x_TX: Tensor, step: Any) -> Tensor:
        """h += attention(x), in place."""

    def observe(self, x_TX: Tensor, step: Any) -> None:
        """Stores what attention would store, and computes no more than projections."""


class FeedForward(Protocol):
    """An MLP or a mixture of experts."""

    def add_(self, h_TH: Tensor, x_TH: Tensor, real_T: Tensor | None = None) -> Tensor:
        """h += mlp(x), in place. real_T: False where a token is padding, which no expert need compute."""


class Steps(Protocol):
    """Makes of a batch what the layers of a forward share. Owns the rotary table."""

    def step(self, batch: Batch, planes: Planes) -> ModelStep: ...


class ModelStep(Protocol):
    """What a model itself sees of it: the batch, and one span for each choice of context that a layer makes and hands on."""

    @property
    def batch(self) -> Batch: ...

    @property
    def spans(self) -> tuple[Span, ...]: ...


class Parts(Protocol):
    """Makes a model's parts. The weight table must know two things of them. stacked_shared: whether shared experts stand behind the routed ones in
    one stack of weights, each of the routed ones' width, instead of in an MLP of their own. own_index: whether the indexer's projections
    are layers of their own, instead of rows of the attention's."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def stacked_shared(self) -> bool: ...

    @property
    def own_index(self) -> bool: ...

    def beside(self, facts: ModelFacts) -> Parts:
        """Parts of a model that drafts for one of these: what it keeps lies in the same pages, and its attention may be of another kind."""

    def norm(self, dim: int, eps: float) -> Norm: ...

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> Projection: ...

    def embedding(self, vocab: int, hidden: int) -> Table: ...

    def mla(self, facts: ModelFacts, layer: int, indexed: bool) -> LatentAttention: ...

    def gqa(
        self, facts: ModelFacts, layer: int, *, qk_norm: bool, out_bias: bool, inputs: int = 0
    ) -> GroupedAttention: ...

    def mlp(self, hidden: int, intermediate: int, bias: bool = False) -> FeedForward: ...

    def moe(self, moe: config.Moe, hidden: int) -> FeedForward: ...

    def steps(self, facts: ModelFacts, work: Work) -> Steps: ...

    def plane(self, name: str, layer: int, dim: int, shard: str = "replicated") -> PlaneSpec:
        """A plane of one vector a token, in the KV cache's type."""

    def mla_planes(self, facts: ModelFacts, layer: int) -> tuple[PlaneSpec, ...]:
        """What `mla` keeps of each token, but for the indexer's key."""


def plane(name: str, layer: int, dim: int, shard: str, kv: str, dtype: torch.dtype) -> PlaneSpec:
    """A plane of one vector a token. kv: the KV cache's type, "" for the model's, `dtype`. Index keys are never FP8: which tokens are attended to
    is a choice, which rounding may change altogether, and they are few."""
    of = kept(kv, dtype)
    return vectors(name, layer, dim, dtype if name == "index" and of == FP8 else of, shard)


class ReferenceSteps(nn.Module):
    """Groups with their pages gathered and masked, see `attention.context`."""

    cis: Tensor
    counting: Tensor

    def __init__(self, facts: ModelFacts, work: Work, device: torch.device) -> None:
        super().__init__()
        self.work = work
        self.register_buffer("cis", rotary.table(facts.rope, facts.context, device), persistent=False)
        self.register_buffer("counting", counting(facts.context, device), persistent=False)

    def step(self, batch: Batch, planes: Planes) -> Step:
        return step_of(batch, planes, self.cis, self.counting, self.work)


@dataclass(frozen=True, slots=True)
class ReferenceParts:
    """Plain torch, on any device. selection: what chooses the context under DSA. choice: of it, what is kept of a token."""

    dtype: torch.dtype
    device: torch.device
    selection: Selection = best
    choice: KernelConfig = KernelConfig()
    stacked_shared: bool = False
    own_index: bool = False

    def beside(self, facts: ModelFacts) -> ReferenceParts:
        return self

    def norm(self, dim: int, eps: float) -> RMSNorm:
        return RMSNorm(dim, eps, self.device)

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> Linear:
        return Linear(inputs, outputs, self.dtype, self.device, bias)

    def embedding(self, vocab: int, hidden: int) -> Embedding:
        return Embedding(vocab, hidden, self.dtype, self.device)

    def mla(self, facts: ModelFacts, layer: int, indexed: bool) -> Mla:
        made = Mla if self.choice.latent else Mha
        return made(facts, layer, indexed, self.selection, self.dtype, self.device)

    def gqa(self, facts: ModelFacts, layer: int, *, qk_norm: bool, out_bias: bool, inputs: int = 0) -> Gqa:
        return Gqa(facts, layer, self.dtype, self.device, qk_norm=qk_norm, out_bias=out_bias, inputs=inputs)

    def mlp(self, hidden: int, intermediate: int, bias: bool = False) -> Mlp:
        return Mlp(hidden, intermediate, self.dtype, self.device, bias)

    def moe(self, moe: config.Moe, hidden: int) -> MoeBlock:
        return MoeBlock(moe, hidden, self.dtype, self.device)

    def steps(self, facts: ModelFacts, work: Work) -> ReferenceSteps:
        return ReferenceSteps(facts, work, self.device)

    def plane(self, name: str, layer: int, dim: int, shard: str = "replicated") -> PlaneSpec:
        return plane(name, layer, dim, shard, self.choice.kv, self.dtype)

    def mla_planes(self, facts: ModelFacts, layer: int) -> tuple[PlaneSpec, ...]:
        assert facts.mla is not None
        shape, heads = facts.mla, facts.heads
        if self.choice.latent:
            return (self.plane("latent", layer, shape.kv_lora + shape.rope),)
        key, value = heads * (shape.nope + shape.rope), heads * shape.v
        return self.plane("key", layer, key, "heads"), self.plane("value", layer, value, "heads")
