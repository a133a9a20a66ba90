"""The attention of decode rows beside prompts, as CUDA graphs, one for each layer.

A step in pieces calls attention eagerly, since its kernels are launched by lengths. For prompts that has to be so. For
decode rows it need not: as in a whole recorded step their kernels are launched for the longest context, and read
lengths and pages from memory that stays where it is. What took Python as long as the rest of a layer becomes one
launch, and a step with few prompt tokens no longer waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from thalweg.batch.batch import Attend, Batch, Group, RowExtent
from thalweg.core.plan import PAGE
from thalweg.memory.planes import Planes
from thalweg.models.decoder import Model
from thalweg.runner.graph_pool import GraphPool


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None: ...


class DecodeAttentionGraphs:
    """Attention of up to `rows` rows of one token, in every layer."""

    def __init__(self, rows: int, context: int, planes: Planes) -> None:
        self.rows, device = rows, planes.device
        self.places_2R = torch.zeros(2, rows, dtype=torch.int64, device=device)  # positions, and where the KV goes
        self.real_R = torch.ones(rows, dtype=torch.bool, device=device)
        self.table_RP = torch.zeros(rows, -(-context // PAGE), dtype=torch.int32, device=device)
        positions_R, write_R = self.places_2R
        group, extents = Group(0, rows, 0, 1, context), (RowExtent(1, context),) * rows
        self.batch = Batch(
            positions_R, positions_R, write_R, self.table_RP, self.real_R, positions_R, (group,), extents
        )
        self.attends: tuple[Attend, ...] = ()
        self.inputs: tuple[Tensor, ...] = ()
        self.graphs: list[Graph] = []
        self.step: Any = None  # keeps what the first layer prepares for the others

    def record(
        self,
        attends: tuple[Attend, ...],
        inputs: tuple[Tensor, ...],
        out_TX: Tensor,
        model: Model,
        planes: Planes,
        pool: GraphPool,
    ) -> None:
        """attends: of the layers. inputs: where these will find what a piece leaves for attention. out_TX: where its
        result goes. Runs all eagerly first, in which kernels compile; what is stored goes into the null page.
        """
        self.attends, self.inputs = attends, inputs
        self.step = model.metadata.build(self.batch, planes)
        for attend in attends:
            attend(self.step, *self.inputs)
        for layer, attend in enumerate(attends):
            pool.begin()
            if layer == 0:
                self.step = model.metadata.build(self.batch, planes)
            out_TX[: self.rows] = attend(self.step, *self.inputs)
            self.graphs.append(pool.end())

    def bind(self, batch: Batch) -> int:
        """Takes the step's first rows, up to as many as are recorded. → how many. Those behind them are padding: they
        write into the null page.
        """
        rows = batch.groups[0].rows
        self.places_2R.zero_()
        self.places_2R[:, :rows] = torch.stack((batch.positions_T[:rows], batch.write_T[:rows]))
        self.table_RP[:rows, : batch.table_RP.shape[1]] = batch.table_RP[:rows]
        return rows

    def attend(self, layer: int, left: tuple[Tensor, ...]) -> None:
        """left: what the piece ahead of this layer's attention left for it, of `rows` tokens at least."""
        for held, given in zip(self.inputs, left, strict=True):
            held.copy_(given[: self.rows])
        self.graphs[layer].replay()


def halving(rows: Sequence[int]) -> list[int]:
    """Of these numbers of rows the largest, and each that is half of the one before or less: rows of padding attend to
    one token, and cost little.
    """
    chosen: list[int] = []
    for many in sorted(rows, reverse=True):
        if not chosen or 2 * many <= chosen[-1]:
            chosen.append(many)
    return chosen


def fitting(
    recorded: Sequence[DecodeAttentionGraphs], batch: Batch, tokens: int, attends: tuple[Attend, ...]
) -> DecodeAttentionGraphs | None:
    """The smallest that holds the step's decode rows and goes with its pieces, of `tokens` tokens, which leave it to
    `attends` to attend. None where there is none, and for a step that does not begin with rows of one token, each of
    which sees all that is before it.
    """
    first = batch.groups[0]
    if not recorded or first.query != 1 or batch.tree is not None:
        return None
    fit = [one for one in recorded if first.rows <= one.rows <= tokens and one.attends == attends]
    return min(fit, key=lambda one: one.rows, default=None)


def behind(batch: Batch, rows: int) -> Batch | None:
    """The step without its first group, which is `rows` rows of one token; None if nothing is left."""
    if len(batch.groups) == 1:
        return None
    moved = tuple(replace(g, row_start=g.row_start - rows, token_start=g.token_start - rows) for g in batch.groups[1:])
    ids, positions, write, table, real = (
        x[rows:] for x in (batch.ids_T, batch.positions_T, batch.write_T, batch.table_RP, batch.real_T)
    )
    return Batch(ids, positions, write, table, real, batch.emit_N, moved, batch.extents[rows:])
