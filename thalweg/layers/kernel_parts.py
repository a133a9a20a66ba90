"""The parts of a model on one GPU's kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import torch

from thalweg.attention.context import Work
from thalweg.config import model as config
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import TORCH, KernelConfig
from thalweg.kernels.experts.backends import runner
from thalweg.kernels.gemm.fp8 import product
from thalweg.kernels.mla.flashinfer import FlashInferDecoder
from thalweg.kernels.mla.paged import PREFILLS, Decoder, decoder
from thalweg.layers import rotary
from thalweg.layers.fused import FusedEmbedding, FusedFp8Linear, FusedLinear, FusedMlp, FusedMoe, FusedNorm, matmul
from thalweg.layers.invariant_mla import InvariantMla, own_rows
from thalweg.layers.paged import PagedSteps, nothing, ragged
from thalweg.layers.paged_gqa import PagedGqa
from thalweg.layers.paged_gqa import prepare_by as prepare_gqa
from thalweg.layers.paged_mha import WIDTH, PagedMha
from thalweg.layers.paged_mla import LatentMla, PagedMla, prepare_by
from thalweg.layers.parts import ReferenceSteps, plane
from thalweg.layers.sparse_mla import SparseMla
from thalweg.memory.planes import FP8, PlaneSpec, kept


@dataclass(frozen=True, slots=True)
class KernelParts:
    """See `layers.parts.Parts`. fp8: whether the weights stay in FP8 blocks, as the checkpoint has them."""

    dtype: torch.dtype
    device: torch.device
    choice: KernelConfig
    fp8: bool = False
    stacked_shared: bool = True
    own_index: bool = True

    def beside(self, facts: ModelFacts) -> KernelParts:
        """On our own kernels, which know every kind of attention but that to a choice of context."""
        by = TORCH if facts.indexer is not None else "triton"
        choice = msgspec.structs.replace(self.choice, decode=by, prefill=by)
        return replace(self, choice=choice, fp8=facts.fp8_block is not None)

    def norm(self, dim: int, eps: float) -> FusedNorm:
        return FusedNorm(dim, eps, self.device)

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> FusedLinear | FusedFp8Linear:
        if self.fp8 and not bias and inputs % 128 == 0:
            by = product(self.choice.fp8_gemm, self.choice.deterministic)
            return FusedFp8Linear(inputs, outputs, self.device, by)
        return FusedLinear(inputs, outputs, self.dtype, self.device, matmul(self.choice.deterministic), bias)

    def embedding(self, vocab: int, hidden: int) -> FusedEmbedding:
        return FusedEmbedding(vocab, hidden, self.dtype, self.device, matmul(self.choice.deterministic))

    def mla(self, facts: ModelFacts, layer: int, indexed: bool) -> PagedMla | SparseMla:
        if self.choice.decode == TORCH:
            return SparseMla(facts, layer, indexed, self.linear, self.norm, self.dtype, self.device)
        choice, given = self.choice, (facts, layer, self.linear, self.dtype, self.device)
        if not choice.latent:
            return PagedMha(*given, matmul(choice.deterministic), choice.deterministic)
        if choice.deterministic:
            return InvariantMla(*given)
        return LatentMla(*given, self._decoder(facts), PREFILLS[choice.prefill])

    def _decoder(self, facts: ModelFacts) -> Decoder:
        """What attends to latents in decode rows."""
        assert facts.mla is not None
        scale = rotary.softmax_scale(facts.mla.nope + facts.mla.rope, facts.rope)
        if self.choice.decode == "flashinfer":
            return FlashInferDecoder(facts.heads, facts.mla.kv_lora, scale)
        fp8 = kept(self.choice.kv, self.dtype) == FP8
        return decoder(self.choice.decode, facts.heads, facts.mla.kv_lora, scale, fp8)

    def gqa(self, facts: ModelFacts, layer: int, *, qk_norm: bool, out_bias: bool, inputs: int = 0) -> PagedGqa:
        given = facts, layer, self.linear, self.device, self.choice
        return PagedGqa(*given, qk_norm=qk_norm, out_bias=out_bias, inputs=inputs)

    def mlp(self, hidden: int, intermediate: int, bias: bool = False) -> FusedMlp:
        return FusedMlp(self.linear(hidden, 2 * intermediate, bias), self.linear(intermediate, hidden, bias))

    def moe(self, moe: config.Moe, hidden: int) -> FusedMoe:
        exact = self.choice.deterministic
        run = runner(self.choice.moe, exact)
        return FusedMoe(moe, hidden, self.dtype, self.device, self.fp8, run, exact)

    def steps(self, facts: ModelFacts, work: Work) -> PagedSteps | ReferenceSteps:
        if self.choice.decode == TORCH:
            return ReferenceSteps(facts, work, self.device)
        if facts.mla is None:
            prepare = prepare_gqa(self.choice, facts, self.device)
            return PagedSteps(facts, self.device, prepare, gathers=self.choice.prefill == "fa3")
        if not self.choice.latent:
            return PagedSteps(facts, self.device, ragged if self.choice.deterministic else nothing, gathers=False)
        if self.choice.deterministic:
            return PagedSteps(facts, self.device, own_rows, gathers=False)
        return PagedSteps(facts, self.device, prepare_by(self._decoder(facts)))

    def plane(self, name: str, layer: int, dim: int, shard: str = "replicated") -> PlaneSpec:
        return plane(name, layer, dim, shard, self.choice.kv, self.dtype)

    def mla_planes(self, facts: ModelFacts, layer: int) -> tuple[PlaneSpec, ...]:
        assert facts.mla is not None
        if self.choice.latent:
            return (self.plane("latent", layer, facts.mla.kv_lora + facts.mla.rope),)
        return tuple(self.plane(name, layer, facts.heads * WIDTH, "heads") for name in ("key", "value"))
