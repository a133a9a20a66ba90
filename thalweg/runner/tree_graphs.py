"""Steps whose drafts part ways as CUDA graphs, for a few numbers of rows, all with trees of as many nodes: A, accepting
a path, what is learned of it, and growing the next trees.

Everything is read from `Slots` by the slot numbers in a persistent buffer, trees too, so a replay needs one small copy
at most. Between the forwards there are kernels of one launch: what the slots give and what becomes of them
(`kernels.verify_tree`), and the move of the paths' entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.batch.slots import Slots
from thalweg.batch.upload import refill
from thalweg.core.agreement import AgreedStep, agree, record_of
from thalweg.core.plan import PAGE, SamplingNeeds, StepPlan
from thalweg.core.tree import TreeShape
from thalweg.kernels.build_tree.ref import BuiltTree
from thalweg.kernels.draft_state.ref import DraftRows
from thalweg.kernels.launch import supports_triton
from thalweg.kernels.verify_tree import ref
from thalweg.kernels.verify_tree.ref import AcceptedPaths, SlotTensors, TreeInputs, TreeVerification
from thalweg.memory.planes import Planes
from thalweg.models.decoder import Model
from thalweg.runner.accepted_path import Move
from thalweg.runner.decode_attention import Graph, halving
from thalweg.runner.drafting import NO_CAPTURED_DRAFTS, CapturedDrafts, blamed_on_drafter
from thalweg.runner.graph_pool import NEEDS, GraphPool, capture, view_of
from thalweg.runner.runner import Runner
from thalweg.sampling.sample import Moved, Sampled, Sampler
from thalweg.spec.draft_kernels import DraftKernels
from thalweg.spec.drafter import DraftExtendInput, DraftOutput, DraftRequest
from thalweg.spec.tree import TreeDrafter, slot_tensors


class TreeKernels(NamedTuple):
    """See `kernels.verify_tree.ref`."""

    build_tree_inputs: Callable[..., TreeInputs]
    climb: Callable[..., None]


def tree_kernels_on(device: torch.device) -> TreeKernels:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    if not supports_triton(device):
        return TreeKernels(ref.build_tree_inputs, ref.verify_tree)
    from thalweg.kernels.verify_tree import triton as climbing  # needs Triton

    return TreeKernels(climbing.build_tree_inputs, climbing.verify_tree)


class Held(NamedTuple):
    """What all recordings of trees share. reach: the longest context. spare: a slot that no request gets. sampling:
    what draws. move: see `straight`. attends: whether what the drafter learns by attends to what stands before.
    """

    model: Model
    planes: Planes
    slots: Slots
    max_kv_len: int
    spare: int
    sampler: Sampler
    move: Move
    climbs: TreeKernels
    attends: bool

    @property
    def fields(self) -> SlotTensors:
        return slot_tensors(self.slots)

    @property
    def pages(self) -> int:
        return -(-self.max_kv_len // PAGE)


FEW = 8  # rows for which trees are recorded, however few rows steps are recorded for


class TreeGraph:
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
        self.out = TreeVerification(*paths_RD, zeros(rows), zeros(rows, dtype=torch.bool))
        paths = rows * deepest
        real_M = zeros(paths, dtype=torch.bool)
        self.paths = AcceptedPaths(zeros(paths), zeros(paths), zeros(paths), real_M, zeros(paths), zeros(paths))
        self.table_MP = zeros(paths, held.pages if held.attends else 1, dtype=held.slots.table_SP.dtype)
        self.graphs: dict[SamplingNeeds, Graph] = {}

    def record(self, pool: GraphPool) -> None:
        self.graph, (step, hidden_TX, logits_TV) = capture(pool, self._a)
        self.graph.replay()  # what accepts finds what A left
        paths, (many, deepest) = self.paths, self.out.tokens_RD.shape
        self.hidden_MX = torch.zeros(many * deepest, hidden_TX.shape[1], dtype=hidden_TX.dtype, device=hidden_TX.device)
        for needs in NEEDS:
            accept = partial(self._accept, needs, step, hidden_TX, logits_TV)
            self.graphs[needs], _ = capture(pool, accept)
        # all that reads them is recorded: later ones may use this memory, since between A and its B nothing is replayed
        self.hidden_TX, self.logits_TV, self.ints_NI = map(view_of, (hidden_TX, logits_TV, step.ints_NI))
        self.batch = _borrowed(self._batch(step), self.every_T)
        groups, extents = (
            (Group(0, len(paths.ids_M), 0, 1, self.held.max_kv_len),),
            (RowExtent(1, self.held.max_kv_len),),
        )
        self.compacted = Batch(
            paths.ids_M, paths.positions_M, paths.to_M, self.table_MP, paths.real_M, self.every_T[:0], groups,
            extents * len(paths.ids_M), apart=False,
        )  # fmt: skip

    def _a(self) -> tuple[TreeInputs, Tensor, Tensor]:
        held = self.held
        step = held.climbs.build_tree_inputs(self.slot_R, held.fields, self.query, held.pages, PAGE)
        hidden_TX = held.model.forward(self._batch(step), held.planes)
        return step, hidden_TX, held.model.logits(hidden_TX)

    def _batch(self, step: TreeInputs) -> Batch:
        rows, query, max_kv_len = self.rows, self.query, self.held.max_kv_len
        return Batch(
            step.ids_N,
            step.positions_N,
            step.write_N,
            step.table_RP,
            step.real_N,
            self.every_T,
            (Group(0, rows, 0, query, max_kv_len),),
            (RowExtent(query, max_kv_len),) * rows,
            tree=TreeMask(step.columns_N, step.tree_mask_N, rows),
        )

    def _accept(self, needs: SamplingNeeds, step: TreeInputs, hidden_TX: Tensor, logits_TV: Tensor) -> None:
        held, deepest = self.held, self.out.tokens_RD.shape[1]
        drawn_N = held.sampler.draw(logits_TV, held.slots, step.slot_N, step.ints_NI, needs)
        held.climbs.climb(drawn_N, step, held.fields, PAGE, self.out, self.paths)
        held.move(self.paths.from_M.view(-1, deepest), self.paths.to_M.view(-1, deepest))
        torch.index_select(hidden_TX, 0, self.paths.token_M, out=self.hidden_MX)
        if held.attends:
            slot_M = step.slot_N.index_select(0, self.paths.token_M)
            torch.index_select(held.slots.table_SP[:, : held.pages], 0, slot_M, out=self.table_MP)

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        many, query = len(plan.rows), self.query
        numbers = [row.slot for row in plan.rows] + [self.held.spare] * (self.rows - many)
        if numbers != self.numbers:  # mostly the same requests go on
            refill(self.slot_R, numbers)
            self.numbers = numbers
        self.graph.replay()
        deepest = self.out.tokens_RD.shape[1]
        kept = tuple(row._replace(n=deepest, num_drafts=deepest - 1) for row in plan.rows)
        compacted = DraftExtendInput(replace(plan, rows=kept), self.compacted, self.hidden_MX)
        seen = DraftExtendInput(plan, self.batch, self.hidden_TX, compacted)
        return self.logits_TV[: many * query], self.slot_R[:many], self.ints_NI[::query][:many], seen

    @property
    def key(self) -> tuple[object, ...]:
        return "tree", self.rows, self.query

    def draws(self, plan: StepPlan) -> bool:
        return True

    def sample(self, rows: int, needs: SamplingNeeds, sampler: Sampler) -> Sampled | None:
        if needs not in self.graphs or sampler is not self.held.sampler:
            return None
        self.graphs[needs].replay()
        out = self.out
        return Moved(out.tokens_RD[:rows], out.count_R[:rows], out.done_R[:rows], nodes_EQ=out.nodes_RD[:rows])


class TreeExtendGraph:
    """What `drafter` does with the paths of a recorded step. Rows that fill it up are of the spare slot, and all
    padding.
    """

    def __init__(self, drafter: TreeDrafter, kernels: DraftKernels, of: TreeGraph) -> None:
        self.drafter, self.kernels, self.of = drafter, kernels, of
        many, deepest = of.out.tokens_RD.shape
        first_R = deepest * torch.arange(many, device=of.slot_R.device)
        self.rows = DraftRows(of.slot_R, torch.full_like(first_R, deepest), first_R)

    def record(self, pool: GraphPool) -> None:
        self.graph, _ = capture(pool, self._learn)

    def _learn(self) -> None:
        held, batch, hidden_MX = self.of.held, self.of.compacted, self.of.hidden_MX
        self.drafter.learn_few(self.kernels, self.rows, batch, hidden_MX, held.slots, held.planes)


class TreeBuildGraph:
    """Trees of `width` nodes for up to `rows` rows: a graph for each kind of draw."""

    def __init__(self, drafter: TreeDrafter, rows: int, width: int, held: Held) -> None:
        self.drafter, self.rows, self.width, self.held, device = drafter, rows, width, held, held.planes.device
        self.spares_R = torch.full((rows,), held.spare, dtype=torch.int64, device=device)
        self.slot_R = self.spares_R.clone()
        # outside the pool, see `TreeGraph`
        token_RK = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.out = BuiltTree(token_RK, torch.zeros_like(token_RK), torch.ones(rows, dtype=torch.bool, device=device))
        self.made_R = torch.full_like(self.slot_R, width)
        self.graphs: dict[SamplingNeeds, Graph] = {}

    def record(self, pool: GraphPool) -> None:
        for needs in NEEDS:
            self.graphs[needs], _ = capture(pool, partial(self._grow, needs))

    def _grow(self, needs: SamplingNeeds) -> None:
        held, asked = self.held, DraftRequest(self.slot_R, self.held.max_kv_len, needs)
        self.drafter.grow(asked, self.width, held.slots, held.planes, self.out)

    def replay(self, asked: DraftRequest) -> DraftOutput:
        many, out = len(asked.slot_E), self.out
        torch.cat((asked.slot_E, self.spares_R[many:]), out=self.slot_R)
        self.graphs[SamplingNeeds(asked.needs.random, asked.needs.truncated)].replay()
        return DraftOutput(out.token_EK[:many], self.made_R[:many], out.sound_E[:many], out.parent_EK[:many])


class TreeDrafts:
    """See `drafting.CapturedDrafts`."""

    def __init__(self, learning: Sequence[TreeExtendGraph], growing: Sequence[TreeBuildGraph]) -> None:
        self.learning = {id(one.of.compacted): one for one in learning}
        self.growing = sorted(growing, key=lambda one: one.rows)

    def extend(self, seen: DraftExtendInput) -> bool:
        one = self.learning.get(id(seen.batch))
        if one is None:
            return False
        one.graph.replay()
        return True

    def propose(self, asked: DraftRequest, width: int) -> DraftOutput | None:
        rows = len(asked.slot_E)
        fitting = next((one for one in self.growing if one.width == width and one.rows >= rows), None)
        return None if fitting is None else fitting.replay(asked)


class TreeGraphs:
    """What was recorded, by nodes and numbers of rows. drafts: what is learned of them, and how the next trees are
    grown.
    """

    def __init__(self, tree_graphs: Sequence[TreeGraph], drafts: CapturedDrafts) -> None:
        self.tree_graphs, self.drafts = sorted(tree_graphs, key=lambda one: one.rows), drafts

    def get(self, plan: StepPlan, agreed: AgreedStep | None = None) -> TreeGraph | None:
        """The smallest that holds its rows; None beyond the largest, and where rows have not as many nodes."""
        step = agreed or agree([record_of(plan)])
        if not step.is_verify or not step.is_uniform:
            return None
        return next(
            (one for one in self.tree_graphs if one.query == step.sampled_per_row and one.rows >= step.rows), None
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


def tree_graphs(
    runner: Runner,
    steps: Sequence[int],
    widths: Sequence[int],
    bounds: tuple[int, int],
    pool: GraphPool,
    told: Callable[[], None] = lambda: None,
) -> TreeGraphs:
    """Records trees of so many drafts where steps of these numbers of rows are recorded. bounds: the longest context,
    and the spare slot, the last one. Raises DrafterFails, InsufficientMemory.
    """
    drafter, storage = runner.drafting.drafter, (runner.planes, runner.slots)
    branching = drafter if isinstance(drafter, TreeDrafter) else None
    attends, climbs = branching is not None and branching.head.attends, tree_kernels_on(runner.planes.device)
    held = Held(runner.model, *storage, *bounds, runner.sampler, runner.move, climbs, attends)
    made, learning, growing = list[TreeGraph](), list[TreeExtendGraph](), list[TreeBuildGraph]()
    for rows, query in forms(steps, widths, runner.slots.tree, held.spare):
        made.append(TreeGraph(rows, query, held))
        with pool.running(f"{rows} trees of {query - 1} drafts"), blamed_on_drafter():
            made[-1].record(pool)
            if branching is not None and branching.kernels is not None:
                learning.append(TreeExtendGraph(branching, branching.kernels, made[-1]))
                learning[-1].record(pool)
            if branching is not None and runner.slots.tree.dynamic:
                growing.append(TreeBuildGraph(branching, rows, query - 1, held))
                growing[-1].record(pool)
        told()
    return TreeGraphs(made, TreeDrafts(learning, growing) if learning or growing else NO_CAPTURED_DRAFTS)


def _borrowed(batch: Batch, every_T: Tensor) -> Batch:
    assert batch.tree is not None, "what is recorded here are trees"
    held = batch.ids_T, batch.positions_T, batch.write_T, batch.table_RP, batch.real_T, *batch.tree[:2]
    ids, positions, write, table, real, columns, hides = map(view_of, held)
    return replace(
        batch, ids_T=ids, positions_T=positions, write_T=write, table_RP=table, real_T=real, emit_N=every_T,
        tree=TreeMask(columns, hides, batch.tree.rows),
    )  # fmt: skip
