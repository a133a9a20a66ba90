"""The parts of a model on one GPU's kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thalweg.attention.context import Work
from thalweg.config import model as config
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelChoice
from thalweg.layers.fused import FusedEmbedding, FusedFp8Linear, FusedLinear, FusedMlp, FusedMoe, FusedNorm
from thalweg.layers.paged import PagedSteps
from thalweg.layers.paged_gqa import PagedGqa
from thalweg.layers.paged_mla import PagedMla
from thalweg.memory.planes import PlaneSpec, vectors


@dataclass(frozen=True, slots=True)
class KernelParts:
    """See `layers.parts.Parts`. fp8: whether the weights stay in FP8 blocks, as the checkpoint has them."""

    dtype: torch.dtype
    device: torch.device
    choice: KernelChoice
    fp8: bool = False
    stacked_shared: bool = True

    def norm(self, dim: int, eps: float) -> FusedNorm:
        return FusedNorm(dim, eps, self.device)

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> FusedLinear | FusedFp8Linear:
        if self.fp8 and not bias and inputs % 128 == 0:
            return FusedFp8Linear(inputs, outputs, self.device)
        return FusedLinear(inputs, outputs, self.dtype, self.device, bias)

    def embedding(self, vocab: int, hidden: int) -> FusedEmbedding:
        return FusedEmbedding(vocab, hidden, self.dtype, self.device)

    def mla(self, facts: ModelFacts, layer: int, indexed: bool) -> PagedMla:
        return PagedMla(facts, layer, self.linear, self.dtype, self.device)

    def gqa(self, facts: ModelFacts, layer: int, *, qk_norm: bool, out_bias: bool) -> PagedGqa:
        return PagedGqa(facts, layer, self.linear, self.device, qk_norm=qk_norm, out_bias=out_bias)

    def mlp(self, hidden: int, intermediate: int, bias: bool = False) -> FusedMlp:
        return FusedMlp(self.linear(hidden, 2 * intermediate, bias), self.linear(intermediate, hidden, bias))

    def moe(self, moe: config.Moe, hidden: int) -> FusedMoe:
        return FusedMoe(moe, hidden, self.dtype, self.device, self.fp8)

    def steps(self, facts: ModelFacts, work: Work) -> PagedSteps:
        return PagedSteps(facts, self.device)

    def plane(self, name: str, layer: int, dim: int, shard: str = "replicated") -> PlaneSpec:
        return vectors(name, layer, dim, self.dtype, shard)
