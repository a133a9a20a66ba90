"""Captured steps: a model pass as a CUDA graph, and one graph of sampling for each kind of `SamplingNeeds`.

A graph reads slot numbers from a persistent buffer and everything else from `Slots`, so a replay needs at most one
small copy. Padding rows use a spare slot that has ended: they read and write the null page only.
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
from thalweg.core.plan import SamplingNeeds, StepPlan
from thalweg.core.tree import TreeShape
from thalweg.kernels.build_inputs.ref import InputTensors
from thalweg.kernels.launch import implementation
from thalweg.kernels.verify.ref import AcceptedPaths, Verification
from thalweg.memory.planes import Planes
from thalweg.models.interface import Model
from thalweg.runner.accepted_path import Move
from thalweg.runner.graph_pool import MAX_CAPTURED_ROWS, NEEDS, GraphPool, capture, view_of
from thalweg.sampling.sample import Sampled, Sampler
from thalweg.spec.drafter import DraftExtendInput

PADDING_OFFSET = 1 << 40  # position offset of padding, beyond the end of any slot
MAX_CAPTURED_CHAIN = 8  # drafts of a chain; steps with more are slower than Python
MIN_TREE_ROWS = 8  # trees are captured for at least this many rows


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """Shared by all captured steps."""

    model: Model
    thin_model: Model  # one layer of each kind
    planes: Planes
    slots: Slots
    sampler: Sampler
    compact_kv: Move  # see `runner.accepted_path`
    attends: bool  # whether the drafter's extension attends to earlier entries
    max_kv_len: int  # the longest context
    spare: int  # a slot that no request gets
    samples: bool = True  # False on a pipeline stage before the last

    @property
    def pages(self) -> int:
        return self.slots.num_pages(self.max_kv_len)

    @property
    def build_inputs(self) -> Callable[..., InputTensors]:
        """See `kernels.build_inputs.ref`."""
        return implementation("build_inputs", self.planes.device).build_inputs  # type: ignore[no-any-return]

    @property
    def verify(self) -> Callable[..., None]:
        """See `kernels.verify.ref`."""
        return implementation("verify", self.planes.device).verify  # type: ignore[no-any-return]

    def batch(
        self,
        step: InputTensors,
        logits_indices_N: Tensor,
        rows: int,
        query: int = 1,
        shares_slots: bool = False,
        slot_R: Tensor | None = None,
    ) -> Batch:
        """The step as rows of equally many tokens."""
        tree = None
        if step.columns_T is not None and step.tree_mask_T is not None:
            tree = TreeMask(step.columns_T, step.tree_mask_T, rows)
        groups, extents = (Group(0, rows, 0, query, self.max_kv_len),), (RowExtent(query, self.max_kv_len),) * rows
        tensors = *step[:3], step.table_RP, step.real_T, logits_indices_N
        return Batch(*tensors, groups, extents, tree=tree, shares_slots=shares_slots, slot_R=slot_R)


class CapturedPass:
    """The model pass of up to `rows` rows, each a token or, with is_tree, a tree of `query` nodes."""

    step: InputTensors
    batch: Batch
    hidden_TX: Tensor
    logits_TV: Tensor

    def __init__(
        self, context: CaptureContext, rows: int, query: int = 1, is_tree: bool = False, shares_slots: bool = False
    ) -> None:
        """shares_slots: rows may be tokens of one request."""
        self.context, self.rows, self.query, self.is_tree = context, rows, query, is_tree
        self.shares_slots = shares_slots
        # slots of the rows, and the offset of each token from the next position of its slot
        self.host_inputs = [[context.spare] * rows, [0] * rows]
        self.inputs_2R = torch.tensor(self.host_inputs, device=context.planes.device)
        self.slot_R, self.ahead_R = self.inputs_2R
        self.every_T = torch.arange(rows * query, device=context.planes.device)

    def capture(self, pool: GraphPool) -> None:
        context = self.context
        warm_up = partial(self._forward, context.thin_model)
        self.graph, outputs = capture(pool, partial(self._forward, context.model), warm_up=warm_up)
        self.step, self.batch, self.hidden_TX, self.logits_TV = outputs
        self.graph.replay()  # the graphs that follow read its outputs

    def _forward(self, model: Model) -> tuple[InputTensors, Batch, Tensor, Tensor]:
        context, ahead_R = self.context, None if self.is_tree else self.ahead_R
        tensors, page = context.slots.tensors(self.is_tree), context.slots.page_size
        step = context.build_inputs(self.slot_R, ahead_R, tensors, context.pages, page, self.query)
        batch = context.batch(step, self.every_T, self.rows, self.query, self.shares_slots, self.slot_R)
        hidden_TX = model.forward(batch, context.planes)
        return step, batch, hidden_TX, model.shard_logits(hidden_TX)

    def release_pool_memory(self) -> None:
        """Lets later graphs use the memory of this pass. Call it when all graphs that read its outputs are captured.
        This is safe because no graph is replayed between the two halves of a step.
        """
        self.hidden_TX, self.logits_TV = view_of(self.hidden_TX), view_of(self.logits_TV)
        self.step = InputTensors(*(None if x is None else view_of(x) for x in self.step))  # type: ignore[arg-type]
        self.batch = self.context.batch(self.step, self.every_T, self.rows, self.query, self.shares_slots)

    def run(self, slots: list[int], ahead: list[int] | None = None) -> None:
        """Replays the pass for these slots. ahead: offset of each token from the next position of its slot. Other rows
        are padding.
        """
        missing = self.rows - len(slots)
        host_inputs = [slots + [self.context.spare] * missing, (ahead or [0] * len(slots)) + [0] * missing]
        if host_inputs != self.host_inputs:  # mostly the same requests continue
            refill(self.inputs_2R, host_inputs)
            self.host_inputs = host_inputs
        self.graph.replay()


class CapturedStep(ABC):
    """A captured model pass and the graphs that sample up to `rows` rows of `query` tokens each."""

    kind: str

    def __init__(self, captured_pass: CapturedPass, rows: int, query: int) -> None:
        self.captured_pass, self.rows, self.query = captured_pass, rows, query
        self.graphs: dict[SamplingNeeds, torch.cuda.CUDAGraph] = {}

    def capture(self, pool: GraphPool) -> None:
        """Captures sampling after the pass has been captured. It writes to the spare slot and the null page."""
        for needs in NEEDS if self.captured_pass.context.samples else ():
            self.graphs[needs], _ = capture(pool, partial(self._sample_tokens, needs))

    @abstractmethod
    def _sample_tokens(self, needs: SamplingNeeds) -> None:
        """Samples; this is captured and replayed by `sample`."""

    @abstractmethod
    def _sampled(self, rows: int) -> Sampled:
        """The result of the last replay for the leading rows."""

    @property
    def key(self) -> tuple[object, ...]:
        """Kind and size."""
        return self.kind, self.rows, self.query

    @abstractmethod
    def fits(self, step: AgreedStep) -> bool:
        """Whether this graph can run the model pass of the step."""

    @abstractmethod
    def can_replay_sampling(self, plan: StepPlan) -> bool:
        """Whether sampling of a plan that fits can be replayed."""

    @abstractmethod
    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        """Replays the first half. → logits_NV, slot_E, ints_EI of the sampled rows, and the drafter's input."""

    def sample(self, rows: int, needs: SamplingNeeds, sampler: Sampler) -> Sampled | None:
        """Replays the second half for the first `rows`; None if it was not captured for these needs or this sampler."""
        if needs not in self.graphs or sampler is not self.captured_pass.context.sampler:
            return None
        self.graphs[needs].replay()
        return self._sampled(rows)


class VerifyStep(CapturedStep):
    """A step whose rows verify `query` - 1 drafts each: trees, or chains, whose tokens are rows of the pass. Chains
    with fewer drafts are filled up with padding, so that nothing has to be gathered.
    """

    def __init__(self, captured_pass: CapturedPass, rows: int, query: int) -> None:
        super().__init__(captured_pass, rows, query)
        self.kind, device = "tree" if captured_pass.is_tree else "verify", captured_pass.slot_R.device
        deepest = 1 + min(captured_pass.context.slots.tree.max_depth, query - 1) if captured_pass.is_tree else query
        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        tokens_RD = torch.zeros(rows, deepest, dtype=torch.int64, device=device)
        nodes_RD = torch.zeros_like(tokens_RD) if captured_pass.is_tree else None
        count_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.out = Verification(tokens_RD, nodes_RD, count_R, torch.zeros_like(count_R, dtype=torch.bool))
        self.compacted = CompactedPaths(captured_pass, rows, deepest) if captured_pass.is_tree else None

    def _sample_tokens(self, needs: SamplingNeeds) -> None:
        captured_pass, context, step, tokens = (
            self.captured_pass,
            self.captured_pass.context,
            self.captured_pass.step,
            self.rows * self.query,
        )
        # sampling may overwrite the drafts in the slots; the inputs of the step stay
        logits_NV, slot_N, ints_NI = captured_pass.logits_TV[:tokens], step.slot_T[:tokens], step.ints_TI[:tokens]
        target_ids_N, slots = (
            context.sampler.sample_tokens(logits_NV, context.slots, slot_N, ints_NI, needs),
            context.slots.tensors(captured_pass.is_tree),
        )
        page = context.slots.page_size
        if self.compacted is None:
            context.verify(target_ids_N, step, slots, page, self.out, None)
        else:
            context.verify(target_ids_N, step, slots, page, self.out, self.compacted.paths)
            self.compacted.fill(captured_pass)

    def _sampled(self, rows: int) -> Sampled:
        tokens_RD, nodes_RD, count_R, done_R = self.out
        if nodes_RD is None:
            return Sampled(tokens_RD[:rows], count_R[:rows], done_R[:rows])
        return Sampled(tokens_RD[:rows], count_R[:rows], done_R[:rows], nodes_EQ=nodes_RD[:rows], kv_is_compacted=True)

    def fits(self, step: AgreedStep) -> bool:
        is_alike = step.is_verify and step.sampled_per_row == self.query and step.rows <= self.rows
        return is_alike and (step.is_uniform or not self.captured_pass.is_tree)

    def can_replay_sampling(self, plan: StepPlan) -> bool:
        return True

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        captured_pass, query, rows = self.captured_pass, self.query, plan.rows
        tokens, each, compacted = len(rows) * query, 1 if captured_pass.is_tree else query, None
        if self.compacted is None:
            ahead = [j if j < row.n else PADDING_OFFSET for row in rows for j in range(query)]
            captured_pass.run([row.slot for row in rows for _ in range(query)], ahead)
            plan = _of_length(plan, query)
        else:
            captured_pass.run([row.slot for row in rows])
            paths = self.compacted
            compacted = DraftExtendInput(_of_length(plan, paths.deepest), paths.batch, paths.hidden_TX)
        slot_E, ints_EI = captured_pass.slot_R[: len(rows) * each : each], captured_pass.step.ints_TI[:tokens:query]
        return (
            captured_pass.logits_TV[:tokens],
            slot_E,
            ints_EI,
            DraftExtendInput(plan, captured_pass.batch, captured_pass.hidden_TX, compacted),
        )


def _of_length(plan: StepPlan, n: int) -> StepPlan:
    """The plan with rows of a token and n - 1 drafts."""
    return replace(plan, rows=tuple(row._replace(n=n, num_drafts=n - 1) for row in plan.rows))


class CompactedPaths:
    """The accepted paths of trees, outside the pool, as a step whose tokens are rows. A path has `deepest` tokens;
    those that it lacks are padding.
    """

    def __init__(self, captured_pass: CapturedPass, rows: int, deepest: int) -> None:
        context, self.deepest, paths = captured_pass.context, deepest, rows * deepest
        table_SP, hidden_TX = context.slots.table_SP, captured_pass.hidden_TX

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=table_SP.device)

        real_M = zeros(paths, dtype=torch.bool)
        self.paths = path = AcceptedPaths(zeros(paths), zeros(paths), zeros(paths), real_M, zeros(paths), zeros(paths))
        table_MP = zeros(paths, context.pages if context.attends else 1, dtype=table_SP.dtype)
        self.hidden_TX = zeros(paths, hidden_TX.shape[1], dtype=hidden_TX.dtype)
        step = InputTensors(path.ids_M, path.positions_M, path.to_M, real_M, table_MP, path.ids_M, path.ids_M)
        self.batch = context.batch(step, captured_pass.every_T[:0], paths)

    def fill(self, captured_pass: CapturedPass) -> None:
        """Moves the paths' KV to where a chain's would be, and copies their hidden states."""
        context, path = captured_pass.context, self.paths
        context.compact_kv(path.from_M.view(-1, self.deepest), path.to_M.view(-1, self.deepest))
        torch.index_select(captured_pass.hidden_TX, 0, path.token_M, out=self.hidden_TX)
        if context.attends:
            slot_M = captured_pass.step.slot_T.index_select(0, path.token_M)
            torch.index_select(context.slots.table_SP[:, : context.pages], 0, slot_M, out=self.batch.table_RP)


def chain_shapes(steps: Sequence[int], draft_counts: Sequence[int]) -> list[tuple[int, int]]:
    """Rows and tokens of a row for which verifications of chains are captured. steps: tokens of the captured passes.
    draft_counts: drafts that rows may have. Of each there are as many numbers of rows as there are such steps up to
    MOST, and as many rows as the largest step has room for.
    """
    largest = max(steps)
    shapes = {
        (rows, 1 + num_drafts)
        for num_drafts in draft_counts
        if 0 < num_drafts <= MAX_CAPTURED_CHAIN
        for rows in {*steps, min(largest // (1 + num_drafts), MAX_CAPTURED_ROWS)}
        if 0 < rows <= MAX_CAPTURED_ROWS and rows * (1 + num_drafts) <= largest
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
        most = min(max(largest // query, min(largest, MIN_TREE_ROWS)), requests)
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
