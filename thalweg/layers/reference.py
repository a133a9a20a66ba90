"""Layers in plain torch, on any device: what runs on a CPU, and the oracle of a GPU's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.attention.context import AttentionMetadataBuilder, WorkspaceNeed
from thalweg.attention.selection import Selection, select_top_k
from thalweg.config.model import ModelFacts, MoeFacts
from thalweg.layers import rotary
from thalweg.layers.factory import LayerFactory
from thalweg.layers.gqa import Gqa
from thalweg.layers.linear import Embedding, Linear, RMSNorm
from thalweg.layers.mha import Mha
from thalweg.layers.mla import Mla
from thalweg.layers.moe import MoeBlock
from thalweg.quant.catalog import Schemes
from thalweg.quant.scheme import Quantized


@dataclass(frozen=True, slots=True)
class ReferenceLayers(LayerFactory):
    """Quantized weights are dequantized as they are loaded."""

    norm_type, vocabulary_type, gqa_type = RMSNorm, Embedding, Gqa
    selection: Selection = select_top_k  # chooses the context under DSA

    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> ReferenceLayers:
        return self

    def linear(
        self,
        widths: Sequence[int],
        inputs: int,
        has_bias: bool,
        is_partial: bool = False,
        held: Quantized | None = None,
    ) -> Linear:
        return Linear(self, widths, inputs, has_bias, is_partial)

    def mla(self, facts: ModelFacts, layer: int, name: str, is_indexed: bool) -> Mla:
        kind = Mla if self.kernels.latent else Mha
        return kind(self, facts, layer, name, is_indexed, self.selection)

    def moe(self, layer: int, name: str, moe: MoeFacts, hidden: int) -> MoeBlock:
        return MoeBlock(self, layer, name, moe, hidden)

    def metadata(self, facts: ModelFacts, workspace: WorkspaceNeed) -> AttentionMetadataBuilder:
        return AttentionMetadataBuilder(rotary.table(facts.rope, facts.context, self.device), workspace)

    def head_widths(self, facts: ModelFacts) -> tuple[int, int]:
        assert facts.mla is not None
        return facts.mla.nope + facts.mla.rope, facts.mla.v
