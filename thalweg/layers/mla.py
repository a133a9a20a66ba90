"""Multi-head latent attention, with DSA where the model has an indexer (DeepSeek-V2 report §2.1, V3.2 report §2.1), in
plain torch.

On a GPU the projections and norms around it may be kernels: `layers` makes them.
"""

from __future__ import annotations

import re
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.attention.context import Span, Step, join_groups
from thalweg.attention.selection import Choice, Choices, Selection
from thalweg.config import model as config
from thalweg.config.model import ModelFacts
from thalweg.kernels.gemm.warm import Warm, nothing, warm_for
from thalweg.kernels.rope.ref import rotate_
from thalweg.layers.indexer import Indexer
from thalweg.layers.interface import LayerFactory
from thalweg.layers.latents import Latents
from thalweg.layers.linear import Linear, Part, place_together
from thalweg.layers.module import Module, parameter
from thalweg.layers.residual import Activation, ResidualStream, rows_of
from thalweg.layers.rotary import pairs_from_halves, softmax_scale
from thalweg.parallel.axis import share_of
from thalweg.quant.scheme import TensorSpec
from thalweg.weights.table import Transform, WeightRule, WeightTable, unchanged

LATENT_NORM_EPS = 1e-6  # the class default in the published code, not rms_norm_eps
CACHE_SCALE_PREFIXES = ("", "attn.", "mla_attn.", "k_proj.")  # where tools put the scales of a cache in FP8


class MlaShape:
    """Sizes of one rank's part of the attention, and the published tensors of its projections."""

    def __init__(self, facts: ModelFacts, layers: LayerFactory) -> None:
        assert facts.mla is not None
        mla, self.facts = facts.mla, facts
        self.all_heads = share_of(facts.heads, layers.layout.tp, "attention heads")
        self.heads = len(self.all_heads)
        self.q_lora, self.rank, self.nope, self.rope, self.v = mla.q_lora, mla.kv_lora, mla.nope, mla.rope, mla.v
        self.is_cut = layers.layout.tp.size > 1
        self.scale = softmax_scale(mla.nope + mla.rope, facts.rope)

    def of_heads(self, width: int) -> range | None:
        """Rows or columns of this rank's heads, of `width` each; None is all."""
        return range(self.all_heads.start * width, self.all_heads.stop * width) if self.is_cut else None

    def queries(self, name: str) -> Part:
        width = self.nope + self.rope
        return Part(name, self.facts.heads * width, self.of_heads(width))

    def down(self, name: str) -> list[Part]:
        """What reads the hidden state: the query latent, or all queries without one; the KV latent with its rotary
        key.
        """
        query = Part(f"{name}.q_a_proj", self.q_lora) if self.q_lora else self.queries(f"{name}.q_proj")
        return [query, Part(f"{name}.kv_a_proj_with_mqa", self.rank + self.rope)]

    def declare_kv_b(self, table: WeightTable, name: str, published: torch.dtype) -> None:
        """uk [H, nope, r] and uv [H, r, v] are the halves of kv_b, which is dequantized for absorption."""
        here = self.of_heads(self.nope + self.v)
        source = TensorSpec(f"{name}.kv_b_proj.weight", (self.facts.heads * (self.nope + self.v), self.rank), published)
        take = () if here is None else (slice(here.start, here.stop),)
        for target, half in (("uk", _key_half), ("uv", _value_half)):
            table.rules.append(WeightRule(source, target, (), take, partial(half, nope=self.nope, v=self.v)))

    def declare_cache_scales(self, table: WeightTable, name: str, layer: int) -> None:
        """A latent is key and value at once, and the key's scale is its."""
        table.cache_scales["latent", layer] = tuple(f"{name}.{prefix}k_scale" for prefix in CACHE_SCALE_PREFIXES)
        table.skips += [re.escape(f"{name}.{prefix}v_scale") for prefix in CACHE_SCALE_PREFIXES]

    def out(self, name: str, layers: LayerFactory) -> nn.Module:
        made = layers.row(f"{name}.o_proj", (self.facts.hidden, self.facts.heads * self.v), self.of_heads(self.v))
        assert isinstance(made, nn.Module)
        return made


class Mla(Module):
    """Cached per token: the normed latent and the rotated key, side by side. Output heads are summed into the residual.

    down: q_a (or all queries, without q_lora), latent with key, index key. up: queries, index queries.
    """

    def __init__(
        self,
        facts: ModelFacts,
        layer: int,
        name: str,
        is_indexed: bool,
        selection: Selection,
        published: torch.dtype,
        layers: LayerFactory,
    ) -> None:
        super().__init__()
        shape = MlaShape(facts, layers)
        self.layer, self.heads, self.rank, self.nope, self.rope = layer, shape.heads, shape.rank, shape.nope, shape.rope
        down, up = shape.down(name), [shape.queries(f"{name}.q_b_proj")]
        self.indexer = None
        if is_indexed:
            assert facts.indexer is not None
            index, turn = facts.indexer, indexer_order(facts)
            self.indexer = Indexer(
                index, facts.hidden, layer, selection, layers.device, f"{name}.indexer", turn, published
            )
            down.append(Part(f"{name}.indexer.wk", index.dim, None, turn))
            up.append(Part(f"{name}.indexer.wq_b", index.heads * index.dim, None, turn))
        elif (
            facts.indexer is not None
        ):  # it uses the selection of an earlier layer, and its own indexer is published all the same
            self.weights.skips.append(re.escape(f"{name}.indexer.") + ".*")
        self.down = layers.packed(down, facts.hidden)
        self.query_norm = layers.norm(f"{name}.q_a_layernorm", shape.q_lora, LATENT_NORM_EPS) if shape.q_lora else None
        self.up = layers.packed(up, shape.q_lora) if shape.q_lora else None
        self.latent_norm = layers.norm(f"{name}.kv_a_layernorm", self.rank, LATENT_NORM_EPS)
        self.uk = parameter(self.heads, self.nope, self.rank, dtype=layers.dtype, device=layers.device)
        self.uv = parameter(self.heads, self.rank, shape.v, dtype=layers.dtype, device=layers.device)
        shape.declare_kv_b(self.weights, name, published)
        shape.declare_cache_scales(self.weights, name, layer)
        self.out = shape.out(name, layers)
        self._prefetch_before: Warm = nothing
        self._prefetch_after: Warm = nothing
        self._before = self._after = self.uk.data
        if isinstance(self.down, Linear):
            self._place()
        self.latents = Latents(facts, layer, shape.scale, self.uk.data, self.uv.data)

    def _place(self) -> None:
        """What a step reads one behind the other lies side by side, and is read ahead at once (`kernels.gemm.warm`)."""
        before = [linear for linear in (self.down, self.up) if linear is not None]
        assert isinstance(self.out, Linear)
        self._before = place_together([linear.weight for linear in before if isinstance(linear, Linear)])
        self._after = place_together([self.uk, self.uv, self.out.weight])
        self._prefetch_before, self._prefetch_after = warm_for(self._before), warm_for(self._after)
        for linear in (*before, self.out):
            assert isinstance(linear, Linear)
            linear.prefetched()

    def write_kv(self, x: Activation, metadata: Step) -> None:
        """Stores what attention would store, and computes nothing else."""
        x_TH = rows_of(x)
        if isinstance(self.down, Linear):  # the rows of the queries are not needed
            latent_TX = F.linear(x_TH, self.down.weight[self.down.widths[0] :])
            latent_TD, *index_key = torch.split(latent_TX, self.down.widths[1:], 1)
        else:
            _, latent_TD, *index_key = self.down.split(x_TH)
        self._store(latent_TD, index_key, metadata)

    def add_to(self, h: ResidualStream, x: Activation, metadata: Step, earlier: Choices) -> Choices:
        """h += attention(x). Returns the selection of context made here, or `earlier` in a layer without an indexer."""
        x_TH = rows_of(x)
        self._prefetch_before(self._before)
        query_TX, latent_TD, *index_key = self.down.split(x_TH)
        index_query: list[Tensor] = []
        if self.query_norm is not None and self.up is not None:
            query_TX, *index_query = self.up.split(self.query_norm.forward(query_TX))
        self._store(latent_TD, index_key, metadata)
        choices = earlier
        if self.indexer is not None:
            choices = self.indexer.choose(x_TH, index_query[0], metadata)
        self._prefetch_after(self._after)
        rotate_(query_TX, metadata.cis_T1c, self.nope, self.heads, self.nope + self.rope)
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        parts = [
            self.attend(span, span.part(query_THd), choice, metadata)
            for span, choice in zip(metadata.spans, choices, strict=True)
        ]
        h.add(self.out, join_groups(parts))  # type: ignore[arg-type]
        return choices

    def _store(self, latent_TD: Tensor, index_key: list[Tensor], metadata: Step) -> None:
        """This step's tokens: the latent with its key, normed and rotated in place, and the index key."""
        self.latent_norm.forward_(latent_TD[:, : self.rank])
        rotate_(latent_TD, metadata.cis_T1c, self.rank, 1, 0)
        self.store(latent_TD, metadata)
        if self.indexer is not None:
            self.indexer.keep(index_key[0], metadata)

    def store(self, latent_TD: Tensor, metadata: Step) -> None:
        """What attention will read of these tokens."""
        metadata.planes.write("latent", self.layer, metadata.batch.write_T, latent_TD)

    def attend(self, span: Span, query_NHd: Tensor, choice: Choice | None, metadata: Step) -> Tensor:
        """Attention of one group: [N, H * v]."""
        return self.latents.attend(span, query_NHd, choice, metadata)


def indexer_order(facts: ModelFacts) -> Transform:
    """How the rows of the indexer's projections and norms are reordered: from halves to pairs, unless they are
    published in pairs.
    """
    indexer, mla = facts.indexer, facts.mla
    assert isinstance(indexer, config.Indexer) and mla is not None
    return unchanged if indexer.interleaved else partial(pairs_from_halves, head_dim=indexer.dim, dim=mla.rope)


def _key_half(kv_b: Tensor, nope: int, v: int) -> Tensor:
    """W_UK [H, nope, r]: the first rows of each head of kv_b."""
    return kv_b.view(-1, nope + v, kv_b.shape[1])[:, :nope]


def _value_half(kv_b: Tensor, nope: int, v: int) -> Tensor:
    """W_UV transposed [H, r, v]: the last rows of each head of kv_b."""
    return kv_b.view(-1, nope + v, kv_b.shape[1])[:, nope:].transpose(1, 2)
