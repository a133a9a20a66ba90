"""An indexer's (DSA) rows of the projections of its attention, and which of its heads a rank has."""

from __future__ import annotations

import re
from functools import partial

from thalweg.config.model import ModelFacts
from thalweg.layers.factory import LayerFactory
from thalweg.layers.linear import PackedShard
from thalweg.layers.rotary import pairs_from_halves
from thalweg.parallel.axis import share_of
from thalweg.weights.table import Transform, unchanged


def index_heads(layers: LayerFactory, facts: ModelFacts) -> range:
    """The heads of an indexer by which this rank scores. Raises UnsupportedConfig where ranks cannot share them."""
    assert facts.indexer is not None
    return share_of(facts.indexer.heads, layers.layout.indexer, "index heads")


def index_shards(
    layers: LayerFactory, facts: ModelFacts, name: str, is_indexed: bool
) -> tuple[list[PackedShard], list[PackedShard]]:
    """What an indexer projects beside the attention `name`: its key, of the hidden state; its queries, of the query
    latent.
    """
    if not is_indexed:
        return [], []
    index, turn, heads = facts.indexer, indexer_order(facts), index_heads(layers, facts)
    assert index is not None
    own = range(heads.start * index.dim, heads.stop * index.dim) if len(heads) < index.heads else None
    queries = PackedShard(f"{name}.indexer.wq_b", index.heads * index.dim, own, turn)
    return [PackedShard(f"{name}.indexer.wk", index.dim, None, turn)], [queries]


def unused_indexer(name: str) -> str:
    """Tensors of a layer that uses the selection of an earlier one; its own indexer may be published, too."""
    return re.escape(f"{name}.indexer.") + ".*"


def indexer_order(facts: ModelFacts) -> Transform:
    """The order of the rows of the indexer's projections and norms: from halves to pairs, unless they are published
    in pairs.
    """
    indexer, mla = facts.indexer, facts.mla
    assert indexer is not None and mla is not None
    return unchanged if indexer.interleaved else partial(pairs_from_halves, head_dim=indexer.dim, dim=mla.rope)
