"""A model that computes each token by itself: the reference's way to be deterministic.

Kernels of a library round a row differently when others stand beside it, and a padded context differently from one that ends. Here every token
of a step is a step of its own, of one row with exactly its context, in order, so that each operation's shape follows from the token's
position alone: bits depend neither on the batch, nor on how a prompt was cut, nor on what was found in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Extent, Group, Tree
from thalweg.core.plan import PAGE
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.base import Model
from thalweg.weights.table import Table


class OneByOne:
    """`model` behind the same interface."""

    def __init__(self, model: Model) -> None:
        self.model, self.facts, self.parts, self.steps = model, model.facts, model.parts, model.steps

    def planes(self) -> tuple[PlaneSpec, ...]:
        return self.model.planes()

    def table(self) -> Table:
        return self.model.table()

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        """Waits for the device: how long each context is, the host knows only as a bound."""
        columns = batch.columns_T.tolist()
        hidden, token = [], 0
        for group in batch.groups:
            for row in range(group.row_start, group.row_start + group.rows):
                for _ in range(group.query):
                    hidden.append(self.model.forward(_single(batch, token, row, columns[token]), planes))
                    token += 1
        return torch.cat(hidden)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return torch.cat([self.model.logits(hidden_NH[i : i + 1].clone()) for i in range(len(hidden_NH))])


def _single(batch: Batch, token: int, row: int, column: int) -> Batch:
    """The step of one token; copied, since a kernel may go by how its inputs are aligned."""
    one, reach, tree = slice(token, token + 1), column + 1, batch.tree
    return Batch(
        ids_T=batch.ids_T[one].clone(),
        positions_T=batch.positions_T[one].clone(),
        write_T=batch.write_T[one].clone(),
        table_RP=batch.table_RP[row : row + 1, : -(-reach // PAGE)].clone(),
        real_T=batch.real_T[one].clone(),
        emit_N=batch.positions_T.new_zeros(1),
        groups=(Group(0, 1, 0, 1, reach),),
        extents=(Extent(1, reach),),
        tree=None if tree is None else Tree(tree.columns_T[one].clone(), tree.hides_T[one].clone(), 1),
    )
