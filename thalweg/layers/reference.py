"""Layers in plain torch, on any device: what runs on a CPU, and the oracle of a GPU's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from thalweg.attention.context import AttentionMetadataBuilder, WorkspaceNeed
from thalweg.attention.selection import Selection, select_top_k
from thalweg.config.model import ModelFacts, MoeFacts
from thalweg.layers import rotary
from thalweg.layers.factory import LayerFactory
from thalweg.layers.gqa import Gqa
from thalweg.layers.hot_mla import HotMla
from thalweg.layers.linear import Embedding, Linear, LinearLayer, PackedShard, RMSNorm
from thalweg.layers.mha import Mha
from thalweg.layers.mla import Mla
from thalweg.layers.moe import MoeBlock
from thalweg.layers.rounded import RoundedLinear
from thalweg.layers.sharded_gqa import ShardedGqa
from thalweg.layers.sharded_mla import ShardedMla
from thalweg.parallel.axis import SINGLE
from thalweg.quant.catalog import Schemes
from thalweg.quant.scheme import Quantized


@dataclass(frozen=True, slots=True)
class ReferenceLayers(LayerFactory):
    """Quantized weights are dequantized as they are loaded. Activations are rounded where a GPU's kernels round them,
    but for FP8 blocks.
    """

    norm_type, vocabulary_type, gqa_type = RMSNorm, Embedding, Gqa
    holds_codes = False
    selection: Selection = select_top_k  # chooses the context under DSA

    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> ReferenceLayers:
        kernels, layout = structs.replace(self.kernels, hot=0), replace(self.layout, dcp=SINGLE)
        return replace(self, schemes=schemes, kernels=kernels, layout=layout)

    def linear(
        self,
        widths: Sequence[int],
        inputs: int,
        has_bias: bool,
        is_partial: bool = False,
        held: Quantized | None = None,
    ) -> Linear | RoundedLinear:
        if held is not None and held.activations is not None:
            return RoundedLinear(self, widths, inputs, [held.activations] * len(widths), is_partial)
        return Linear(self, widths, inputs, has_bias, is_partial)

    def packed(self, parts: Sequence[PackedShard], inputs: int, has_bias: bool = False) -> LinearLayer:
        schemes = [None if has_bias else self.scheme_of_part(part, inputs) for part in parts]
        rules = [None if scheme is None else scheme.activations for scheme in schemes]
        if not any(rules):
            return LayerFactory.packed(self, parts, inputs, has_bias)
        linear = RoundedLinear(self, [part.width for part in parts], inputs, rules)
        linear.load_parts(parts, inputs, self.published, has_bias)
        return linear

    def gqa(self, facts: ModelFacts, layer: int, name: str, qk_norm: bool = False, inputs: int = 0) -> Gqa:
        kind = self.gqa_type if self.layout.dcp.size == 1 else ShardedGqa
        return kind(self, facts, layer, name, qk_norm, inputs)

    def mla(self, facts: ModelFacts, layer: int, name: str, is_indexed: bool) -> Mla:
        if self.layout.dcp.size > 1:
            return ShardedMla(self, facts, layer, name, is_indexed, self.selection)
        kind = (HotMla if self.hot_entries(facts, layer) else Mla) if self.kernels.latent else Mha
        return kind(self, facts, layer, name, is_indexed, self.selection)

    def moe(self, layer: int, name: str, moe: MoeFacts, hidden: int) -> MoeBlock:
        routed, _ = self.expert_schemes(name, moe, hidden)
        return MoeBlock(self, layer, name, moe, hidden, None if routed is None else routed.activations)

    def metadata(self, facts: ModelFacts, workspace: WorkspaceNeed) -> AttentionMetadataBuilder:
        table = rotary.table(facts.rope, facts.context, self.device)
        return AttentionMetadataBuilder(table, workspace, self.layout.dcp)

    def head_widths(self, facts: ModelFacts) -> tuple[int, int]:
        assert facts.mla is not None
        return facts.mla.nope + facts.mla.rope, facts.mla.v
