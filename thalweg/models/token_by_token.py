"""A model that computes each token by itself: the reference's way to be deterministic.

Kernels of a library round a row differently when others stand beside it, and a padded context differently from one that
ends. Here every token of a step is a step of its own, of one row with exactly its context, in order, so that each
operation's shape follows from the token's position alone: bits depend neither on the batch, nor on how a prompt was
cut, nor on what was found in the cache, nor on what was drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.attention.context_shard import ContextShard
from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.memory.planes import Planes
from thalweg.models.interface import Model, WrappedModel


class TokenByToken(WrappedModel):
    """`model` behind the same interface."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.shard = ContextShard(model.factory.layout.dcp)

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        """Waits for the device: how long each context is, the host knows only as a bound."""
        columns, positions = batch.columns_T.tolist(), batch.positions_T.tolist()
        hidden: list[Tensor] = []
        for group in batch.groups:
            for row in range(group.row_start, group.row_start + group.rows):
                tokens = range(len(hidden), len(hidden) + group.query)
                if batch.tree is not None and any(columns[t] != positions[t] for t in tokens):
                    hidden += self._nodes(
                        batch, planes, row, tokens, batch.tree.tree_mask_T[tokens.start : tokens.stop]
                    )
                else:
                    hidden += [self._one(batch, planes, row, t, positions[t], batch.write_T[t]) for t in tokens]
        return torch.cat(hidden)

    def _one(self, batch: Batch, planes: Planes, row: int, token: int, position: int, write: Tensor) -> Tensor:
        return self.model.forward(_single(batch, row, token, position, write, self.shard.page_size), planes)

    def _nodes(self, batch: Batch, planes: Planes, row: int, tokens: range, tree_mask_Q: Tensor) -> list[Tensor]:
        """A row whose tokens are nodes of a tree. Each is computed where it would stand without drafts: meanwhile the
        entries of the path before it stand at the columns behind the root, and its own behind those; in the end all are
        where the tree has them.
        """
        entries = [part for spec in self.model.planes() for part in planes.entries(spec.name, spec.layer)]
        columns_Q = batch.write_T[tokens.start : tokens.stop]
        root, masks, hidden = int(batch.positions_T[tokens.start]), tree_mask_Q.tolist(), list[Tensor]()
        made: list[list[Tensor]] = []
        for node, token in enumerate(tokens):
            # padding is no node; its column belongs to none
            real = bool(batch.real_T[token])
            path = [above for above in range(1, node) if real and masks[node] >> (node - above) & 1]
            for column, above in zip(columns_Q[1:], path, strict=False):
                self.shard.put(entries, column, made[above])
            depth = len(path) + (node > 0) if real else 0
            write = columns_Q[depth if real else node]
            hidden.append(self._one(batch, planes, row, token, (root + depth) * real, write))
            made.append(self.shard.take(entries, write))
        for column, entry in zip(columns_Q, made, strict=True):
            self.shard.put(entries, column, entry)
        return hidden

    def logits(self, hidden_NX: Tensor) -> Tensor:
        return self.shards.gather(self.shard_logits(hidden_NX))

    def shard_logits(self, hidden_NX: Tensor) -> Tensor:
        return torch.cat([self.model.shard_logits(hidden_NX[i : i + 1].clone()) for i in range(len(hidden_NX))])


def _single(batch: Batch, row: int, token: int, position: int, write: Tensor, page_size: int) -> Batch:
    """The step of one token; copied, since a kernel may go by how its inputs are aligned."""
    one, max_kv_len = slice(token, token + 1), position + 1
    return Batch(
        ids_T=batch.ids_T[one].clone(),
        positions_T=batch.positions_T[one].clone(),
        write_T=write.view(1).clone(),
        table_RP=batch.table_RP[row : row + 1, : -(-max_kv_len // page_size)].clone(),
        real_T=batch.real_T[one].clone(),
        logits_indices_N=batch.positions_T.new_zeros(1),
        groups=(Group(0, 1, 0, 1, max_kv_len),),
        extents=(RowExtent(1, max_kv_len),),
    )
