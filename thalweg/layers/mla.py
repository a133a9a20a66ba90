"""Multi-head latent attention, with DSA where the model has an indexer (DeepSeek-V2 report §2.1, V3.2 report §2.1), in
plain torch.

On a GPU the projections and norms around it may be kernels: `layers` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.attention.context import AttentionGroup, AttentionMetadata, concat_groups
from thalweg.attention.selection import SelectedContext, SelectedContexts, Selection, select_top_k
from thalweg.config.model import ModelFacts
from thalweg.kernels.attend.ref import rotate_
from thalweg.kernels.gemm.prefetch import Prefetch, no_prefetch, prefetch_for
from thalweg.layers.factory import LayerFactory
from thalweg.layers.indexer import Indexer
from thalweg.layers.latents import Latents
from thalweg.layers.linear import Part, taken
from thalweg.layers.module import Module, parameter
from thalweg.layers.reference_linear import Linear, place_together
from thalweg.layers.residual import Activation, ResidualStream, rows_of
from thalweg.layers.rotary import pairs_from_halves, softmax_scale
from thalweg.parallel.axis import share_of
from thalweg.weights.table import Transform, unchanged

LATENT_NORM_EPS = 1e-6  # the class default in the published code, not rms_norm_eps
CACHE_SCALE_PREFIXES = ("", "attn.", "mla_attn.", "k_proj.")  # where tools put the scales of a cache in FP8


class MlaProjections(Module):
    """What every kind of latent attention has: projections, norms, and the published tensors that fill them.

    down: reads the hidden state: the query latent (or all queries, without one), the KV latent with its rotary key,
    and the index key. up: queries and index queries, of the query latent.
    """

    def __init__(
        self,
        layers: LayerFactory,
        facts: ModelFacts,
        layer: int,
        name: str,
        index_key: Sequence[Part] = (),
        index_query: Sequence[Part] = (),
    ) -> None:
        super().__init__()
        assert facts.mla is not None
        mla, tp, self.layer = facts.mla, layers.layout.tp, layer
        own_heads = share_of(facts.heads, tp, "attention heads")
        self.heads, self.rank, self.nope, self.rope, self.v = len(own_heads), mla.kv_lora, mla.nope, mla.rope, mla.v
        self.scale = softmax_scale(mla.nope + mla.rope, facts.rope)

        def of_heads(width: int) -> range | None:
            return range(own_heads.start * width, own_heads.stop * width) if tp.size > 1 else None

        width = mla.nope + mla.rope
        queries = Part(f"{name}.{'q_b' if mla.q_lora else 'q'}_proj", facts.heads * width, of_heads(width))
        query = Part(f"{name}.q_a_proj", mla.q_lora) if mla.q_lora else queries
        latent = Part(f"{name}.kv_a_proj_with_mqa", self.rank + self.rope)
        self.down = layers.packed([query, latent, *index_key], facts.hidden)
        self.query_norm = layers.norm(f"{name}.q_a_layernorm", mla.q_lora, LATENT_NORM_EPS) if mla.q_lora else None
        self.up = layers.packed([queries, *index_query], mla.q_lora) if mla.q_lora else None
        self.latent_norm = layers.norm(f"{name}.kv_a_layernorm", self.rank, LATENT_NORM_EPS)
        self.uk = parameter(self.heads, self.nope, self.rank, dtype=layers.dtype, device=layers.device)
        self.uv = self._value_weight(layers)
        kv_b, shape = f"{name}.kv_b_proj.weight", (facts.heads * (mla.nope + mla.v), self.rank)
        for target, half in (("uk", _key_half), ("uv", _value_half)):  # kv_b is dequantized for absorption
            transform, take = partial(half, nope=mla.nope, v=mla.v), taken(of_heads(mla.nope + mla.v))
            self.loads(target, kv_b, shape, layers.published, transform, take=take)
        self.out = layers.row(f"{name}.o_proj", (facts.hidden, facts.heads * self.v), of_heads(self.v))
        # a latent is key and value at once, and the key's scale is its
        scales = [tuple(f"{name}.{prefix}{kv}_scale" for prefix in CACHE_SCALE_PREFIXES) for kv in "kv"]
        self.weights.cache_scales["latent", layer] = scales[0]
        self.weights.skips += map(re.escape, scales[1])

    def _value_weight(self, layers: LayerFactory) -> nn.Parameter:
        """W_UV [H, r, v]."""
        return parameter(self.heads, self.rank, self.v, dtype=layers.dtype, device=layers.device)


class Mla(MlaProjections):
    """Cached per token: the normed latent and the rotated key, side by side. Output heads are summed into the
    residual.
    """

    def __init__(
        self,
        layers: LayerFactory,
        facts: ModelFacts,
        layer: int,
        name: str,
        is_indexed: bool,
        selection: Selection = select_top_k,
    ) -> None:
        index, key, query = facts.indexer, list[Part](), list[Part]()
        if is_indexed:
            assert index is not None
            turn = indexer_order(facts)
            key = [Part(f"{name}.indexer.wk", index.dim, None, turn)]
            query = [Part(f"{name}.indexer.wq_b", index.heads * index.dim, None, turn)]
        super().__init__(layers, facts, layer, name, key, query)
        self.indexer = None
        if is_indexed:
            self.indexer = Indexer(layers, facts, layer, f"{name}.indexer", selection, turn)
        elif index is not None:  # it uses the selection of an earlier layer; its own indexer may be published too
            self.weights.skips.append(re.escape(f"{name}.indexer.") + ".*")
        self._prefetch_before: Prefetch = no_prefetch
        self._prefetch_after: Prefetch = no_prefetch
        self._before = self._after = self.uk.data
        if isinstance(self.down, Linear):
            self._place()
        self.latents = Latents(facts, layer, self.scale, self.uk.data, self.uv.data)

    def _place(self) -> None:
        """What a step reads one behind the other lies side by side, and is read ahead at once
        (`kernels.gemm.prefetch`).
        """
        *before, out = [linear for linear in (self.down, self.up, self.out) if isinstance(linear, Linear)]
        self._before = place_together([linear.weight for linear in before])
        self._after = place_together([self.uk, self.uv, out.weight])
        self._prefetch_before, self._prefetch_after = prefetch_for(self._before), prefetch_for(self._after)
        for linear in (*before, out):
            linear.prefetched()

    def write_kv(self, x: Activation, metadata: AttentionMetadata) -> None:
        """Stores what attention would store, and computes nothing else."""
        x_TH = rows_of(x)
        if isinstance(self.down, Linear):  # the rows of the queries are not needed
            latent_TX = F.linear(x_TH, self.down.weight[self.down.widths[0] :])
            latent_TD, *index_key = torch.split(latent_TX, self.down.widths[1:], 1)
        else:
            _, latent_TD, *index_key = self.down.split(x_TH)
        self._store(latent_TD, index_key, metadata)

    def add_to(
        self, h: ResidualStream, x: Activation, metadata: AttentionMetadata, earlier: SelectedContexts
    ) -> SelectedContexts:
        """h += attention(x). Returns the selection of context made here, or `earlier` in a layer without an indexer."""
        x_TH = rows_of(x)
        self._prefetch_before(self._before)
        query_TX, latent_TD, *index_key = self.down.split(x_TH)
        index_query: list[Tensor] = []
        if self.query_norm is not None and self.up is not None:
            query_TX, *index_query = self.up.split(self.query_norm.forward(query_TX))
        self._store(latent_TD, index_key, metadata)
        selections = earlier
        if self.indexer is not None:
            selections = self.indexer.select(x_TH, index_query[0], metadata)
        self._prefetch_after(self._after)
        rotate_(query_TX, metadata.cos_sin_T1c, self.nope, self.heads, self.nope + self.rope)
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        parts = [
            self.attend(group, group.take(query_THd), selected, metadata)
            for group, selected in zip(metadata.groups, selections, strict=True)
        ]
        h.add(self.out, concat_groups(parts))
        return selections

    def _store(self, latent_TD: Tensor, index_key: list[Tensor], metadata: AttentionMetadata) -> None:
        """This step's tokens: the latent with its key, normed and rotated in place, and the index key."""
        self.latent_norm.forward_(latent_TD[:, : self.rank])
        rotate_(latent_TD, metadata.cos_sin_T1c, self.rank, 1, 0)
        self.store(latent_TD, metadata)
        if self.indexer is not None:
            self.indexer.keep(index_key[0], metadata)

    def store(self, latent_TD: Tensor, metadata: AttentionMetadata) -> None:
        """What attention will read of these tokens."""
        metadata.planes.write("latent", self.layer, metadata.batch.write_T, latent_TD)

    def attend(
        self, group: AttentionGroup, query_NHd: Tensor, selected: SelectedContext | None, metadata: AttentionMetadata
    ) -> Tensor:
        """Attention of one group: [N, H * v]."""
        return self.latents.attend(group, query_NHd, selected, metadata)


def indexer_order(facts: ModelFacts) -> Transform:
    """How the rows of the indexer's projections and norms are reordered: from halves to pairs, unless they are
    published in pairs.
    """
    indexer, mla = facts.indexer, facts.mla
    assert indexer is not None and mla is not None
    return unchanged if indexer.interleaved else partial(pairs_from_halves, head_dim=indexer.dim, dim=mla.rope)


def _key_half(kv_b: Tensor, nope: int, v: int) -> Tensor:
    """W_UK [H, nope, r]: the first rows of each head of kv_b."""
    return kv_b.view(-1, nope + v, kv_b.shape[1])[:, :nope]


def _value_half(kv_b: Tensor, nope: int, v: int) -> Tensor:
    """W_UV transposed [H, r, v]: the last rows of each head of kv_b."""
    return kv_b.view(-1, nope + v, kv_b.shape[1])[:, nope:].transpose(1, 2)
