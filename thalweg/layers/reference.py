"""Layers in plain torch, on any device: what runs on a CPU, and the oracle of a GPU's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thalweg.attention.context import AttentionMetadata, WorkspaceNeed, context_positions, make_metadata
from thalweg.attention.selection import Selection, select_top_k
from thalweg.batch.batch import Batch
from thalweg.config.model import ModelFacts, MoeFacts
from thalweg.layers import rotary
from thalweg.layers.factory import LayerFactory
from thalweg.layers.gqa import Gqa
from thalweg.layers.mha import Mha
from thalweg.layers.mla import Mla
from thalweg.layers.moe import MoeBlock
from thalweg.layers.reference_linear import Embedding, Linear, RMSNorm
from thalweg.memory.planes import Planes
from thalweg.quant.catalog import Schemes
from thalweg.quant.scheme import Quantized
from thalweg.weights.table import Transform, unchanged


class ReferenceMetadata(nn.Module):
    """Groups with their pages gathered and masked, see `attention.context`."""

    cos_sin: Tensor
    context_positions: Tensor

    def __init__(self, facts: ModelFacts, workspace: WorkspaceNeed, device: torch.device) -> None:
        super().__init__()
        self.workspace = workspace
        self.register_buffer("cos_sin", rotary.table(facts.rope, facts.context, device), persistent=False)
        self.register_buffer("context_positions", context_positions(facts.context, device), persistent=False)

    def build(self, batch: Batch, planes: Planes) -> AttentionMetadata:
        return make_metadata(batch, planes, self.cos_sin, self.context_positions, self.workspace)


@dataclass(frozen=True, slots=True)
class ReferenceLayers(LayerFactory):
    """Quantized weights are dequantized as they are loaded."""

    selection: Selection = select_top_k  # chooses the context under DSA

    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> ReferenceLayers:
        return self

    def norm(self, name: str, dim: int, eps: float, reorder: Transform = unchanged) -> RMSNorm:
        return RMSNorm(self, name, dim, eps, reorder)

    def linear(
        self,
        widths: Sequence[int],
        inputs: int,
        has_bias: bool,
        is_partial: bool = False,
        held: Quantized | None = None,
    ) -> Linear:
        return Linear(self, widths, inputs, has_bias, is_partial)

    def vocabulary(self, name: str, vocab: int, hidden: int) -> Embedding:
        return Embedding(self, name, vocab, hidden)

    def mla(self, facts: ModelFacts, layer: int, name: str, is_indexed: bool) -> Mla:
        kind = Mla if self.kernels.latent else Mha
        return kind(self, facts, layer, name, is_indexed, self.selection)

    def gqa(self, facts: ModelFacts, layer: int, name: str, *, qk_norm: bool, out_bias: bool, inputs: int = 0) -> Gqa:
        return Gqa(self, facts, layer, name, qk_norm=qk_norm, out_bias=out_bias, inputs=inputs)

    def moe(self, name: str, moe: MoeFacts, hidden: int) -> MoeBlock:
        return MoeBlock(self, name, moe, hidden)

    def metadata(self, facts: ModelFacts, workspace: WorkspaceNeed) -> ReferenceMetadata:
        return ReferenceMetadata(facts, workspace, self.device)

    def head_widths(self, facts: ModelFacts) -> tuple[int, int]:
        assert facts.mla is not None
        return facts.mla.nope + facts.mla.rope, facts.mla.v
