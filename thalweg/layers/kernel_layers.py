"""The layers of a model on one GPU's kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import msgspec

from thalweg.attention.context import AttentionMetadataBuilder, WorkspaceNeed
from thalweg.config.backends import DECODE, PREFILL
from thalweg.config.entry_point import load_entry
from thalweg.config.model import ModelFacts, MoeFacts
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import TORCH
from thalweg.kernels.gqa.backends import GqaShape
from thalweg.kernels.mla.backends import MlaDecodeKernel, MlaShape
from thalweg.layers import rotary
from thalweg.layers.factory import LayerFactory
from thalweg.layers.invariant_mla import InvariantMla, own_rows
from thalweg.layers.kernel_linear import KernelEmbedding, KernelLinear, KernelNorm, MixedLinear, QuantizedLinear
from thalweg.layers.kernel_moe import KernelMoe
from thalweg.layers.linear import LinearLayer, PackedShard, taken
from thalweg.layers.mla import Mla
from thalweg.layers.paged import PagedMetadataBuilder, nothing, ragged
from thalweg.layers.paged_gqa import PagedGqa
from thalweg.layers.paged_gqa import prepare_by as prepare_gqa
from thalweg.layers.paged_mha import WIDTH, PagedMha
from thalweg.layers.paged_mla import LatentMla, PagedMla, prepare_by
from thalweg.layers.paged_sparse import InvariantSparseMla, SparseMla
from thalweg.memory.planes import FP8, kv_cache_dtype
from thalweg.parallel.axis import share_of, width_of
from thalweg.quant.catalog import Declared, Schemes
from thalweg.quant.scheme import Quantized, Scheme, Take, TensorSpec
from thalweg.weights.table import unchanged

NO_SCHEMES = Declared({})  # every weight is plain numbers


@dataclass(frozen=True, slots=True)
class KernelLayers(LayerFactory):
    """Memory holds quantized weights as the checkpoint stores them where kernels multiply by them, and dequantizes the
    others.
    """

    norm_type, vocabulary_type, gqa_type = KernelNorm, KernelEmbedding, PagedGqa
    schemes: Schemes = NO_SCHEMES  # of the checkpoint's weights

    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> KernelLayers:
        """On our own kernels; attention to a selection of context on plain torch."""
        by = TORCH if facts.indexer is not None else "triton"
        kernels = msgspec.structs.replace(self.kernels, decode=by, prefill=by)
        return replace(self, kernels=kernels, schemes=schemes)

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
        held = [None if has_bias else self._held_part(part, inputs) for part in parts]
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

    def _held_part(self, part: PackedShard, inputs: int) -> Quantized | None:
        weight = TensorSpec(f"{part.name}.weight", (part.rows, inputs), self.published)
        return self.held(weight, taken(part.here), part.reorder is not unchanged)

    def held(self, weight: TensorSpec, take: Take, is_reordered: bool = False) -> Quantized | None:
        scheme: Scheme = self.schemes.of(weight)
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
        if own := DECODE[self.kernels.decode].mla_layer:
            made: Mla = load_entry(own)(self, facts, layer, name, is_indexed)
            return made
        if not self.kernels.latent:
            return PagedMha(self, facts, layer, name)
        is_invariant = self.kernels.deterministic
        if is_invariant and facts.indexer is None:
            return InvariantMla(self, facts, layer, name)
        kernels = self._decoder(facts), load_entry(PREFILL[self.kernels.prefill].mla)
        if facts.indexer is not None:
            return (InvariantSparseMla if is_invariant else SparseMla)(self, facts, layer, name, is_indexed, *kernels)
        return LatentMla(self, facts, layer, name, *kernels)

    def _decoder(self, facts: ModelFacts) -> MlaDecodeKernel:
        """The decode kernel of latent attention."""
        assert facts.mla is not None
        scale = rotary.softmax_scale(facts.mla.nope + facts.mla.rope, facts.rope)
        heads = len(share_of(facts.heads, self.layout.tp, "attention heads"))
        fp8 = kv_cache_dtype(self.kernels.kv, self.dtype) == FP8
        shape = MlaShape(heads, facts.mla.kv_lora, scale, fp8)
        kernel: MlaDecodeKernel = load_entry(DECODE[self.kernels.decode].mla)(shape)
        return kernel

    def moe(self, layer: int, name: str, moe: MoeFacts, hidden: int) -> KernelMoe:
        routed, shared = self._expert_schemes(name, moe, hidden)
        is_stacked, wish = moe.shared > 0 and _memory(routed) == _memory(shared), self.kernels.fusion
        if wish and moe.shared and not is_stacked:
            raise UnsupportedConfig(
                f"shared_experts_fusion: {name} stores routed experts as {_name(routed)} and shared ones as"
                f" {_name(shared)}, which no stack holds together; leave --enforce-shared-experts-fusion out"
            )
        return KernelMoe(self, layer, name, moe, hidden, routed, is_stacked and wish is not False)

    def _expert_schemes(self, name: str, moe: MoeFacts, hidden: int) -> tuple[Quantized | None, Quantized | None]:
        """In which memory holds routed and shared experts. One expert that cannot be held as it is stored keeps all
        from it.
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
                self.held(TensorSpec(f"{name}.{half}_proj.weight", shape, self.published), take)
                for half, (shape, take) in matrices.items()
            ]
        )
        return scheme if scheme is not None and scheme.has_expert_kernels else None

    def metadata(self, facts: ModelFacts, workspace: WorkspaceNeed) -> PagedMetadataBuilder | AttentionMetadataBuilder:
        kernels, device = self.kernels, self.device
        if DECODE[kernels.decode].mla_layer:
            return AttentionMetadataBuilder(rotary.table(facts.rope, facts.context, device), workspace)
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
        captures = True in PREFILL[kernels.prefill].supports.graphs and facts.indexer is None
        return PagedMetadataBuilder(facts, device, prepare_by(self._decoder(facts)), captures=captures)

    def head_widths(self, facts: ModelFacts) -> tuple[int, int]:
        return WIDTH, WIDTH


def _name(scheme: Quantized | None) -> str:
    return "plain numbers" if scheme is None else scheme.name


def _common(schemes: Sequence[Quantized | None]) -> Quantized | None:
    """The scheme that all have; None where they differ."""
    first = schemes[0]
    return first if all(_memory(scheme) == _memory(first) for scheme in schemes) else None


def _memory(scheme: Quantized | None) -> Hashable:
    return None if scheme is None else scheme.memory


def _groups(parts: Sequence[PackedShard], held: Sequence[Quantized | None]) -> list[list[int]]:
    """Which parts have one product: those of one scheme, as long as each begins with a block."""
    groups: list[list[int]] = []
    for i, scheme in enumerate(held):
        for group in groups:
            first = held[group[0]]
            rows = sum(parts[j].width for j in group)
            if _memory(scheme) == _memory(first) and (scheme is None or rows % scheme.block[0] == 0):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups
