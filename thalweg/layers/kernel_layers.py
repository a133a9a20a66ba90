"""The layers of a model on one GPU's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from thalweg.attention.context import AttentionMetadataBuilder, WorkspaceNeed
from thalweg.attention.context_shard import ContextShard
from thalweg.config.backends import DECODE, PREFILL
from thalweg.config.entry_point import load_entry
from thalweg.config.model import ModelFacts, MoeFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import TORCH
from thalweg.kernels.dsa.backends import SparseKernel
from thalweg.kernels.gqa.backends import GqaShape
from thalweg.kernels.mla.backends import MlaDecodeKernel, MlaShape
from thalweg.layers import rotary
from thalweg.layers.factory import LayerFactory, memory_of
from thalweg.layers.invariant_mla import InvariantMla, own_rows
from thalweg.layers.kernel_linear import KernelEmbedding, KernelLinear, KernelNorm, MixedLinear, QuantizedLinear
from thalweg.layers.kernel_moe import KernelMoe
from thalweg.layers.linear import LinearLayer, PackedShard
from thalweg.layers.mla import Mla
from thalweg.layers.paged import PagedMetadataBuilder, nothing, ragged
from thalweg.layers.paged_gqa import PagedGqa
from thalweg.layers.paged_gqa import prepare_by as prepare_gqa
from thalweg.layers.paged_hot import HotSparseMla
from thalweg.layers.paged_mha import WIDTH, PagedMha
from thalweg.layers.paged_mla import LatentMla, PagedMla, prepare_by
from thalweg.layers.paged_sharded import ShardedLatentMla, ShardedMetadataBuilder, ShardedSparseMla
from thalweg.layers.paged_sparse import InvariantSparseMla, SparseMla
from thalweg.layers.sharded_mla import ShardedMla
from thalweg.memory.planes import FP8, kv_cache_dtype
from thalweg.parallel.axis import SINGLE, share_of
from thalweg.quant.catalog import Schemes
from thalweg.quant.scheme import Quantized, Take, TensorSpec


@dataclass(frozen=True, slots=True)
class KernelLayers(LayerFactory):
    """Memory holds quantized weights as the checkpoint stores them where kernels multiply by them, and dequantizes the
    others.
    """

    norm_type, vocabulary_type, gqa_type = KernelNorm, KernelEmbedding, PagedGqa
    holds_codes = True

    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> KernelLayers:
        """On our own kernels; attention to a selection of context on plain torch."""
        by = TORCH if facts.indexer is not None else "triton"
        kernels = msgspec.structs.replace(self.kernels, decode=by, prefill=by, hot=0)
        return replace(self, kernels=kernels, schemes=schemes, layout=replace(self.layout, dcp=SINGLE))

    def linear(
        self,
        widths: Sequence[int],
        inputs: int,
        has_bias: bool,
        is_partial: bool = False,
        held: Quantized | None = None,
    ) -> KernelLinear | QuantizedLinear:
        if held is not None:
            return QuantizedLinear(self, held, widths, inputs, is_partial)
        return KernelLinear(self, widths, inputs, has_bias, is_partial)

    def packed(self, parts: Sequence[PackedShard], inputs: int, has_bias: bool = False) -> LinearLayer:
        """One product for the parts of each scheme."""
        held = [None if has_bias else self.scheme_of_part(part, inputs) for part in parts]
        groups, linears = _groups(parts, held), []
        for group in groups:
            some, scheme = [parts[i] for i in group], held[group[0]]
            linear = self.linear([part.width for part in some], inputs, has_bias, held=scheme)
            linear.load_parts(some, inputs, self.published, has_bias, scheme)
            linears.append(linear)
        if len(linears) == 1:
            return linears[0]
        place = {i: (number, at) for number, group in enumerate(groups) for at, i in enumerate(group)}
        return MixedLinear(linears, [place[i] for i in range(len(parts))])

    def kernel_scheme(self, weight: TensorSpec, take: Take, is_reordered: bool = False) -> Quantized | None:
        scheme = self.schemes.of(weight)
        if not isinstance(scheme, Quantized):
            return None
        if scheme.note and (note := f"{scheme.name}: {scheme.note}") not in self.notes:
            self.notes.append(note)
        if scheme.holds(take, weight.shape, is_reordered):
            return scheme
        if not is_reordered:
            self.notes.append(
                f"{weight.name} is dequantized: its {scheme.name} blocks of {scheme.block} are cut, or are not what the"
                " kernels multiply by"
            )
        return None

    def mla(self, facts: ModelFacts, layer: int, name: str, is_indexed: bool) -> PagedMla | Mla:
        is_invariant, is_shared = self.kernels.deterministic, self.layout.dcp.size > 1
        if own := DECODE[self.kernels.decode].mla_layer:
            made: Mla = (ShardedMla if is_shared else load_entry(own))(self, facts, layer, name, is_indexed)
            return made
        if not self.kernels.latent:
            return PagedMha(self, facts, layer, name)
        if is_invariant and facts.indexer is None:
            return InvariantMla(self, facts, layer, name)
        kernels = self._decoder(facts), load_entry(PREFILL[self.kernels.prefill].mla)
        if facts.indexer is not None:
            if self.hot_entries(facts, layer):
                return HotSparseMla(self, facts, layer, name, is_indexed, *kernels)
            kind = InvariantSparseMla if is_invariant else ShardedSparseMla if is_shared else SparseMla
            return kind(self, facts, layer, name, is_indexed, *kernels)
        return (ShardedLatentMla if is_shared else LatentMla)(self, facts, layer, name, *kernels)

    def _decoder(self, facts: ModelFacts) -> MlaDecodeKernel:
        """The decode kernel of latent attention."""
        assert facts.mla is not None
        scale = rotary.softmax_scale(facts.mla.nope + facts.mla.rope, facts.rope)
        heads = len(share_of(facts.heads, self.layout.tp, "attention heads")) * self.layout.dcp.size
        fp8 = kv_cache_dtype(self.kernels.kv, self.dtype) == FP8
        shape = MlaShape(heads, facts.mla.kv_lora, scale, fp8)
        kernel: MlaDecodeKernel = load_entry(DECODE[self.kernels.decode].mla)(shape)
        return kernel

    def moe(self, layer: int, name: str, moe: MoeFacts, hidden: int) -> KernelMoe:
        routed, shared = self.expert_schemes(name, moe, hidden)
        is_stacked, wish = moe.shared > 0 and memory_of(routed) == memory_of(shared), self.kernels.fusion
        if moe.shared > 1 and routed is not None and routed.activations is not None:
            is_stacked = False  # the inner row of all shared experts has one scale
        if wish and moe.shared and not is_stacked:
            raise UnsupportedConfig(
                f"shared_experts_fusion: {name} stores {moe.experts} routed experts as {_name(routed)} and {moe.shared}"
                f" shared ones as {_name(shared)}, which no stack holds together; leave --enforce-shared-experts-fusion"
                " out"
            )
        return KernelMoe(self, layer, name, moe, hidden, routed, is_stacked and wish is not False)

    def metadata(self, facts: ModelFacts, workspace: WorkspaceNeed) -> PagedMetadataBuilder | AttentionMetadataBuilder:
        kernels, device = self.kernels, self.device
        if DECODE[kernels.decode].mla_layer:
            table = rotary.table(facts.rope, facts.context, device)
            return AttentionMetadataBuilder(table, workspace, self.layout.dcp)
        if facts.mla is None:
            heads = len(share_of(facts.heads, self.layout.tp, "attention heads"))
            kv_heads = len(share_of(facts.kv_heads, self.layout.tp, "key heads", may_repeat=True))
            prepare = prepare_gqa(kernels, GqaShape(heads, kv_heads, facts.head_dim))
            prefill = PREFILL[kernels.prefill]
            captures = True in prefill.supports.graphs and not kernels.deterministic
            return PagedMetadataBuilder(facts, device, prepare, gathers=prefill.gathers_keys, captures=captures)
        if not kernels.latent:
            own = ragged if kernels.deterministic else nothing
            return PagedMetadataBuilder(facts, device, own, gathers=False)
        if kernels.deterministic:
            return PagedMetadataBuilder(facts, device, nothing if facts.indexer else own_rows, gathers=False)
        captures = True in PREFILL[kernels.prefill].supports.graphs and not kernels.hot
        if self.layout.dcp.size > 1:
            shard = ContextShard(self.layout.dcp)
            return ShardedMetadataBuilder(shard, facts, device, prepare_by(self._decoder(facts)))
        by = prepare_by(self._decoder(facts))
        return PagedMetadataBuilder(facts, device, by, captures=captures, masked=self._masked(facts))

    def _masked(self, facts: ModelFacts) -> Sequence[tuple[int, float]]:
        """Of sparse attention to latents on the device, see `kernels.dsa.backends.SparseKernel`."""
        if facts.indexer is None or self.kernels.hot:
            return ()
        kernel: type[SparseKernel] = load_entry(PREFILL[self.kernels.prefill].sparse)
        return kernel.masked

    def head_widths(self, facts: ModelFacts) -> tuple[int, int]:
        return WIDTH, WIDTH


def _name(scheme: Quantized | None) -> str:
    return "plain numbers" if scheme is None else scheme.name


def _groups(parts: Sequence[PackedShard], held: Sequence[Quantized | None]) -> list[list[int]]:
    """Which parts have one product: those of one scheme, as long as each begins with a block."""
    groups: list[list[int]] = []
    for i, scheme in enumerate(held):
        for group in groups:
            first = held[group[0]]
            rows = sum(parts[j].width for j in group)
            if memory_of(scheme) == memory_of(first) and (scheme is None or rows % scheme.block[0] == 0):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups
