"""Captured steps: a model pass as a CUDA graph, and the graphs of what follows it, one for each kind of draw.

A graph reads slot numbers from a persistent buffer and everything else from `Slots`, so a replay needs one small copy
at most. Rows that fill a graph up are of a spare slot that has ended: they are padding, and touch the null page only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.batch.slots import Slots, refill
from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import PAGE, SamplingNeeds, StepPlan
from thalweg.core.tree import TreeShape
from thalweg.kernels.build_inputs.ref import InputTensors
from thalweg.kernels.launch import implementation
from thalweg.kernels.verify.ref import AcceptedPaths, Verification
from thalweg.memory.planes import Planes
from thalweg.models.interface import Model
from thalweg.runner.accepted_path import Move
from thalweg.runner.graph_pool import MOST, NEEDS, WARM_UPS, GraphPool, capture, view_of
from thalweg.sampling.sample import Moved, Sampled, Sampler
from thalweg.spec.drafter import DraftExtendInput

FAR = 1 << 40  # tokens ahead of any: padding
WIDEST = 8  # drafts of a chain; steps with more are worth their Python
FEW = 8  # rows for which trees are captured, however few rows steps are captured for


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """What all captured steps share."""

    model: Model
    planes: Planes
    slots: Slots
    sampler: Sampler
    move: Move  # see `runner.accepted_path`
    attends: bool  # whether the drafter's extension attends to earlier entries
    max_kv_len: int  # the longest context
    spare: int  # a slot that no request gets

    @property
    def pages(self) -> int:
        return -(-self.max_kv_len // PAGE)

    @property
    def build_inputs(self) -> Callable[..., InputTensors]:
        """See `kernels.build_inputs.ref`."""
        return implementation("build_inputs", self.planes.device).build_inputs  # type: ignore[no-any-return]

    @property
    def verify(self) -> Callable[..., None]:
        """See `kernels.verify.ref`."""
        return implementation("verify", self.planes.device).verify  # type: ignore[no-any-return]

    def batch(self, step: InputTensors, emit_N: Tensor, rows: int, query: int = 1, shares_slots: bool = False) -> Batch:
        """The step as rows of equally many tokens."""
        tree = None
        if step.columns_T is not None and step.tree_mask_T is not None:
            tree = TreeMask(step.columns_T, step.tree_mask_T, rows)
        groups, extents = (Group(0, rows, 0, query, self.max_kv_len),), (RowExtent(query, self.max_kv_len),) * rows
        tensors = *step[:3], step.table_RP, step.real_T, emit_N
        return Batch(*tensors, groups, extents, tree=tree, shares_slots=shares_slots)


class CapturedPass:
    """The model pass of up to `rows` rows, each a token or, with is_tree, a tree of `query` nodes."""

    step: InputTensors
    batch: Batch
    hidden_TX: Tensor
    logits_TV: Tensor

    def __init__(
        self, held: CaptureContext, rows: int, query: int = 1, is_tree: bool = False, shares_slots: bool = False
    ) -> None:
        """shares_slots: rows may be tokens of one request."""
        self.held, self.rows, self.query, self.is_tree = held, rows, query, is_tree
        self.shares_slots = shares_slots
        # slots of the rows, and how far each token is ahead of the next position of its slot
        self.numbers = [[held.spare] * rows, [0] * rows]
        self.inputs_2R = torch.tensor(self.numbers, device=held.planes.device)
        self.slot_R, self.ahead_R = self.inputs_2R
        self.every_T = torch.arange(rows * query, device=held.planes.device)

    def record(self, pool: GraphPool) -> None:
        self.graph, left = capture(pool, self._forward)
        self.step, self.batch, self.hidden_TX, self.logits_TV = left
        self.graph.replay()  # what is captured behind it reads what it leaves

    def _forward(self) -> tuple[InputTensors, Batch, Tensor, Tensor]:
        held, ahead_R = self.held, None if self.is_tree else self.ahead_R
        step = held.build_inputs(self.slot_R, ahead_R, held.slots.tensors(self.is_tree), held.pages, PAGE, self.query)
        batch = held.batch(step, self.every_T, self.rows, self.query, self.shares_slots)
        hidden_TX = held.model.forward(batch, held.planes)
        return step, batch, hidden_TX, held.model.logits(hidden_TX)

    def lend(self) -> None:
        """Once all is captured that reads the pass: later graphs may use its memory, since nothing is replayed between
        the halves of a step.
        """
        self.hidden_TX, self.logits_TV = view_of(self.hidden_TX), view_of(self.logits_TV)
        self.step = InputTensors(*(None if x is None else view_of(x) for x in self.step))  # type: ignore[arg-type]
        self.batch = self.held.batch(self.step, self.every_T, self.rows, self.query, self.shares_slots)

    def run(self, slots: list[int], ahead: list[int] | None = None) -> None:
        """The pass of rows of these slots, so far ahead of their next positions; all other rows are padding."""
        missing = self.rows - len(slots)
        numbers = [slots + [self.held.spare] * missing, (ahead or [0] * len(slots)) + [0] * missing]
        if numbers != self.numbers:  # mostly the same requests go on
            refill(self.inputs_2R, numbers)
            self.numbers = numbers
        self.graph.replay()


class CapturedStep(ABC):
    """A model pass, and the draws that follow it for up to `rows` rows of `query` tokens each."""

    kind: str
    warm_ups = WARM_UPS

    def __init__(self, of: CapturedPass, rows: int, query: int) -> None:
        self.of, self.rows, self.query = of, rows, query
        self.graphs: dict[SamplingNeeds, torch.cuda.CUDAGraph] = {}

    def record(self, pool: GraphPool) -> None:
        """Needs the captured pass. What is computed goes to the spare slot and the null page."""
        for needs in NEEDS:
            self.graphs[needs], _ = capture(pool, partial(self._draw, needs), warm_ups=self.warm_ups)

    @abstractmethod
    def _draw(self, needs: SamplingNeeds) -> None:
        """What `sample` replays."""

    @abstractmethod
    def _drawn(self, rows: int) -> Sampled:
        """What it leaves for the first rows."""

    @property
    def key(self) -> tuple[object, ...]:
        """Kind and size."""
        return self.kind, self.rows, self.query

    @abstractmethod
    def fits(self, step: AgreedStep) -> bool:
        """Whether its pass can be that of the step."""

    @abstractmethod
    def draws(self, plan: StepPlan) -> bool:
        """Whether the second half of a plan that fits can be replayed."""

    @abstractmethod
    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        """Replays the first half. → logits_NV, slot_E, ints_EI of the emitting rows, and the drafter's input."""

    def sample(self, rows: int, needs: SamplingNeeds, sampler: Sampler) -> Sampled | None:
        """Replays the second half for the first `rows`; None if it was not captured for these needs or this sampler."""
        if needs not in self.graphs or sampler is not self.of.held.sampler:
            return None
        self.graphs[needs].replay()
        return self._drawn(rows)


class VerifyStep(CapturedStep):
    """A step whose rows verify `query` - 1 drafts each: trees, or chains, whose tokens are rows of the pass. Chains
    with fewer drafts are filled up with padding, so that nothing has to be gathered.
    """

    def __init__(self, of: CapturedPass, rows: int, query: int) -> None:
        super().__init__(of, rows, query)
        self.kind, device = "tree" if of.is_tree else "verify", of.slot_R.device
        deepest = 1 + min(of.held.slots.tree.max_depth, query - 1) if of.is_tree else query
        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        tokens_RD = torch.zeros(rows, deepest, dtype=torch.int64, device=device)
        nodes_RD = torch.zeros_like(tokens_RD) if of.is_tree else None
        count_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.out = Verification(tokens_RD, nodes_RD, count_R, torch.zeros_like(count_R, dtype=torch.bool))
        self.compacted = CompactedPaths(of, rows, deepest) if of.is_tree else None

    def _draw(self, needs: SamplingNeeds) -> None:
        of, held, step, tokens = self.of, self.of.held, self.of.step, self.rows * self.query
        # drawing writes where drafts are: the step's own tokens stay
        logits_NV, slot_N, ints_NI = of.logits_TV[:tokens], step.slot_T[:tokens], step.ints_TI[:tokens]
        drawn_N, slots = (
            held.sampler.draw(logits_NV, held.slots, slot_N, ints_NI, needs),
            held.slots.tensors(of.is_tree),
        )
        if self.compacted is None:
            held.verify(drawn_N, step, slots, PAGE, self.out, None)
        else:
            held.verify(drawn_N, step, slots, PAGE, self.out, self.compacted.paths)
            self.compacted.fill(of)

    def _drawn(self, rows: int) -> Sampled:
        tokens_RD, nodes_RD, count_R, done_R = self.out
        if nodes_RD is None:
            return Sampled(tokens_RD[:rows], count_R[:rows], done_R[:rows])
        return Moved(tokens_RD[:rows], count_R[:rows], done_R[:rows], nodes_EQ=nodes_RD[:rows])

    def fits(self, step: AgreedStep) -> bool:
        is_alike = step.is_verify and step.sampled_per_row == self.query and step.rows <= self.rows
        return is_alike and (step.is_uniform or not self.of.is_tree)

    def draws(self, plan: StepPlan) -> bool:
        return True

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        of, query, rows = self.of, self.query, plan.rows
        tokens, each, compacted = len(rows) * query, 1 if of.is_tree else query, None
        if self.compacted is None:
            ahead = [j if j < row.n else FAR for row in rows for j in range(query)]
            of.run([row.slot for row in rows for _ in range(query)], ahead)
            plan = _of_length(plan, query)
        else:
            of.run([row.slot for row in rows])
            paths = self.compacted
            compacted = DraftExtendInput(_of_length(plan, paths.deepest), paths.batch, paths.hidden_TX)
        slot_E, ints_EI = of.slot_R[: len(rows) * each : each], of.step.ints_TI[:tokens:query]
        return of.logits_TV[:tokens], slot_E, ints_EI, DraftExtendInput(plan, of.batch, of.hidden_TX, compacted)


def _of_length(plan: StepPlan, n: int) -> StepPlan:
    """The plan with rows of a token and n - 1 drafts."""
    return replace(plan, rows=tuple(row._replace(n=n, num_drafts=n - 1) for row in plan.rows))


class CompactedPaths:
    """The accepted paths of trees, outside the pool, as a step whose tokens are rows. A path has `deepest` tokens;
    those that it lacks are padding.
    """

    def __init__(self, of: CapturedPass, rows: int, deepest: int) -> None:
        held, self.deepest, paths = of.held, deepest, rows * deepest
        table_SP, hidden_TX = held.slots.table_SP, of.hidden_TX

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=table_SP.device)

        real_M = zeros(paths, dtype=torch.bool)
        self.paths = path = AcceptedPaths(zeros(paths), zeros(paths), zeros(paths), real_M, zeros(paths), zeros(paths))
        table_MP = zeros(paths, held.pages if held.attends else 1, dtype=table_SP.dtype)
        self.hidden_TX = zeros(paths, hidden_TX.shape[1], dtype=hidden_TX.dtype)
        step = InputTensors(path.ids_M, path.positions_M, path.to_M, real_M, table_MP, path.ids_M, path.ids_M)
        self.batch = held.batch(step, of.every_T[:0], paths)

    def fill(self, of: CapturedPass) -> None:
        """Moves the paths' KV to where a chain's would be, and copies their hidden states."""
        held, path = of.held, self.paths
        held.move(path.from_M.view(-1, self.deepest), path.to_M.view(-1, self.deepest))
        torch.index_select(of.hidden_TX, 0, path.token_M, out=self.hidden_TX)
        if held.attends:
            slot_M = of.step.slot_T.index_select(0, path.token_M)
            torch.index_select(held.slots.table_SP[:, : held.pages], 0, slot_M, out=self.batch.table_RP)


def chain_shapes(steps: Sequence[int], draft_counts: Sequence[int]) -> list[tuple[int, int]]:
    """Rows and tokens of a row for which verifications of chains are captured. steps: tokens of the captured passes.
    draft_counts: drafts that rows may have. Of each there are as many numbers of rows as there are such steps up to
    MOST, and as many rows as the largest step has room for.
    """
    largest = max(steps)
    shapes = {
        (rows, 1 + num_drafts)
        for num_drafts in draft_counts
        if 0 < num_drafts <= WIDEST
        for rows in {*steps, min(largest // (1 + num_drafts), MOST)}
        if 0 < rows <= MOST and rows * (1 + num_drafts) <= largest
    }
    return sorted(shapes)


def tree_shapes(
    steps: Sequence[int], draft_counts: Sequence[int], tree: TreeShape, requests: int
) -> list[tuple[int, int]]:
    """As `chain_shapes`, for trees, the largest first. Of each number of drafts there are as many rows as have no more
    tokens than the largest step, or FEW, but no more than there may be requests; and each number that is half
    of the one before or less.
    """
    shapes, largest = list[tuple[int, int]](), max(steps, default=0)
    for query in sorted(1 + num_drafts for num_drafts in draft_counts if tree.is_tree_step(1 + num_drafts)):
        most = min(max(largest // query, min(largest, FEW)), requests)
        shapes += [(rows, query) for rows in halving([most, *(rows for rows in steps if rows <= most)]) if rows]
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape), reverse=True)


def halving(rows: Sequence[int]) -> list[int]:
    """Of these numbers of rows the largest, and each that is half of the one before or less: rows of padding attend to
    one token, and cost little.
    """
    chosen: list[int] = []
    for many in sorted(rows, reverse=True):
        if not chosen or 2 * many <= chosen[-1]:
            chosen.append(many)
    return chosen
