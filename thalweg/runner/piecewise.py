"""Prefill and mixed steps as CUDA graphs in pieces: for each bucket of tokens one graph of everything between two
attentions.

Lengths and pages differ from step to step, so attention runs between the graphs, eagerly, except for decode rows
(`DecodeAttentionGraphs`). All else depends on the number of tokens alone, which is filled up to a bucket. Padding is
token 0 in no expert, attention does not see it, and its KV goes to the null page. Of a layer's projections, experts and
norms, one launch is left. Attention leaves its results for the next piece, and what an indexer chooses for the last one
where another pipeline stage shares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.batch.batch import Attend, Batch, GraphBreak, Group, RowExtent, no_graph_break
from thalweg.batch.padding import without_first_group
from thalweg.batch.share import divided
from thalweg.core.plan import PAGE
from thalweg.memory.planes import Planes
from thalweg.models.interface import Model
from thalweg.runner.graph_pool import GraphPool, view_of
from thalweg.runner.ragged_graphs import RaggedGraph
from thalweg.runner.step_buffers import StepBuffers


class Piece(NamedTuple):
    """A graph up to an attention. inputs: what it leaves for that, [T, ...]."""

    graph: torch.cuda.CUDAGraph
    attend: Attend
    inputs: tuple[Tensor, ...]


class PieceCapture:
    """A seam that ends the recording before each attention and begins another behind it."""

    def __init__(self, pool: GraphPool, shared: StepBuffers) -> None:
        self.pool, self.shared = pool, shared
        self.pieces: list[Piece] = []

    def __call__(self, attend: Attend, step: Any, *inputs: Tensor) -> Tensor:
        graph = self.pool.end()
        self.pieces.append(Piece(graph, attend, tuple(map(view_of, inputs))))
        self.pool.begin()
        return self.shared.out(len(inputs[0]))


class PiecewiseGraph:
    """The recorded forward of `tokens` tokens."""

    def __init__(self, tokens: int, model: Model, shared: StepBuffers) -> None:
        self.tokens, self.model, self.shared = tokens, model, shared
        self.pieces: list[Piece] = []
        self.attends: tuple[Attend, ...] = ()

    def capture(self, planes: Planes, context: int, pool: GraphPool, thin: Model) -> None:
        """One eager run, in which kernels compile and libraries make their handles, then the recording. All is
        padding. thin: the model with one layer of each kind.
        """
        thin.forward(_padding(self.shared, self.tokens, context, self._attended), planes)
        cutter = PieceCapture(pool, self.shared)
        batch = _padding(self.shared, self.tokens, context, cutter)
        pool.begin()
        hidden_TH = self.model.forward(batch, planes)
        self.last = pool.end()
        self.hidden_TH, self.pieces = view_of(hidden_TH), cutter.pieces
        self.attends = tuple(piece.attend for piece in self.pieces)

    def _attended(self, attend: Attend, step: Any, *inputs: Tensor) -> Tensor:
        """Attention of the eager run. The first one tells how large results are. The recording cannot: the lengths in
        its `step` are recorded, too, and what comes before an attention may wait for another stage.
        """
        out_TX = attend(step, *inputs)
        if self.shared.out_TX is None:
            self.shared.make_out(out_TX)
        return out_TX

    def forward(self, batch: Batch, planes: Planes, decoding: DecodeAttentionGraphs | None) -> Tensor:
        """decoding: does the attention of the rows of one token that the step begins with."""
        count, shared = len(batch.ids_T), self.shared
        shared.fill(batch, self.tokens)
        out_TX, rows = shared.out_TX, 0
        assert out_TX is not None, "the recording made it"
        # padding: what an earlier step left there may be no number, and be looked at for a scale
        out_TX[count : self.tokens] = 0
        rest: Batch | None = batch
        if decoding is not None:
            rows = decoding.bind(batch)
            rest = without_first_group(batch) if len(batch.groups) > 1 else None
        step = None
        if rest is not None:
            step = self.model.metadata.build(replace(rest, border_TK=shared.border(slice(rows, count))), planes)
        for layer, (graph, attend, inputs) in enumerate(self.pieces):
            graph.replay()
            if decoding is not None:
                decoding.attend(layer, inputs)
            if step is not None:
                out_TX[rows:count] = attend(step, *[x[rows:count] for x in inputs])
        self.last.replay()
        return self.hidden_TH[:count]


class DecodeAttentionGraphs:
    """Attention of up to `rows` rows of one token beside prompts, a graph for each layer. For prompts kernels are
    launched by lengths. For decode rows they are launched for the longest context, and read lengths and pages from
    memory, so a step with few prompt tokens does not wait for the host.
    """

    def __init__(self, rows: int, context: int, largest: PiecewiseGraph, planes: Planes) -> None:
        """largest: of the steps in pieces, whose attention this is."""
        self.rows, self.largest, self.planes, device = rows, largest, planes, planes.device
        self.places_2R = torch.zeros(2, rows, dtype=torch.int64, device=device)  # positions, and where the KV goes
        self.real_R = torch.ones(rows, dtype=torch.bool, device=device)
        self.table_RP = torch.zeros(rows, -(-context // PAGE), dtype=torch.int32, device=device)
        positions_R, write_R = self.places_2R
        group, extents = Group(0, rows, 0, 1, context), (RowExtent(1, context),) * rows
        self.slot_R = torch.zeros(rows, dtype=torch.int64, device=device) if planes.slots_nbytes else None
        tensors = positions_R, positions_R, write_R, self.table_RP, self.real_R, positions_R
        border_TK = largest.shared.border(slice(rows))
        self.batch = Batch(*tensors, (group,), extents, slot_R=self.slot_R, border_TK=border_TK)
        # its own: a piece leaves them elsewhere for each bucket. Layers with an indexer have more than others
        widest = max((piece.inputs for piece in largest.pieces), key=len)
        self.inputs = tuple(x.new_zeros(rows, *x.shape[1:]) for x in widest)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.step: Any = None  # keeps what the first layer prepares for the others

    def capture(self, pool: GraphPool) -> None:
        """Runs all eagerly first, in which kernels compile; what is stored goes into the null page."""
        attends, metadata, out_TX = self.largest.attends, self.largest.model.metadata, self.largest.shared.out_TX
        assert out_TX is not None, "the recording made it"
        self.step = metadata.build(self.batch, self.planes)
        for attend in attends:
            attend(self.step, *self.inputs)
        for layer, attend in enumerate(attends):
            pool.begin()
            if layer == 0:
                self.step = metadata.build(self.batch, self.planes)
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
        if self.slot_R is not None:
            self.real_R.zero_()
            if batch.slot_R is not None:
                self.slot_R[:rows] = batch.slot_R[:rows]
                self.real_R[:rows] = batch.real_T[:rows]
        return rows

    def attend(self, layer: int, left: tuple[Tensor, ...]) -> None:
        """left: what the piece ahead of this layer's attention left for it, of `rows` tokens at least: less of a layer
        without an indexer.
        """
        for held, given in zip(self.inputs, left, strict=False):
            held.copy_(given[: self.rows])
        self.graphs[layer].replay()


class Piecewise:
    """Runs a step from the smallest bucket that holds its tokens, with its attention in the graph where that has room
    for the rows, else in pieces; and eagerly beyond the largest bucket.
    """

    def __init__(self, model: Model, recorded: Sequence[PiecewiseGraph], ragged: Sequence[RaggedGraph] = ()) -> None:
        self.model, self.recorded = model, sorted(recorded, key=lambda one: one.tokens)
        self.ragged = sorted(ragged, key=lambda one: one.decode)
        self.decoding: list[DecodeAttentionGraphs] = []

    def capture(self, rows: int, context: int, planes: Planes, pool: GraphPool) -> None:
        """Attention of up to `rows` decode rows. pool: another than the pieces': what lies in theirs is still to be
        read by others when this replays.
        """
        self.decoding.append(DecodeAttentionGraphs(rows, context, self.recorded[-1], planes))
        self.decoding[-1].capture(pool)

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        layout = self.model.factory.layout
        own = divided(batch, layout.cp, layout.cp_strategy)
        return own.whole(self._forward(own.batch, planes))

    def _forward(self, batch: Batch, planes: Planes) -> Tensor:
        tokens = len(batch.ids_T)
        for one in self.recorded:
            if one.tokens >= tokens:
                for whole in self.ragged:
                    if whole.tokens == one.tokens and whole.fits(batch):
                        return whole.forward(batch)
                return one.forward(batch, planes, fitting(self.decoding, batch, one.tokens, one.attends))
        return self.model.forward(batch, planes)


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
    fit = [one for one in recorded if first.rows <= one.rows <= tokens and one.largest.attends == attends]
    return min(fit, key=lambda one: one.rows, default=None)


def _padding(shared: StepBuffers, tokens: int, context: int, graph_break: GraphBreak = no_graph_break) -> Batch:
    """A step of padding, as rows of a prompt as long as the context lets them be, on what the graphs read."""
    device = shared.ids_T.device
    longest = min(tokens, context)
    lengths = [longest] * (tokens // longest) + [rest for rest in [tokens % longest] if rest]
    starts = [0, *accumulate(lengths)]
    return Batch(
        shared.ids_T[:tokens],
        shared.positions_T[:tokens],
        shared.write_T[:tokens],
        torch.zeros(len(lengths), -(-longest // PAGE), dtype=torch.int32, device=device),
        shared.real_T[:tokens],
        torch.zeros(1, dtype=torch.int64, device=device),
        tuple(Group(row, 1, starts[row], length, length) for row, length in enumerate(lengths)),
        tuple(RowExtent(length, length) for length in lengths),
        graph_break,
        share=shared.share(tokens),
        border_TK=shared.border(slice(tokens)),
    )
