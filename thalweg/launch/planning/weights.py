"""A model as `plan` sees it: the weights and the KV of one GPU of a layout, counted from its layers on the meta
device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor, nn

from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE
from thalweg.engine.build import DTYPES
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import PlaneSpec
from thalweg.models import catalog
from thalweg.models.stages import PipelineStage
from thalweg.parallel.layout import ExpertLayout, Layout
from thalweg.quant.catalog import Declared
from thalweg.quant.matching import is_expert
from thalweg.quant.scheme import CutError, Quantized, Take
from thalweg.weights.table import WeightRule, table_of, unchanged

META = torch.device("meta")
LayerKind = tuple[bool, bool]
# phases of a step by published names; the first that matches counts. Weights of "" are looked up, not multiplied.
PHASES = (
    ("experts", r"\.experts\.|shared_experts|\.mlp\.gate\."),
    ("mlp", r"\.?mlp\."),
    ("projections", r"self_attn"),
    ("head", r"lm_head"),
    ("", r"embed_tokens"),
    ("join", r"eh_proj|fc\."),
)


class MetaRank:
    """The first rank of an axis, which holds the largest part, or the last one. It computes nothing."""

    def __init__(self, size: int, is_last: bool = False) -> None:
        self.size, self.rank = size, (size - 1) * is_last

    sum_and_norm = exchange = None

    def _unused(self, *tensors: Any) -> Any:
        raise AssertionError("a model on the meta device computes nothing")

    add_ = all_reduce = all_gather = reduce_scatter = all_to_all = transfer = post = _unused


class WeightGroup(NamedTuple):
    """Weights of one phase on one GPU, in all layers."""

    phase: str
    is_routed: bool  # routed experts, of which a step reads those that tokens chose
    is_in_layers: bool  # divided over the stages of a pipeline
    parameters: int = 0
    low: float = 0.0  # numbers that tokens are multiplied by at the rate of quantized products
    high: float = 0.0  # the same at the rate of 16-bit products
    fp4: float = 0.0  # the same at the rate of FP4 products, where a machine has them
    read: float = 0.0  # bytes that a step reads: matrices as published, without the multipliers of blocks
    held: float = 0.0  # bytes in memory as the engine loads them

    def plus(self, other: WeightGroup, times: int) -> WeightGroup:
        sums: list[Any] = [own + times * more for own, more in zip(self[3:], other[3:], strict=True)]
        return WeightGroup(*self[:3], *sums)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of a token in the KV cache of one layer on one GPU."""

    attended: float  # latent, or keys and values
    index: float = 0.0  # key of an indexer


@dataclass(frozen=True)
class RankModel:
    """A model, or a drafter, on one GPU of each stage of a layout."""

    facts: ModelFacts
    layout: ParallelLayout
    groups: tuple[WeightGroup, ...]
    kv: KVBytes

    @cached_property
    def weight_bytes(self) -> float:
        """Memory of the weights on the fullest GPU of a pipeline."""
        stage = -(-self.facts.layers // self.layout.pp) / self.facts.layers
        # the first stage has the embedding and the last the head, which are as large
        groups = [group for group in self.groups if self.layout.pp == 1 or group.phase or group.is_in_layers]
        return sum(group.held * (stage if group.is_in_layers else 1.0) for group in groups)

    def kv_bytes(self) -> float:
        """Bytes of a token in all layers."""
        indexers = 0 if self.facts.indexer is None else sum(self.facts.indexer.full)
        return self.facts.layers * self.kv.attended + indexers * self.kv.index

    def flops_a_token(self) -> float:
        """FLOPs of all products with weights that a token meets, the head included."""
        moe = self.facts.moe
        shares = [moe.topk / moe.experts if group.is_routed and moe else 1.0 for group in self.groups]
        return sum(2.0 * sum(group[4:7]) * share for group, share in zip(self.groups, shares, strict=True))


class PlannedModel:
    """The same model on any layout."""

    def __init__(
        self,
        facts: ModelFacts,
        dtype: str = "bfloat16",
        is_reference: bool = False,
        kernels: KernelConfig | None = None,
        redundant: int = 0,
        named: Collection[str] = (),
        is_dense_whole: bool = False,
    ) -> None:
        """dtype: of weights that are not quantized. is_reference: plain torch computes, with all weights
        dequantized. named: fields of `kernels` that the user chose; others suit each layout. is_dense_whole: every
        rank computes whole dense MLPs.
        """
        self.facts, self.dtype, self.kernels, self.named = facts, DTYPES[dtype], kernels or KernelConfig(), named
        self.is_reference, self.experts = is_reference, ExpertLayout(redundant)
        self.is_dense_whole, self.stored = is_dense_whole, Declared(facts.quantization_config)
        self.schemes = Declared({}) if is_reference else self.stored
        self._by_layout: dict[ParallelLayout, RankModel] = {}

    def on(self, layout: ParallelLayout) -> RankModel:
        """Raises UnsupportedConfig where the layers cannot be divided so."""
        inner = replace(layout, copies=1, pp=1)
        if inner not in self._by_layout:
            self._by_layout[inner] = self._count(inner)
        return replace(self._by_layout[inner], layout=layout)

    def factory(self, layout: ParallelLayout = ONE, is_last: bool = False) -> ReferenceLayers:
        """is_last: makes what the last rank has, in place of the first."""
        dense = 1 if self.is_dense_whole else layout.attention
        sizes = layout.attention, layout.dp * layout.cp, dense, layout.ep, layout.tp // layout.ep, layout.indexer
        attention, dp, dense_tp, ep, moe_tp, indexer = (MetaRank(size, is_last) for size in sizes)
        axes = Layout(attention, dp, dense_tp, ep, moe_tp, experts=self.experts, indexer=indexer)
        published = catalog.published_dtype(self.facts)
        return ReferenceLayers(self.dtype, META, self.kernels, axes if layout.tp > 1 else Layout(), published)

    def headed(self, layout: ParallelLayout = ONE) -> nn.Module:
        """Embedding and head without layers: the target of a drafter."""
        layers = self.facts.layers
        return catalog.assemble(self.facts, self.factory(layout), PipelineStage(layers, layers, layers))

    def _count(self, layout: ParallelLayout) -> RankModel:
        """Layers of one kind are alike, so one of each is made."""
        facts, kinds = self.facts, Counter(layer_kinds(self.facts))
        few = with_layers(facts, tuple(kinds))
        self._check_cuts(few, layout)
        model = catalog.assemble(few, self.factory(layout))
        times = list(kinds.values())
        groups = self.groups(model, times)
        return RankModel(facts, layout, groups, kv_bytes(model.planes(), len(kinds)))

    def _check_cuts(self, facts: ModelFacts, layout: ParallelLayout) -> None:
        """Raises UnsupportedConfig where a rank's slice of a weight cuts what a checkpoint stores together. Wherever
        some rank's does, the last one's does.
        """
        cuts = list[tuple[bool, CutError]]()
        for rule in table_of(catalog.assemble(facts, self.factory(layout, is_last=True))).rules:
            try:
                self.stored.of(rule.source).reads(rule.source, rule.take)
            except CutError as error:
                cuts.append((is_expert(rule.source.name), error))
        if cuts:
            is_routed, first = min(cuts, key=lambda cut: cut[0])
            can_divide = is_routed and facts.moe is not None and facts.moe.experts % layout.tp == 0
            use = f"--ep-size {layout.tp}, which leaves experts whole" if can_divide else "another --tp-size"
            raise UnsupportedConfig(f"tp_size: {first}; use {use}")

    def groups(
        self, module: nn.Module, times: list[int] | None = None, schemes: Declared | None = None
    ) -> tuple[WeightGroup, ...]:
        """times: how often there is each layer, by its number; None counts each weight once. schemes: of the module's
        checkpoint; None is the model's.
        """
        found: dict[tuple[str, bool, bool], WeightGroup] = {}
        parameters = dict(module.named_parameters())
        for rule in table_of(module).rules:
            layer = re.match(r"model\.layers\.(\d+)\.", rule.source.name)
            group = self._group(rule, parameters[rule.target], schemes or self.schemes, layer is not None)
            key = group.phase, group.is_routed, group.is_in_layers
            found[key] = found.get(key, WeightGroup(*key)).plus(group, times[int(layer[1])] if layer and times else 1)
        return tuple(found.values())

    def _group(self, rule: WeightRule, target: Tensor, schemes: Declared, is_in_layers: bool) -> WeightGroup:
        name, shape = rule.source.name, _cut(rule.source.shape, rule.take)
        # several rules may read one tensor, each some of it
        count = prod(shape) if rule.into else target.numel()
        is_matrix, share = len(shape) > 1, count / prod(shape)
        phase = next((phase for phase, pattern in PHASES if re.search(pattern, name)), "")
        phase = "head" if self.facts.tied and "embed_tokens" in name else phase if is_matrix else ""
        kernels = self.dtype.itemsize if is_matrix else torch.float32.itemsize
        size = target.itemsize if self.is_reference else kernels
        scheme, read, held, rate = schemes.of(rule.source), float(count * size), float(count * size), "high"
        if isinstance(scheme, Quantized):
            parts = scheme.parameters(shape)
            codes, dtype = parts[""]  # two of 4 bits in a byte
            read = share * prod(codes) * dtype.itemsize
            rate = "fp4" if scheme.is_fp4 else "low" if scheme.quantizes_activations else "high"
            if scheme.holds(rule.take, rule.source.shape, rule.transform is not unchanged):
                held = share * sum(prod(part) * dtype.itemsize for part, dtype in parts.values())
        is_read, numbers = phase != "", count if phase else 0
        low, high, fp4 = (numbers if rate == each else 0 for each in ("low", "high", "fp4"))
        read = read if is_read else 0.0
        return WeightGroup(phase, ".experts." in name, is_in_layers, count, low, high, fp4, read, held)


def kv_bytes(planes: Iterable[PlaneSpec], layers: int) -> KVBytes:
    """Mean over the layers that have each kind."""
    bytes_by_kind, indexers = Counter[bool](), 0
    for plane in planes:
        bytes_by_kind[plane.name == "index"] += plane.page_bytes
        indexers += plane.name == "index"
    return KVBytes(bytes_by_kind[False] / PAGE / layers, bytes_by_kind[True] / PAGE / max(indexers, 1))


def layer_kinds(facts: ModelFacts) -> list[LayerKind]:
    """Of each layer, whether it has experts, and whether an indexer."""
    moe, indexer = facts.moe, facts.indexer
    return [
        (moe is not None and moe.in_layer(layer), indexer is not None and indexer.full[layer])
        for layer in range(facts.layers)
    ]


def with_layers(facts: ModelFacts, kinds: Sequence[LayerKind]) -> ModelFacts:
    """The same model with these layers, and no NextN layers."""
    moe = facts.moe and structs.replace(facts.moe, sparse=tuple(is_sparse for is_sparse, _ in kinds))
    indexer = facts.indexer and structs.replace(facts.indexer, full=tuple(is_full for _, is_full in kinds))
    return structs.replace(facts, layers=len(kinds), moe=moe, indexer=indexer, nextn=0)


def _cut(shape: tuple[int, ...], take: Take) -> tuple[int, ...]:
    """The shape of a slice."""
    sizes = [len(range(*part.indices(size))) for part, size in zip(take, shape, strict=False)]
    return (*sizes, *shape[len(sizes) :])
