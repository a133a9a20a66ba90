"""The layers of a model on one GPU's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor

from thalweg.attention.context import Work
from thalweg.attention.selection import best
from thalweg.config.model import ModelFacts, Moe
from thalweg.core.kernels import TORCH, KernelConfig
from thalweg.kernels.experts.backends import runner
from thalweg.kernels.mla.flashinfer import FlashInferDecoder
from thalweg.kernels.mla.paged import PREFILLS, Decoder, decoder
from thalweg.layers import rotary
from thalweg.layers.invariant_mla import InvariantMla, own_rows
from thalweg.layers.kernel_linear import (
    KernelEmbedding,
    KernelLinear,
    KernelNorm,
    MixedLinear,
    QuantizedLinear,
    matmul,
)
from thalweg.layers.kernel_moe import KernelExperts, KernelMoe
from thalweg.layers.linear import Part, declare_packed, declare_row, declare_row_bias
from thalweg.layers.mla import Mla
from thalweg.layers.mlp import Mlp, make_mlp
from thalweg.layers.paged import PagedMetadataBuilder, nothing, ragged
from thalweg.layers.paged_gqa import PagedGqa
from thalweg.layers.paged_gqa import prepare_by as prepare_gqa
from thalweg.layers.paged_mha import WIDTH, PagedMha
from thalweg.layers.paged_mla import LatentMla, PagedMla, prepare_by
from thalweg.layers.reference import ReferenceMetadata, plane, stream
from thalweg.layers.residual import ResidualStream
from thalweg.memory.planes import FP8, PlaneSpec, kept
from thalweg.parallel.axis import share_of, vocabulary_of, width_of
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.quant.catalog import Schemes
from thalweg.quant.scheme import Quantized, Scheme, Take, TensorSpec
from thalweg.weights.table import Transform, unchanged


@dataclass(frozen=True, slots=True)
class KernelLayers:
    """See `layers.interface.LayerFactory`. Memory holds quantized weights as the checkpoint stores them where kernels
    multiply by them, and dequantizes the others.
    """

    dtype: torch.dtype
    device: torch.device
    choice: KernelConfig
    schemes: Schemes  # of the checkpoint's weights
    layout: Layout = SINGLE_RANK
    published: torch.dtype = torch.bfloat16  # of an unquantized checkpoint
    notes: list[str] = field(default_factory=list)  # what a user should know of how weights are held

    def for_drafter(self, facts: ModelFacts, schemes: Schemes) -> KernelLayers:
        """On our own kernels, which know every kind of attention but that to a selection of context."""
        by = TORCH if facts.indexer is not None else "triton"
        choice = msgspec.structs.replace(self.choice, decode=by, prefill=by, requested=())
        return replace(self, choice=choice, schemes=schemes)

    def stream(self, x_TH: Tensor, is_partial: bool = False) -> ResidualStream:
        return stream(self.layout, x_TH, is_partial)

    def norm(self, name: str, dim: int, eps: float, reorder: Transform = unchanged) -> KernelNorm:
        return KernelNorm(name, dim, eps, self.published, self.device, reorder)

    def packed(
        self, parts: Sequence[Part], inputs: int, has_bias: bool = False
    ) -> KernelLinear | QuantizedLinear | MixedLinear:
        held = [self._held(part, inputs, has_bias) for part in parts]
        groups = _groups(parts, held)
        linears = [self._linear([parts[i] for i in group], inputs, has_bias, held[group[0]]) for group in groups]
        if len(linears) == 1:
            return linears[0]
        place = {i: (number, at) for number, group in enumerate(groups) for at, i in enumerate(group)}
        return MixedLinear(linears, [place[i] for i in range(len(parts))])

    def _linear(
        self, parts: Sequence[Part], inputs: int, has_bias: bool, held: Quantized | None
    ) -> KernelLinear | QuantizedLinear:
        """A packed linear whose parts have one scheme."""
        widths = [part.width for part in parts]
        made = self._empty(widths, inputs, has_bias, False, held)
        declare_packed(made.weights, parts, inputs, self.published, has_bias, held)
        return made

    def _empty(
        self, widths: Sequence[int], inputs: int, has_bias: bool, is_partial: bool, held: Quantized | None
    ) -> KernelLinear | QuantizedLinear:
        if held is not None:
            return QuantizedLinear(held, held.product(self.choice), widths, inputs, self.device, is_partial)
        by = matmul(self.choice.deterministic)
        return KernelLinear(widths, inputs, self.dtype, self.device, by, has_bias, is_partial)

    def _held(self, part: Part, inputs: int, has_bias: bool) -> Quantized | None:
        """The scheme in which memory holds the rows of a part; None is the model's dtype."""
        take = () if part.here is None else (part.take,)
        weight = TensorSpec(f"{part.name}.weight", (part.rows, inputs), self.published)
        return None if has_bias else self._scheme(weight, take, part.reorder is not unchanged)

    def _scheme(self, weight: TensorSpec, take: Take, is_reordered: bool = False) -> Quantized | None:
        scheme: Scheme = self.schemes.of(weight)
        if not isinstance(scheme, Quantized):
            return None
        if scheme.holds(take, weight.shape, is_reordered):
            return scheme
        if not is_reordered:
            self.notes.append(
                f"{weight.name} is dequantized: its blocks of {scheme.block} are cut, or are not what the kernels"
                " multiply by"
            )
        return None

    def row(
        self, name: str, shape: tuple[int, int], columns: range | None = None, has_bias: bool = False
    ) -> KernelLinear | QuantizedLinear:
        take: Take = () if columns is None else (slice(None), slice(columns.start, columns.stop))
        held = None if has_bias else self._scheme(TensorSpec(f"{name}.weight", shape, self.published), take)
        is_here = columns is None or columns.start == 0  # of several ranks, the first adds the bias
        inputs = shape[1] if columns is None else len(columns)
        made = self._empty([shape[0]], inputs, has_bias and is_here, columns is not None, held)
        declare_row(made.weights, name, shape, self.published, columns, held)
        if has_bias:
            declare_row_bias(made.weights, name, shape[0], self.published, is_here)
        return made

    def vocabulary(self, name: str, vocab: int, hidden: int) -> KernelEmbedding:
        here, by = vocabulary_of(vocab, self.layout.tp), matmul(self.choice.deterministic)
        return KernelEmbedding(name, vocab, hidden, here, self.published, self.dtype, self.device, by)

    def mla(self, facts: ModelFacts, layer: int, name: str, is_indexed: bool) -> PagedMla | Mla:
        if self.choice.decode == TORCH:
            return Mla(facts, layer, name, is_indexed, best, self.published, self)
        if not self.choice.latent:
            return PagedMha(facts, layer, name, self, matmul(self.choice.deterministic), self.choice.deterministic)
        if self.choice.deterministic:
            return InvariantMla(facts, layer, name, self)
        return LatentMla(facts, layer, name, self, self._decoder(facts), PREFILLS[self.choice.prefill])

    def _decoder(self, facts: ModelFacts) -> Decoder:
        """What attends to latents in decode rows."""
        assert facts.mla is not None
        scale = rotary.softmax_scale(facts.mla.nope + facts.mla.rope, facts.rope)
        heads = len(share_of(facts.heads, self.layout.tp, "attention heads"))
        if self.choice.decode == "flashinfer":
            return FlashInferDecoder(heads, facts.mla.kv_lora, scale)
        fp8 = kept(self.choice.kv, self.dtype) == FP8
        return decoder(self.choice.decode, heads, facts.mla.kv_lora, scale, fp8)

    def gqa(
        self, facts: ModelFacts, layer: int, name: str, *, qk_norm: bool, out_bias: bool, inputs: int = 0
    ) -> PagedGqa:
        return PagedGqa(facts, layer, name, self, self.choice, qk_norm=qk_norm, out_bias=out_bias, inputs=inputs)

    def mlp(self, name: str, hidden: int, intermediate: int, has_bias: bool = False) -> Mlp:
        return make_mlp(self, name, hidden, intermediate, has_bias, self.layout.dense)

    def moe(self, name: str, moe: Moe, hidden: int) -> KernelMoe:
        routed, shared = self._expert_schemes(name, moe, hidden)
        is_stacked = moe.shared > 0 and (routed and routed.name) == (shared and shared.name)
        stacked = moe.shared if is_stacked else 0
        experts = KernelExperts(
            name, moe, hidden, self.published, self.dtype, self.device, self.layout, routed, stacked
        )
        own = None
        if moe.shared and not is_stacked:
            width = moe.shared * moe.intermediate
            own = make_mlp(self, f"{name}.shared_experts", hidden, width, False, self.layout.tp)
        run = runner(self.choice.moe, self.choice.deterministic)
        return KernelMoe(name, moe, hidden, experts, run, self.published, self.choice.deterministic, own)

    def _expert_schemes(self, name: str, moe: Moe, hidden: int) -> tuple[Quantized | None, Quantized | None]:
        """In which memory holds routed and shared experts. One expert that cannot be held as it is stored keeps all
        from it.
        """
        inner, width = moe.intermediate, width_of(moe.intermediate, self.layout.moe_tp)
        is_cut = self.layout.moe_tp.size > 1
        part = slice(width.start, width.stop) if is_cut else slice(0, inner) if moe.shared > 1 else None
        routed = [self._expert_scheme(f"{name}.experts.{i}", inner, hidden, part) for i in range(moe.experts)]
        shared = self._expert_scheme(f"{name}.shared_experts", moe.shared * inner, hidden, part)
        return _common(routed), shared

    def _expert_scheme(self, name: str, inner: int, hidden: int, part: slice | None) -> Quantized | None:
        """part: of the inner width that lies in the stacks as one expert; None is all of it."""
        rows: Take = () if part is None else (part,)
        columns: Take = () if part is None else (slice(None), part)
        return _common(
            [
                self._scheme(TensorSpec(f"{name}.gate_proj.weight", (inner, hidden), self.published), rows),
                self._scheme(TensorSpec(f"{name}.up_proj.weight", (inner, hidden), self.published), rows),
                self._scheme(TensorSpec(f"{name}.down_proj.weight", (hidden, inner), self.published), columns),
            ]
        )

    def metadata(self, facts: ModelFacts, work: Work) -> PagedMetadataBuilder | ReferenceMetadata:
        if self.choice.decode == TORCH:
            return ReferenceMetadata(facts, work, self.device)
        if facts.mla is None:
            prepare = prepare_gqa(self.choice, facts, self.device)
            return PagedMetadataBuilder(facts, self.device, prepare, gathers=self.choice.prefill == "fa3")
        if not self.choice.latent:
            own = ragged if self.choice.deterministic else nothing
            return PagedMetadataBuilder(facts, self.device, own, gathers=False)
        if self.choice.deterministic:
            return PagedMetadataBuilder(facts, self.device, own_rows, gathers=False)
        return PagedMetadataBuilder(facts, self.device, prepare_by(self._decoder(facts)))

    def plane(self, name: str, layer: int, dim: int, shard: str = "replicated") -> PlaneSpec:
        return plane(name, layer, dim, shard, self.choice.kv, self.dtype)

    def mla_planes(self, facts: ModelFacts, layer: int) -> tuple[PlaneSpec, ...]:
        assert facts.mla is not None
        if self.choice.latent:
            return (self.plane("latent", layer, facts.mla.kv_lora + facts.mla.rope),)
        heads = len(share_of(facts.heads, self.layout.tp, "attention heads"))
        return tuple(self.plane(name, layer, heads * WIDTH, "heads") for name in ("key", "value"))


def _common(schemes: Sequence[Quantized | None]) -> Quantized | None:
    """The scheme that all have; None where they differ."""
    first = schemes[0]
    return (
        first
        if all(scheme is not None and first is not None and scheme.name == first.name for scheme in schemes)
        else None
    )


def _groups(parts: Sequence[Part], held: Sequence[Quantized | None]) -> list[list[int]]:
    """Which parts have one product: those of one scheme, as long as each begins with a block."""
    groups: list[list[int]] = []
    for i, scheme in enumerate(held):
        for group in groups:
            first = held[group[0]]
            rows = sum(parts[j].width for j in group)
            if (scheme and scheme.name) == (first and first.name) and (scheme is None or rows % scheme.block[0] == 0):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups
