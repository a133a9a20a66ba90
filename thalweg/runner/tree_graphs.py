"""Steps whose drafts part ways as CUDA graphs, for a few numbers of rows, all with trees of as many nodes: A, accepting
a path, what is learned of it, and growing the next trees.

Everything is read from `Slots` by the slot numbers in a persistent buffer, trees too, so a replay needs one small copy
at most. Between the forwards there are kernels of one launch: what the slots give and what becomes of them
(`kernels.climb`), and the move of the paths' entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Extent, Group, Tree
from thalweg.batch.slots import Slots
from thalweg.batch.upload import refill
from thalweg.core.plan import PAGE, SamplingNeeds, StepPlan
from thalweg.core.tree import TreeShape
from thalweg.kernels.climb import ref
from thalweg.kernels.climb.ref import Climbed, Fields, Paths, Spread
from thalweg.kernels.draft.ref import Rows
from thalweg.kernels.grow.ref import Grown
from thalweg.kernels.launch import supports_triton
from thalweg.memory.planes import Planes
from thalweg.models.decoder import Model
from thalweg.runner.decoding import Graph, halving
from thalweg.runner.drafting import NOT_RECORDED, RecordedDrafts, blamed_on_drafter
from thalweg.runner.runner import Runner
from thalweg.runner.straight import Move
from thalweg.runner.tape import NEEDS, Tape, borrow, recorded
from thalweg.sampling.sample import Moved, Sampled, Sampling
from thalweg.spec.drafter import Asked, Proposed, Seen
from thalweg.spec.launched import Kernels
from thalweg.spec.tree import Branching, fields_of


class Climbs(NamedTuple):
    """See `kernels.climb.ref`."""

    spread: Callable[..., Spread]
    climb: Callable[..., None]


def climbs_on(device: torch.device) -> Climbs:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    if not supports_triton(device):
        return Climbs(ref.spread, ref.climb)
    from thalweg.kernels.climb import triton as climbing  # needs Triton

    return Climbs(climbing.spread, climbing.climb)


class Held(NamedTuple):
    """What all recordings of trees share. reach: the longest context. spare: a slot that no request gets. sampling:
    what draws. move: see `straight`. attends: whether what the drafter learns by attends to what stands before.
    """

    model: Model
    planes: Planes
    slots: Slots
    reach: int
    spare: int
    sampling: Sampling
    move: Move
    climbs: Climbs
    attends: bool

    @property
    def fields(self) -> Fields:
        return fields_of(self.slots)

    @property
    def pages(self) -> int:
        return -(-self.reach // PAGE)


FEW = 8  # rows for which trees are recorded, however few rows steps are recorded for


class Grove:
    """A, and accepting, of up to `rows` rows of `query` tokens. The paths are left as a step in which each token is a
    row, `straight`.
    """

    def __init__(self, rows: int, query: int, held: Held) -> None:
        self.rows, self.query, self.held = rows, query, held
        device, deepest = held.planes.device, 1 + min(held.slots.tree.max_depth, query - 1)
        self.numbers = [held.spare] * rows
        self.slot_R = torch.tensor(self.numbers, device=device)
        self.every_T = torch.arange(rows * query, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        paths_RD = zeros(rows, deepest), zeros(rows, deepest)
        self.out = Climbed(*paths_RD, zeros(rows), zeros(rows, dtype=torch.bool))
        paths = rows * deepest
        real_M = zeros(paths, dtype=torch.bool)
        self.paths = Paths(zeros(paths), zeros(paths), zeros(paths), real_M, zeros(paths), zeros(paths))
        self.table_MP = zeros(paths, held.pages if held.attends else 1, dtype=held.slots.table_SP.dtype)
        self.graphs: dict[SamplingNeeds, Graph] = {}

    def record(self, tape: Tape) -> None:
        self.graph, (step, hidden_TX, logits_TV) = recorded(tape, self._a)
        self.graph.replay()  # what accepts finds what A left
        paths, (many, deepest) = self.paths, self.out.tokens_RD.shape
        self.hidden_MX = torch.zeros(many * deepest, hidden_TX.shape[1], dtype=hidden_TX.dtype, device=hidden_TX.device)
        for needs in NEEDS:
            accept = partial(self._accept, needs, step, hidden_TX, logits_TV)
            self.graphs[needs], _ = recorded(tape, accept)
        # all that reads them is recorded: later ones may use this memory, since between A and its B nothing is replayed
        self.hidden_TX, self.logits_TV, self.ints_NI = map(borrow, (hidden_TX, logits_TV, step.ints_NI))
        self.batch = _borrowed(self._batch(step), self.every_T)
        groups, extents = (Group(0, len(paths.ids_M), 0, 1, self.held.reach),), (Extent(1, self.held.reach),)
        self.straight = Batch(
            paths.ids_M, paths.positions_M, paths.to_M, self.table_MP, paths.real_M, self.every_T[:0], groups,
            extents * len(paths.ids_M), apart=False,
        )  # fmt: skip

    def _a(self) -> tuple[Spread, Tensor, Tensor]:
        held = self.held
        step = held.climbs.spread(self.slot_R, held.fields, self.query, held.pages, PAGE)
        hidden_TX = held.model.forward(self._batch(step), held.planes)
        return step, hidden_TX, held.model.logits(hidden_TX)

    def _batch(self, step: Spread) -> Batch:
        rows, query, reach = self.rows, self.query, self.held.reach
        return Batch(
            step.ids_N,
            step.positions_N,
            step.write_N,
            step.table_RP,
            step.real_N,
            self.every_T,
            (Group(0, rows, 0, query, reach),),
            (Extent(query, reach),) * rows,
            tree=Tree(step.columns_N, step.hides_N, rows),
        )

    def _accept(self, needs: SamplingNeeds, step: Spread, hidden_TX: Tensor, logits_TV: Tensor) -> None:
        held, deepest = self.held, self.out.tokens_RD.shape[1]
        drawn_N = held.sampling.draw(logits_TV, held.slots, step.slot_N, step.ints_NI, needs)
        held.climbs.climb(drawn_N, step, held.fields, PAGE, self.out, self.paths)
        held.move(self.paths.from_M.view(-1, deepest), self.paths.to_M.view(-1, deepest))
        torch.index_select(hidden_TX, 0, self.paths.token_M, out=self.hidden_MX)
        if held.attends:
            slot_M = step.slot_N.index_select(0, self.paths.token_M)
            torch.index_select(held.slots.table_SP[:, : held.pages], 0, slot_M, out=self.table_MP)

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, Seen]:
        many, query = len(plan.rows), self.query
        numbers = [row.slot for row in plan.rows] + [self.held.spare] * (self.rows - many)
        if numbers != self.numbers:  # mostly the same requests go on
            refill(self.slot_R, numbers)
            self.numbers = numbers
        self.graph.replay()
        deepest = self.out.tokens_RD.shape[1]
        kept = tuple(row._replace(n=deepest, num_drafts=deepest - 1) for row in plan.rows)
        straight = Seen(replace(plan, rows=kept), self.straight, self.hidden_MX)
        seen = Seen(plan, self.batch, self.hidden_TX, straight)
        return self.logits_TV[: many * query], self.slot_R[:many], self.ints_NI[::query][:many], seen

    def draws(self, plan: StepPlan) -> bool:
        return True

    def sample(self, rows: int, needs: SamplingNeeds, sampling: Sampling) -> Sampled | None:
        if needs not in self.graphs or sampling is not self.held.sampling:
            return None
        self.graphs[needs].replay()
        out = self.out
        return Moved(out.tokens_RD[:rows], out.count_R[:rows], out.done_R[:rows], nodes_EQ=out.nodes_RD[:rows])


class Learning:
    """What `drafter` does with the paths of a recorded step. Rows that fill it up are of the spare slot, and all
    padding.
    """

    def __init__(self, drafter: Branching, kernels: Kernels, of: Grove) -> None:
        self.drafter, self.kernels, self.of = drafter, kernels, of
        many, deepest = of.out.tokens_RD.shape
        first_R = deepest * torch.arange(many, device=of.slot_R.device)
        self.rows = Rows(of.slot_R, torch.full_like(first_R, deepest), first_R)

    def record(self, tape: Tape) -> None:
        self.graph, _ = recorded(tape, self._learn)

    def _learn(self) -> None:
        held, batch, hidden_MX = self.of.held, self.of.straight, self.of.hidden_MX
        self.drafter.learn_few(self.kernels, self.rows, batch, hidden_MX, held.slots, held.planes)


class Growing:
    """Trees of `width` nodes for up to `rows` rows: a graph for each kind of draw."""

    def __init__(self, drafter: Branching, rows: int, width: int, held: Held) -> None:
        self.drafter, self.rows, self.width, self.held, device = drafter, rows, width, held, held.planes.device
        self.spares_R = torch.full((rows,), held.spare, dtype=torch.int64, device=device)
        self.slot_R = self.spares_R.clone()
        # outside the pool, see `Grove`
        token_RK = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.out = Grown(token_RK, torch.zeros_like(token_RK), torch.ones(rows, dtype=torch.bool, device=device))
        self.made_R = torch.full_like(self.slot_R, width)
        self.graphs: dict[SamplingNeeds, Graph] = {}

    def record(self, tape: Tape) -> None:
        for needs in NEEDS:
            self.graphs[needs], _ = recorded(tape, partial(self._grow, needs))

    def _grow(self, needs: SamplingNeeds) -> None:
        held, asked = self.held, Asked(self.slot_R, self.held.reach, needs)
        self.drafter.grow(asked, self.width, held.slots, held.planes, self.out)

    def replay(self, asked: Asked) -> Proposed:
        many, out = len(asked.slot_E), self.out
        torch.cat((asked.slot_E, self.spares_R[many:]), out=self.slot_R)
        self.graphs[SamplingNeeds(asked.needs.random, asked.needs.truncated)].replay()
        return Proposed(out.token_EK[:many], self.made_R[:many], out.sound_E[:many], out.parent_EK[:many])


class TreeDrafts:
    """See `drafting.RecordedDrafts`."""

    def __init__(self, learning: Sequence[Learning], growing: Sequence[Growing]) -> None:
        self.learning = {id(one.of.straight): one for one in learning}
        self.growing = sorted(growing, key=lambda one: one.rows)

    def observe(self, seen: Seen) -> bool:
        one = self.learning.get(id(seen.batch))
        if one is None:
            return False
        one.graph.replay()
        return True

    def propose(self, asked: Asked, width: int) -> Proposed | None:
        rows = len(asked.slot_E)
        fitting = next((one for one in self.growing if one.width == width and one.rows >= rows), None)
        return None if fitting is None else fitting.replay(asked)


class Groves:
    """What was recorded, by nodes and numbers of rows. drafts: what is learned of them, and how the next trees are
    grown.
    """

    def __init__(self, groves: Sequence[Grove], drafts: RecordedDrafts) -> None:
        self.groves, self.drafts = sorted(groves, key=lambda one: one.rows), drafts

    def get(self, plan: StepPlan) -> Grove | None:
        """The smallest that holds its rows; None beyond the largest, and where rows have not as many nodes."""
        if not plan.is_verify or any(row.n != plan.sampled_per_row for row in plan.rows):
            return None
        return next(
            (one for one in self.groves if one.query == plan.sampled_per_row and one.rows >= len(plan.rows)), None
        )


def forms(steps: Sequence[int], widths: Sequence[int], tree: TreeShape, requests: int) -> list[tuple[int, int]]:
    """Rows, and tokens of each with the root, of the steps that are recorded where steps of so many rows of one token
    are, and rows may have so many drafts that part ways; the largest first. Of each width as many rows as have no more
    tokens than the largest of those steps, or FEW, but no more than there may be requests; and each number of them that
    is half of the one before or less.
    """
    found, largest = list[tuple[int, int]](), max(steps, default=0)
    for query in sorted(1 + width for width in widths if tree.is_tree_step(1 + width)):
        most = min(max(largest // query, min(largest, FEW)), requests)
        found += [(rows, query) for rows in halving([most, *(rows for rows in steps if rows <= most)]) if rows]
    return sorted(found, key=lambda form: (form[0] * form[1], form), reverse=True)


def groves(
    runner: Runner,
    steps: Sequence[int],
    widths: Sequence[int],
    bounds: tuple[int, int],
    tape: Tape,
    told: Callable[[], None] = lambda: None,
) -> Groves:
    """Records trees of so many drafts where steps of these numbers of rows are recorded. bounds: the longest context,
    and the spare slot, the last one. Raises DrafterFails, InsufficientMemory.
    """
    drafter, storage = runner.drafting.drafter, (runner.planes, runner.slots)
    branching = drafter if isinstance(drafter, Branching) else None
    attends, climbs = branching is not None and branching.head.attends, climbs_on(runner.planes.device)
    held = Held(runner.model, *storage, *bounds, runner.sampling, runner.move, climbs, attends)
    made, learning, growing = list[Grove](), list[Learning](), list[Growing]()
    for rows, query in forms(steps, widths, runner.slots.tree, held.spare):
        made.append(Grove(rows, query, held))
        with tape.running(f"{rows} trees of {query - 1} drafts"), blamed_on_drafter():
            made[-1].record(tape)
            if branching is not None and branching.kernels is not None:
                learning.append(Learning(branching, branching.kernels, made[-1]))
                learning[-1].record(tape)
            if branching is not None and runner.slots.tree.dynamic:
                growing.append(Growing(branching, rows, query - 1, held))
                growing[-1].record(tape)
        told()
    return Groves(made, TreeDrafts(learning, growing) if learning or growing else NOT_RECORDED)


def _borrowed(batch: Batch, every_T: Tensor) -> Batch:
    assert batch.tree is not None, "what is recorded here are trees"
    held = batch.ids_T, batch.positions_T, batch.write_T, batch.table_RP, batch.real_T, *batch.tree[:2]
    ids, positions, write, table, real, columns, hides = map(borrow, held)
    return replace(
        batch, ids_T=ids, positions_T=positions, write_T=write, table_RP=table, real_T=real, emit_N=every_T,
        tree=Tree(columns, hides, batch.tree.rows),
    )  # fmt: skip
