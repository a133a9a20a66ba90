"""Grouped-query attention in plain PyTorch, the reference; `paged_gqa.py` has the layer with kernels. Biases (Qwen2)
and query and key norms (Qwen3) where the model has them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from thalweg.attention.context import AttentionGroup, AttentionMetadata, concat_groups
from thalweg.attention.exchange import exchange_stored
from thalweg.config.model import ModelFacts
from thalweg.kernels.attend.ref import attend_grouped, rotate_
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.linear import PackedShard
from thalweg.layers.module import Module
from thalweg.layers.rotary import pairs_from_halves
from thalweg.parallel.axis import share_of
from thalweg.weights.table import cache_scale_names


class GqaProjections(Module):
    """Projections, norms and checkpoint tensors that all grouped-query attention layers share.

    Rotary dims are reordered from halves to pairs as they are loaded. With more ranks than key heads, neighbouring
    ranks have the same ones.
    """

    def __init__(
        self,
        layers: LayerFactory,
        facts: ModelFacts,
        layer: int,
        name: str,
        qk_norm: bool = False,
        inputs: int = 0,
    ) -> None:
        super().__init__()
        tp, self.dim, self.layer, self.eps = layers.layout.tp, facts.head_dim, layer, facts.norm_eps
        heads = share_of(facts.heads, tp, "attention heads")
        kv_heads = share_of(facts.kv_heads, tp, "key heads", may_repeat=True)
        self.heads, self.kv_heads = len(heads), len(kv_heads)
        turn = partial(pairs_from_halves, head_dim=self.dim, dim=facts.rope.dim)

        def part(letter: str, total: int, here: range) -> PackedShard:
            rows = None if tp.size == 1 else range(here.start * self.dim, here.stop * self.dim)
            order = {} if letter == "v" else {"reorder": turn}
            return PackedShard(f"{name}.{letter}_proj", total * self.dim, rows, **order)

        parts = [
            part("q", facts.heads, heads),
            part("k", facts.kv_heads, kv_heads),
            part("v", facts.kv_heads, kv_heads),
        ]
        self.qkv = layers.packed(parts, inputs or facts.hidden, facts.qkv_bias)
        self.columns = [self.heads, self.kv_heads, self.kv_heads]
        self.query_norm = layers.norm(f"{name}.q_norm", self.dim, self.eps, turn) if qk_norm else None
        self.key_norm = layers.norm(f"{name}.k_norm", self.dim, self.eps, turn) if qk_norm else None
        columns = None if tp.size == 1 else range(heads.start * self.dim, heads.stop * self.dim)
        self.out = layers.row(f"{name}.o_proj", (facts.hidden, facts.heads * self.dim), columns, facts.attention_bias)
        for plane, letter in (("key", "k"), ("value", "v")):
            self.weights.cache_scales[plane, layer] = cache_scale_names(name, letter)


class Gqa(GqaProjections):
    """Cached per token: rotated keys, and values, of all key heads."""

    def add_to(self, h: ResidualStream, x: Activation, metadata: AttentionMetadata) -> None:
        """h += attention(x)."""
        query = self._store(x, metadata)
        parts = [self._attend(group, group.take(query), metadata) for group in metadata.groups]
        h.add(self.out, concat_groups(parts))

    def write_kv(self, x: Activation, metadata: AttentionMetadata) -> None:
        """Stores what attention would store, and computes projections only."""
        self._store(x, metadata)

    def _store(self, x: Activation, metadata: AttentionMetadata) -> Tensor:
        """Stores the tokens' keys and values. Returns their queries, rotated, [T, H, d]."""
        qkv_TX = self.qkv.forward(x)
        qkv_THd = qkv_TX.view(len(qkv_TX), -1, self.dim)
        query, key, value = torch.split(qkv_THd, self.columns, 1)
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.forward_(query)
            self.key_norm.forward_(key)
        rotate_(qkv_TX, metadata.cos_sin_T1c, 0, self.heads + self.kv_heads, self.dim)
        metadata.planes.write("key", self.layer, metadata.batch.write_T, key.flatten(1))
        metadata.planes.write("value", self.layer, metadata.batch.write_T, value.flatten(1))
        exchange_stored(metadata.batch, metadata.planes, ("key", "value"), self.layer)
        return query

    def _attend(self, group: AttentionGroup, query_NHd: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attention of one group: [N, H * d]."""
        heads = query_NHd.shape[1]
        context = (group.rows, -1, self.kv_heads, self.dim)
        planes = metadata.planes
        key, value = (
            planes.read(
                name, self.layer, group.gather(planes.paged(name, self.layer), group.pages), query_NHd.dtype
            ).view(context)
            for name in ("key", "value")
        )
        parts = []
        for tile in group.tiles:
            bias = group.bias(tile).view(group.rows, tile.stop - tile.start, -1)
            query = group.take_tile(query_NHd, tile).view(group.rows, tile.stop - tile.start, heads, self.dim)
            parts.append(self._attend_tile(query, key[:, : bias.shape[-1]], value[:, : bias.shape[-1]], bias))
        return group.join_tiles(parts)

    def _attend_tile(self, query_RqHd: Tensor, key_RSKd: Tensor, value_RSKd: Tensor, bias_RqS: Tensor) -> Tensor:
        return attend_grouped(query_RqHd, key_RSKd, value_RSKd, bias_RqS).reshape(-1, self.heads * self.dim)
