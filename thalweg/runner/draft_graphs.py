"""The work of a drafter as CUDA graphs: extending its KV by a captured step, one more draft of a chain, and a tree.

A graph reads slots, planes and what the captured step left; it writes slots, planes and buffers outside the pool. Only
drafters of one head are captured: all that they do is on the device and depends on shapes alone. A draft knows by
itself how many are before it, so one graph is for all lengths; where drafts share a selection of context, one is for
the first draft and one for all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.cuda import CUDAGraph

from thalweg.batch.draft_selection import DraftSelection
from thalweg.batch.slots import refill
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.build_tree.ref import BuiltTree
from thalweg.kernels.draft_state.ref import DraftChain, DraftRows
from thalweg.runner.captured import CaptureContext, CapturedPass, CompactedPaths
from thalweg.runner.graph_pool import NEEDS, GraphPool, capture
from thalweg.spec.autoregressive import HIDDEN, AutoregressiveDrafter
from thalweg.spec.drafter import DraftExtendInput, DraftOutput, DraftRequest
from thalweg.spec.tree import TreeDrafter


class DraftExtendGraph:
    """The drafter's extension by a captured step."""

    def __init__(
        self,
        drafter: AutoregressiveDrafter,
        context: CaptureContext,
        step: CapturedPass | CompactedPaths,
        rows: DraftRows | None = None,
    ) -> None:
        """rows: of the step. None: its tokens belong to any rows, which each plan says."""
        self.drafter, self.context, self.step, self.tokens = drafter, context, step, len(step.batch.ids_T)
        self.follows_plan = rows is None
        if rows is None:
            # slot, tokens and first token of each row; a missing row begins behind the last token
            self.host_inputs = [[context.spare] * self.tokens, [1] * self.tokens, [self.tokens] * self.tokens]
            self.rows_3R = torch.tensor(self.host_inputs, device=context.planes.device)
            rows = DraftRows(*self.rows_3R.unbind(0))
        self.rows = rows

    def capture(self, pool: GraphPool) -> None:
        """Needs the captured step."""
        self.graph, _ = capture(pool, self._extend)

    def _extend(self) -> None:
        drafter, step, context = self.drafter, self.step, self.context
        shift = drafter.kernels.shift_hidden_states
        drafter.extend_rows(shift, self.rows, step.batch, step.hidden_TX, context.slots, context.planes)

    def replay(self, draft_input: DraftExtendInput) -> None:
        if self.follows_plan:
            n, missing = [row.n for row in draft_input.plan.rows], self.tokens - len(draft_input.plan.rows)
            slots = [row.slot for row in draft_input.plan.rows] + [self.context.spare] * missing
            first = list(accumulate([0, *n]))[:-1] + [self.tokens] * missing
            host_inputs = [slots, n + [1] * missing, first]
            if host_inputs != self.host_inputs:  # mostly the same requests continue
                refill(self.rows_3R, host_inputs)
                self.host_inputs = host_inputs
        self.graph.replay()


class DraftGraph(ABC):
    """Drafts for up to `rows` rows, which have up to `num_drafts`: one graph for each kind of sampling."""

    def __init__(self, context: CaptureContext, rows: int, num_drafts: int) -> None:
        self.context, self.rows, self.num_drafts = context, rows, num_drafts
        self.begun_2R = torch.tensor([context.spare] * rows + [0] * rows, device=context.planes.device)  # padding
        self.rows_2R = self.begun_2R.clone()
        self.slot_R, self.ahead_R = self.rows_2R.view(2, rows)
        self.graphs: dict[SamplingNeeds, CUDAGraph] = {}

    def capture(self, pool: GraphPool) -> None:
        self.graphs = self._captured(pool, self._draft)

    def _captured(self, pool: GraphPool, work: Callable[[SamplingNeeds], None]) -> dict[SamplingNeeds, CUDAGraph]:
        begin = partial(self._begin, self.begun_2R[: self.rows])
        return {needs: capture(pool, partial(work, needs), begin)[0] for needs in NEEDS}

    def _begin(self, slot_E: Tensor) -> None:
        torch.cat((slot_E, self.begun_2R[len(slot_E) :]), out=self.rows_2R)

    @abstractmethod
    def _draft(self, needs: SamplingNeeds) -> None:
        """What is captured."""

    @abstractmethod
    def fits(self, rows: int, num_drafts: int) -> bool:
        """Whether it can draft so many tokens for so many rows."""

    @abstractmethod
    def replay(self, request: DraftRequest, num_drafts: int) -> DraftOutput:
        """As `Drafter.propose`."""

    def _needs(self, request: DraftRequest) -> SamplingNeeds:
        """The key of this request's graphs, whose slots are written."""
        self._begin(request.slot_E)
        return SamplingNeeds(request.needs.random, request.needs.truncated)


class DraftStepGraph(DraftGraph):
    """One more draft of each row: the first one, and one after others, which may share its selection of context."""

    def __init__(self, drafter: AutoregressiveDrafter, context: CaptureContext, rows: int, num_drafts: int) -> None:
        super().__init__(context, rows, num_drafts)
        self.drafter, self.kept_SW, device = drafter, context.slots.extra[HIDDEN], context.planes.device
        state_RW = torch.zeros(rows, self.kept_SW.shape[1], dtype=self.kept_SW.dtype, device=device)
        drafts_RK = torch.zeros(rows, num_drafts, dtype=torch.int64, device=device)
        is_valid_R = torch.ones(rows, dtype=torch.bool, device=device)
        self.chain = DraftChain(self.slot_R, self.ahead_R, state_RW, drafts_RK, is_valid_R)
        # outside the pool: the first draft writes it, and other graphs read it
        self.selection = drafter.first_selection(rows, context.max_kv_len, device)
        self.later_graphs: dict[SamplingNeeds, CUDAGraph] = {}
        self.num_drafts_KR = torch.arange(num_drafts + 1, device=device).unsqueeze(1).repeat(1, rows)

    def _begin(self, slot_E: Tensor) -> None:
        super()._begin(slot_E)
        torch.index_select(self.kept_SW, 0, self.slot_R, out=self.chain.state_EW)

    def capture(self, pool: GraphPool) -> None:
        super().capture(pool)
        self.later_graphs = self.graphs if self.selection is None else self._captured(pool, self._draft_later)

    def _draft(self, needs: SamplingNeeds) -> None:
        self._draft_with(needs, self.selection)

    def _draft_later(self, needs: SamplingNeeds) -> None:
        self._draft_with(needs, self.selection and self.selection.later())

    def _draft_with(self, needs: SamplingNeeds, selection: DraftSelection | None) -> None:
        context = self.context
        self.drafter.draft(self.chain, needs, context.max_kv_len, context.slots, context.planes, selection)

    def fits(self, rows: int, num_drafts: int) -> bool:
        return rows <= self.rows and 0 < num_drafts <= self.num_drafts

    def replay(self, request: DraftRequest, num_drafts: int) -> DraftOutput:
        rows, needs, chain = len(request.slot_E), self._needs(request), self.chain
        self.graphs[needs].replay()
        for _ in range(num_drafts - 1):
            self.later_graphs[needs].replay()
        return DraftOutput(
            chain.drafts_EK[:rows, :num_drafts], self.num_drafts_KR[num_drafts, :rows], chain.is_valid_E[:rows]
        )


class TreeBuildGraph(DraftGraph):
    """Dynamic trees of `num_drafts` drafts."""

    def __init__(self, drafter: TreeDrafter, context: CaptureContext, rows: int, num_drafts: int) -> None:
        super().__init__(context, rows, num_drafts)
        self.drafter = drafter
        # outside the pool, see `captured.VerifyStep`
        token_RK = torch.zeros(rows, num_drafts, dtype=torch.int64, device=context.planes.device)
        is_valid_R = torch.ones(rows, dtype=torch.bool, device=context.planes.device)
        self.out = BuiltTree(token_RK, torch.zeros_like(token_RK), is_valid_R)
        self.num_drafts_R = torch.full_like(self.slot_R, num_drafts)

    def _draft(self, needs: SamplingNeeds) -> None:
        request = DraftRequest(self.slot_R, self.context.max_kv_len, needs)
        self.drafter.grow(request, self.num_drafts, self.context.slots, self.context.planes, self.out)

    def fits(self, rows: int, num_drafts: int) -> bool:
        return rows <= self.rows and num_drafts == self.num_drafts

    def replay(self, request: DraftRequest, num_drafts: int) -> DraftOutput:
        self.graphs[self._needs(request)].replay()
        out = self.out
        return DraftOutput(out.token_EK, self.num_drafts_R, out.is_valid_E, out.parent_EK).first(len(request.slot_E))


class DraftGraphs:
    """The captured work of a drafter."""

    def __init__(self, extends: Sequence[DraftExtendGraph], proposes: Sequence[DraftGraph]) -> None:
        self.extends = {id(graph.step.batch): graph for graph in extends}
        self.proposes = sorted(proposes, key=lambda graph: graph.rows)

    def extend(self, draft_input: DraftExtendInput) -> bool:
        """As `Drafter.extend`; False for a step that was not captured."""
        graph = self.extends.get(id(draft_input.batch))
        if graph is None:
            return False
        graph.replay(draft_input)
        return True

    def propose(self, request: DraftRequest, num_drafts: int) -> DraftOutput | None:
        """As `Drafter.propose`; None for what was not captured."""
        rows = len(request.slot_E)
        graph = next((graph for graph in self.proposes if graph.fits(rows, num_drafts)), None)
        return None if graph is None else graph.replay(request, num_drafts)


NO_DRAFT_GRAPHS = DraftGraphs((), ())
