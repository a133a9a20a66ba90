"""Layers in plain torch, on any device: what runs on a CPU, and the oracle of a GPU's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thalweg.attention.context import Step, Work, counting, step_of
from thalweg.attention.selection import Selection, best
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts, Moe
from thalweg.core.kernels import KernelConfig
from thalweg.layers import rotary
from thalweg.layers.gqa import Gqa
from thalweg.layers.linear import Embedding, Linear, Part, declare_packed, declare_row, declare_row_bias
from thalweg.layers.mha import Mha
from thalweg.layers.mla import Mla
from thalweg.layers.mlp import Mlp, make_mlp
from thalweg.layers.moe import MoeBlock
from thalweg.layers.norm import RMSNorm
from thalweg.layers.residual import ResidualStream, ShardedStream, SingleStream
from thalweg.memory.planes import FP8, Planes, PlaneSpec, kept, vectors
from thalweg.parallel.axis import share_of, vocabulary_of
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.quant.catalog import Schemes
from thalweg.weights.table import Transform, unchanged


class ReferenceMetadata(nn.Module):
    """Groups with their pages gathered and masked, see `attention.context`."""

    cis: Tensor
    counting: Tensor

    def __init__(self, facts: ModelFacts, work: Work, device: torch.device) -> None:
        super().__init__()
        self.work = work
        self.register_buffer("cis", rotary.table(facts.rope, facts.context, device), persistent=False)
        self.register_buffer("counting", counting(facts.context, device), persistent=False)

    def build(self, batch: Batch, planes: Planes) -> Step:
        return step_of(batch, planes, self.cis, self.counting, self.work)


@dataclass(frozen=True, slots=True)
class ReferenceLayers:
    """See `layers.interface.LayerFactory`. Quantized weights are dequantized as they are loaded."""

    dtype: torch.dtype
    device: torch.device
    selection: Selection = best  # chooses the context under DSA
    choice: KernelConfig = KernelConfig()  # what is kept of a token
    layout: Layout = SINGLE_RANK
    published: torch.dtype = torch.bfloat16  # of an unquantized checkpoint
    notes: list[str] = field(default_factory=list)  # what a user should know of how weights are held

    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> ReferenceLayers:
        return self

    def stream(self, x_TH: Tensor, is_partial: bool = False) -> ResidualStream:
        return stream(self.layout, x_TH, is_partial)

    def norm(self, name: str, dim: int, eps: float, reorder: Transform = unchanged) -> RMSNorm:
        return RMSNorm(name, dim, eps, self.published, self.device, reorder)

    def packed(self, parts: Sequence[Part], inputs: int, has_bias: bool = False) -> Linear:
        made = Linear([part.width for part in parts], inputs, self.dtype, self.device, has_bias)
        declare_packed(made.weights, parts, inputs, self.published, has_bias)
        return made

    def row(self, name: str, shape: tuple[int, int], columns: range | None = None, has_bias: bool = False) -> Linear:
        is_here = columns is None or columns.start == 0  # of several ranks, the first adds the bias
        inputs = shape[1] if columns is None else len(columns)
        made = Linear([shape[0]], inputs, self.dtype, self.device, has_bias and is_here, columns is not None)
        declare_row(made.weights, name, shape, self.published, columns)
        if has_bias:
            declare_row_bias(made.weights, name, shape[0], self.published, is_here)
        return made

    def vocabulary(self, name: str, vocab: int, hidden: int) -> Embedding:
        here = vocabulary_of(vocab, self.layout.tp)
        return Embedding(name, vocab, hidden, here, self.published, self.dtype, self.device)

    def mla(self, facts: ModelFacts, layer: int, name: str, is_indexed: bool) -> Mla:
        made = Mla if self.choice.latent else Mha
        return made(facts, layer, name, is_indexed, self.selection, self.published, self)

    def gqa(self, facts: ModelFacts, layer: int, name: str, *, qk_norm: bool, out_bias: bool, inputs: int = 0) -> Gqa:
        return Gqa(facts, layer, name, self, qk_norm=qk_norm, out_bias=out_bias, inputs=inputs)

    def mlp(self, name: str, hidden: int, intermediate: int, has_bias: bool = False) -> Mlp:
        return make_mlp(self, name, hidden, intermediate, has_bias, self.layout.dense)

    def moe(self, name: str, moe: Moe, hidden: int) -> MoeBlock:
        shared = None
        if moe.shared:
            width = moe.shared * moe.intermediate
            shared = make_mlp(self, f"{name}.shared_experts", hidden, width, False, self.layout.tp)
        return MoeBlock(name, moe, hidden, self.published, self.dtype, self.device, self.layout, shared)

    def metadata(self, facts: ModelFacts, work: Work) -> ReferenceMetadata:
        return ReferenceMetadata(facts, work, self.device)

    def plane(self, name: str, layer: int, dim: int, shard: str = "replicated") -> PlaneSpec:
        return plane(name, layer, dim, shard, self.choice.kv, self.dtype)

    def mla_planes(self, facts: ModelFacts, layer: int) -> tuple[PlaneSpec, ...]:
        assert facts.mla is not None
        shape = facts.mla
        if self.choice.latent:
            return (self.plane("latent", layer, shape.kv_lora + shape.rope),)
        heads = len(share_of(facts.heads, self.layout.tp, "attention heads"))
        key, value = heads * (shape.nope + shape.rope), heads * shape.v
        return self.plane("key", layer, key, "heads"), self.plane("value", layer, value, "heads")


def stream(layout: Layout, x_TH: Tensor, is_partial: bool) -> ResidualStream:
    """The residual stream of a layout, beginning with x."""
    return SingleStream(x_TH) if layout.is_single else ShardedStream(x_TH, layout.tp, is_partial)


def plane(name: str, layer: int, dim: int, shard: str, kv: str, dtype: torch.dtype) -> PlaneSpec:
    """A plane of one vector a token. kv: the KV cache's type, "" for the model's, `dtype`.

    Index keys are never FP8: which tokens are attended to is a choice, which rounding may change altogether, and they
    are few.
    """
    of = kept(kv, dtype)
    return vectors(name, layer, dim, dtype if name == "index" and of == FP8 else of, shard)
