"""Layer factories. A model names its layers; a `LayerFactory` makes them: in plain torch
(`layers.reference`), or on a GPU's kernels (`layers.kernel_layers`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from thalweg.attention.context import WorkspaceNeed
from thalweg.config.model import ModelFacts, MoeFacts
from thalweg.core.kernels import RECORD, KernelConfig
from thalweg.layers.interface import FeedForward, GroupedAttention, LatentAttention, MetadataBuilder, Norm, Vocabulary
from thalweg.layers.linear import LinearLayer, Mlp, PackedShard, taken
from thalweg.memory.planes import PlaneSpec, index_plane, kv_cache_dtype, record_plane, vector_plane
from thalweg.parallel.axis import Axis, share_of, width_of
from thalweg.parallel.experts import ExpertPlacement
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.quant.catalog import Declared, Schemes
from thalweg.quant.scheme import Quantized, Take, TensorSpec
from thalweg.weights.table import Transform, unchanged

NO_SCHEMES = Declared({})  # every weight is plain numbers


@dataclass(frozen=True, slots=True)
class LayerFactory(ABC):
    """Makes the layers of one model. A layer declares the published tensors that fill it; `name` is the published
    layer's.
    """

    norm_type: ClassVar[type[Any]]
    vocabulary_type: ClassVar[type[Any]]
    gqa_type: ClassVar[type[Any]]
    holds_codes: ClassVar[bool]  # whether memory holds weights in the schemes of `kernel_scheme`
    dtype: torch.dtype  # in which the model computes
    device: torch.device
    kernels: KernelConfig = KernelConfig()
    layout: Layout = SINGLE_RANK
    published: torch.dtype = torch.bfloat16  # of an unquantized checkpoint's tensors
    notes: list[str] = field(default_factory=list)  # what a user should know of how weights are held
    schemes: Schemes = NO_SCHEMES  # of the checkpoint's weights

    @abstractmethod
    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> LayerFactory:
        """Makes the layers of a model that drafts for one of these: its KV lies in the same pages, of whole contexts on
        each rank, and its attention may be of another kind.
        """

    def norm(self, name: str, dim: int, eps: float, reorder: Transform = unchanged) -> Norm:
        """reorder: of its dims."""
        norm: Norm = self.norm_type(self, name, dim, eps, reorder)
        return norm

    @abstractmethod
    def linear(
        self,
        widths: Sequence[int],
        inputs: int,
        has_bias: bool,
        is_partial: bool = False,
        held: Quantized | None = None,
    ) -> LinearLayer:
        """A linear layer that declares no tensors yet. held: the scheme of its weight, see `kernel_scheme`."""

    def vocabulary(self, name: str, vocab: int, hidden: int) -> Vocabulary:
        vocabulary: Vocabulary = self.vocabulary_type(self, name, vocab, hidden)
        return vocabulary

    @abstractmethod
    def mla(self, facts: ModelFacts, layer: int, name: str, is_indexed: bool) -> LatentAttention: ...

    def gqa(self, facts: ModelFacts, layer: int, name: str, qk_norm: bool = False, inputs: int = 0) -> GroupedAttention:
        """qk_norm: queries and keys are normed. inputs: width of what they and the values are made of; 0 is the hidden
        size.
        """
        attention: GroupedAttention = self.gqa_type(self, facts, layer, name, qk_norm, inputs)
        return attention

    def feed_forward(self, facts: ModelFacts, layer: int, name: str, has_bias: bool = False) -> FeedForward:
        """The mixture of experts of this layer, or the MLP of one without."""
        if facts.moe is not None and facts.moe.in_layer(layer):
            return self.moe(layer, name, facts.moe, facts.hidden)
        return self.mlp(name, facts.hidden, facts.intermediate, has_bias)

    @abstractmethod
    def moe(self, layer: int, name: str, moe: MoeFacts, hidden: int) -> FeedForward: ...

    def placement(self, layer: int, moe: MoeFacts, stacked: int = 0) -> ExpertPlacement | None:
        """Where the experts of a layer are; None with all on one rank. stacked: shared experts that have slots, too."""
        if self.layout.is_single:
            return None
        return ExpertPlacement(moe.experts, stacked, self.layout, self.device, layer, self.kernels.deterministic)

    @abstractmethod
    def metadata(self, facts: ModelFacts, workspace: WorkspaceNeed) -> MetadataBuilder: ...

    def kernel_scheme(self, weight: TensorSpec, take: Take, is_reordered: bool = False) -> Quantized | None:
        """The scheme by which a GPU's kernels multiply by this slice of a weight, and which therefore says on any
        device how they round its inputs; None is plain numbers.
        """
        scheme = self.schemes.of(weight)
        return scheme if isinstance(scheme, Quantized) and scheme.holds(take, weight.shape, is_reordered) else None

    def scheme_of_part(self, part: PackedShard, inputs: int) -> Quantized | None:
        """`kernel_scheme` of a part of a packed linear layer."""
        weight = TensorSpec(f"{part.name}.weight", (part.rows, inputs), self.published)
        return self.kernel_scheme(weight, taken(part.here), part.reorder is not unchanged)

    def expert_schemes(self, name: str, moe: MoeFacts, hidden: int) -> tuple[Quantized | None, Quantized | None]:
        """`kernel_scheme` of routed and shared experts. One expert that kernels cannot multiply by as it is stored
        keeps all from it.
        """
        inner, width = moe.intermediate, width_of(moe.intermediate, self.layout.moe_tp)
        # what of the inner width lies in the stacks as one expert
        part = width if self.layout.moe_tp.size > 1 else range(inner) if moe.shared > 1 else None
        routed = [self._expert_scheme(f"{name}.experts.{i}", inner, hidden, part) for i in range(moe.experts)]
        shared = self._expert_scheme(f"{name}.shared_experts", moe.shared * inner, hidden, part)
        return _common(routed), shared

    def _expert_scheme(self, name: str, inner: int, hidden: int, part: range | None) -> Quantized | None:
        up, down = ((inner, hidden), taken(part)), ((hidden, inner), taken(columns=part))
        matrices = {"gate": up, "up": up, "down": down}
        scheme = _common(
            [
                self.kernel_scheme(TensorSpec(f"{name}.{half}_proj.weight", shape, self.published), take)
                for half, (shape, take) in matrices.items()
            ]
        )
        return scheme if scheme is not None and scheme.has_expert_kernels else None

    def packed(self, parts: Sequence[PackedShard], inputs: int, has_bias: bool = False) -> LinearLayer:
        """A linear layer whose weight is that of several published ones, below one another."""
        linear = self.linear([part.width for part in parts], inputs, has_bias)
        linear.load_parts(parts, inputs, self.published, has_bias)
        return linear

    def row(
        self, name: str, shape: tuple[int, int], columns: range | None = None, has_bias: bool = False
    ) -> LinearLayer:
        """A linear layer of published shape (outputs, inputs). columns: the inputs on this rank, whose result is a
        partial sum; None is all.
        """
        is_here = columns is None or columns.start == 0  # of several ranks, the first adds the bias
        inputs = shape[1] if columns is None else len(columns)
        weight, take = TensorSpec(f"{name}.weight", shape, self.published), taken(columns=columns)
        scheme = None if has_bias else self.kernel_scheme(weight, take)
        linear = self.linear([shape[0]], inputs, has_bias and is_here, columns is not None, scheme)
        held = scheme if self.holds_codes else None
        linear.loads("weight", weight.name, shape, self.published, take=take, held=held)
        if has_bias and is_here:
            linear.loads("bias", f"{name}.bias", shape[:1], self.published)
        elif has_bias:
            linear.weights.skips.append(re.escape(f"{name}.bias"))
        return linear

    def mlp(self, name: str, hidden: int, intermediate: int, has_bias: bool = False, axis: Axis | None = None) -> Mlp:
        """An MLP of the published names gate_proj, up_proj and down_proj. axis: the ranks that share its width; None
        is the layout's.
        """
        axis = self.layout.dense if axis is None else axis
        here = None if axis.size == 1 else width_of(intermediate, axis)
        gate_up = [PackedShard(f"{name}.{half}_proj", intermediate, here) for half in ("gate", "up")]
        return Mlp(
            self.packed(gate_up, hidden, has_bias),
            self.row(f"{name}.down_proj", (hidden, intermediate), here, has_bias),
        )

    def shared_experts(self, name: str, moe: MoeFacts, hidden: int) -> Mlp:
        """The shared experts of a mixture, as one MLP."""
        return self.mlp(f"{name}.shared_experts", hidden, moe.shared * moe.intermediate, axis=self.layout.tp)

    def plane(self, name: str, layer: int, dim: int, shard: str = "replicated") -> PlaneSpec:
        """A plane of one vector a token, in the KV cache's type. Index keys are in the model's where that is FP8,
        unless they have scales of their own.
        """
        if name == "index" and self.kernels.fp8_index:
            return index_plane(layer, dim)
        dtype = kv_cache_dtype(self.kernels.kv, self.dtype)
        return vector_plane(name, layer, dim, self.dtype if name == "index" and dtype.itemsize == 1 else dtype, shard)

    def mla_planes(self, facts: ModelFacts, layer: int) -> tuple[PlaneSpec, ...]:
        """Cache tensors of `mla` per token, without the indexer's key."""
        assert facts.mla is not None
        if self.kernels.latent:
            has_records, width = self.kernels.kv == RECORD and facts.indexer is not None, facts.mla.kv_lora
            rope = facts.mla.rope
            spec = record_plane(layer, width, rope) if has_records else self.plane("latent", layer, width + rope)
            return (replace(spec, hot=self.hot_entries(facts, layer)),)
        heads = len(share_of(facts.heads, self.layout.tp, "attention heads"))
        key, value = self.head_widths(facts)
        return self.plane("key", layer, heads * key, "heads"), self.plane("value", layer, heads * value, "heads")

    def hot_entries(self, facts: ModelFacts, layer: int) -> int:
        """Entries of a slot's hot set of this layer's latents; 0: its plane is on the device. A next-token layer's is
        there, because later steps write its positions again.
        """
        return self.kernels.hot if facts.indexer is not None and layer < facts.layers else 0

    @abstractmethod
    def head_widths(self, facts: ModelFacts) -> tuple[int, int]:
        """Numbers of a head's key and value where latents are not kept."""


def _common(schemes: Sequence[Quantized | None]) -> Quantized | None:
    """The scheme that all have; None where they differ."""
    first = schemes[0]
    return first if all(memory_of(scheme) == memory_of(first) for scheme in schemes) else None


def memory_of(scheme: Quantized | None) -> Hashable:
    """See `Quantized.memory`; None of plain numbers."""
    return None if scheme is None else scheme.memory
