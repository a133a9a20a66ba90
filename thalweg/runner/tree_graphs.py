"""Steps that verify trees as CUDA graphs, for a few numbers of rows: forward, acceptance of a path, the drafter's
extension by it, and the next trees.

A graph reads everything from `Slots` by the slot numbers in a persistent buffer, so a replay needs one small copy at
most. Around the model pass there are kernels of one launch each: inputs, verification, and the move of the paths' KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.batch.slots import Slots, refill
from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import PAGE, SamplingNeeds, StepPlan
from thalweg.core.tree import TreeShape
from thalweg.kernels.build_inputs import ref as inputs
from thalweg.kernels.build_inputs.ref import InputTensors, SlotTensors
from thalweg.kernels.draft_state.ref import DraftRows
from thalweg.kernels.launch import supports_triton
from thalweg.kernels.verify import ref
from thalweg.kernels.verify.ref import AcceptedPaths, Verification
from thalweg.memory.planes import Planes
from thalweg.models.decoder import Model
from thalweg.runner.accepted_path import Move
from thalweg.runner.decode_attention import Graph, halving
from thalweg.runner.draft_graphs import DraftExtendGraph, TreeBuildGraph
from thalweg.runner.drafting import blamed_on_drafter
from thalweg.runner.graph_pool import NEEDS, GraphPool, capture, view_of
from thalweg.runner.runner import Runner
from thalweg.sampling.sample import Moved, Sampled, Sampler
from thalweg.spec.drafter import DraftExtendInput
from thalweg.spec.tree import TreeDrafter


class TreeKernels(NamedTuple):
    """See `kernels.build_inputs.ref` and `kernels.verify.ref`."""

    build_inputs: Callable[..., InputTensors]
    verify: Callable[..., None]


def tree_kernels_on(device: torch.device) -> TreeKernels:
    """Kernels on a GPU, where Triton is installed; else plain torch."""
    if not supports_triton(device):
        return TreeKernels(inputs.build_inputs, ref.verify)
    from thalweg.kernels.build_inputs import triton as input_kernels  # needs Triton
    from thalweg.kernels.verify import triton as verify_kernels

    return TreeKernels(input_kernels.build_inputs, verify_kernels.verify)


class TreeContext(NamedTuple):
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
    kernels: TreeKernels
    attends: bool

    @property
    def fields(self) -> SlotTensors:
        return self.slots.tensors(is_tree=True)

    @property
    def pages(self) -> int:
        return -(-self.max_kv_len // PAGE)


FEW = 8  # rows for which trees are recorded, however few rows steps are recorded for


class TreeGraph:
    """A, and accepting, of up to `rows` rows of `query` tokens. The paths are left as a step in which each token is a
    row, `straight`.
    """

    def __init__(self, rows: int, query: int, held: TreeContext) -> None:
        self.rows, self.query, self.held = rows, query, held
        device, deepest = held.planes.device, 1 + min(held.slots.tree.max_depth, query - 1)
        self.numbers = [held.spare] * rows
        self.slot_R = torch.tensor(self.numbers, device=device)
        self.every_T = torch.arange(rows * query, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        paths_RD = zeros(rows, deepest), zeros(rows, deepest)
        self.out = Verification(*paths_RD, zeros(rows), zeros(rows, dtype=torch.bool))
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
        self.hidden_TX, self.logits_TV, self.ints_NI = map(view_of, (hidden_TX, logits_TV, step.ints_TI))
        self.batch = _borrowed(self._batch(step), self.every_T)
        groups, extents = (
            (Group(0, len(paths.ids_M), 0, 1, self.held.max_kv_len),),
            (RowExtent(1, self.held.max_kv_len),),
        )
        self.compacted = Batch(
            paths.ids_M, paths.positions_M, paths.to_M, self.table_MP, paths.real_M, self.every_T[:0], groups,
            extents * len(paths.ids_M),
        )  # fmt: skip

    def _a(self) -> tuple[InputTensors, Tensor, Tensor]:
        held = self.held
        step = held.kernels.build_inputs(self.slot_R, None, held.fields, held.pages, PAGE, self.query)
        hidden_TX = held.model.forward(self._batch(step), held.planes)
        return step, hidden_TX, held.model.logits(hidden_TX)

    def _batch(self, step: InputTensors) -> Batch:
        rows, query, max_kv_len = self.rows, self.query, self.held.max_kv_len
        assert step.columns_T is not None and step.tree_mask_T is not None, "rows are trees"
        return Batch(
            *step[:3],
            step.table_RP,
            step.real_T,
            self.every_T,
            (Group(0, rows, 0, query, max_kv_len),),
            (RowExtent(query, max_kv_len),) * rows,
            tree=TreeMask(step.columns_T, step.tree_mask_T, rows),
        )

    def _accept(self, needs: SamplingNeeds, step: InputTensors, hidden_TX: Tensor, logits_TV: Tensor) -> None:
        held, deepest = self.held, self.out.tokens_RD.shape[1]
        drawn_N = held.sampler.draw(logits_TV, held.slots, step.slot_T, step.ints_TI, needs)
        held.kernels.verify(drawn_N, step, held.fields, PAGE, self.out, self.paths)
        held.move(self.paths.from_M.view(-1, deepest), self.paths.to_M.view(-1, deepest))
        torch.index_select(hidden_TX, 0, self.paths.token_M, out=self.hidden_MX)
        if held.attends:
            slot_M = step.slot_T.index_select(0, self.paths.token_M)
            torch.index_select(held.slots.table_SP[:, : held.pages], 0, slot_M, out=self.table_MP)

    def draft_rows(self) -> DraftRows:
        """The paths as rows of the drafter's extension. Rows that fill the graph up are of the spare slot."""
        rows, deepest = self.out.tokens_RD.shape
        first_R = deepest * torch.arange(rows, device=self.slot_R.device)
        return DraftRows(self.slot_R, torch.full_like(first_R, deepest), first_R)

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

    def fits(self, step: AgreedStep) -> bool:
        is_alike = step.is_verify and step.is_uniform
        return is_alike and step.sampled_per_row == self.query and step.rows <= self.rows

    @property
    def key(self) -> tuple[object, ...]:
        return "tree", self.rows, self.query

    def draws(self, plan: StepPlan) -> bool:
        return True

    def sample(self, rows: int, needs: SamplingNeeds, sampler: Sampler) -> Sampled | None:
        if needs not in self.graphs or sampler is not self.held.sampler:
            return None
        self.graphs[needs].replay()
        tokens_RD, nodes_RD, count_R, done_R = self.out
        assert nodes_RD is not None, "rows are trees"
        return Moved(tokens_RD[:rows], count_R[:rows], done_R[:rows], nodes_EQ=nodes_RD[:rows])


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
    report: Callable[[], None] = lambda: None,
) -> tuple[list[TreeGraph], list[DraftExtendGraph], list[TreeBuildGraph]]:
    """Captures trees of these numbers of drafts where steps of these numbers of rows are captured. bounds: the longest
    context, and the spare slot, the last one. Raises DrafterError, InsufficientMemory.
    """
    (max_kv_len, spare), storage = bounds, (runner.slots, runner.planes)
    drafter = runner.drafting.drafter if isinstance(runner.drafting.drafter, TreeDrafter) else None
    attends, kernels = drafter is not None and drafter.head.attends, tree_kernels_on(runner.planes.device)
    held = TreeContext(
        runner.model, runner.planes, runner.slots, *bounds, runner.sampler, runner.move, kernels, attends
    )
    trees, extends, builds = list[TreeGraph](), list[DraftExtendGraph](), list[TreeBuildGraph]()
    for rows, query in forms(steps, widths, runner.slots.tree, spare):
        tree = TreeGraph(rows, query, held)
        trees.append(tree)
        with pool.running(f"{rows} trees of {query - 1} drafts"), blamed_on_drafter():
            tree.record(pool)
            if drafter is not None and drafter.kernels is not None:
                extends.append(DraftExtendGraph(drafter, drafter.kernels, tree.draft_rows(), *storage))
                extends[-1].record(tree.compacted, tree.hidden_MX, pool)
            if drafter is not None and runner.slots.tree.dynamic:
                builds.append(TreeBuildGraph(drafter, rows, query - 1, *storage, spare, max_kv_len))
                builds[-1].record(pool)
        report()
    return trees, extends, builds


def _borrowed(batch: Batch, every_T: Tensor) -> Batch:
    assert batch.tree is not None, "what is recorded here are trees"
    held = batch.ids_T, batch.positions_T, batch.write_T, batch.table_RP, batch.real_T, *batch.tree[:2]
    ids, positions, write, table, real, columns, masks = map(view_of, held)
    return replace(
        batch, ids_T=ids, positions_T=positions, write_T=write, table_RP=table, real_T=real, emit_N=every_T,
        tree=TreeMask(columns, masks, batch.tree.rows),
    )  # fmt: skip
