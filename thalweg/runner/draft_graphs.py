"""The work of a drafter as CUDA graphs: extending its KV by a captured step, one more draft of a chain, and a tree.

A graph reads slots, planes and what the captured step left; it writes slots, planes and buffers outside the pool. Only
drafters of one head are captured: all that they do is on the device and depends on shapes alone. A draft knows by
itself how many are before it, so one graph is for all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.batch.slots import Slots, refill
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.build_tree.ref import BuiltTree
from thalweg.kernels.draft_state.ref import DraftChain, DraftRows
from thalweg.memory.planes import Planes
from thalweg.runner.decode_attention import Graph
from thalweg.runner.graph_pool import NEEDS, GraphPool, capture
from thalweg.spec.autoregressive import HIDDEN, AutoregressiveDrafter
from thalweg.spec.draft_kernels import DraftKernels
from thalweg.spec.drafter import DraftExtendInput, DraftOutput, DraftRequest
from thalweg.spec.tree import TreeDrafter


class DraftExtendGraph:
    """The drafter's extension by a captured step."""

    def __init__(
        self, drafter: AutoregressiveDrafter, kernels: DraftKernels, rows: DraftRows, slots: Slots, planes: Planes
    ) -> None:
        self.drafter, self.kernels, self.rows, self.slots, self.planes = drafter, kernels, rows, slots, planes
        self.batch: Batch | None = None  # of the step

    def record(self, batch: Batch, hidden_TX: Tensor, pool: GraphPool) -> None:
        """batch, hidden_TX: where the captured step writes them."""
        self.graph, _ = capture(pool, lambda: self._extend(batch, hidden_TX))
        self.batch = batch

    def _extend(self, batch: Batch, hidden_TX: Tensor) -> None:
        self.drafter.learn_few(self.kernels, self.rows, batch, hidden_TX, self.slots, self.planes)

    def replay(self, seen: DraftExtendInput) -> None:
        self.graph.replay()


class TokenExtendGraph(DraftExtendGraph):
    """For a captured step of `tokens` tokens that belong to any rows."""

    def __init__(
        self,
        drafter: AutoregressiveDrafter,
        kernels: DraftKernels,
        tokens: int,
        slots: Slots,
        planes: Planes,
        spare: int,
    ) -> None:
        # slot, tokens and first token of each row; a missing row begins behind the last token
        self.numbers, self.tokens, self.spare = [[spare] * tokens, [1] * tokens, [tokens] * tokens], tokens, spare
        self.rows_3R = torch.tensor(self.numbers, device=planes.device)
        super().__init__(drafter, kernels, DraftRows(*self.rows_3R.unbind(0)), slots, planes)

    def replay(self, seen: DraftExtendInput) -> None:
        n, missing = [row.n for row in seen.plan.rows], self.tokens - len(seen.plan.rows)
        slots = [row.slot for row in seen.plan.rows] + [self.spare] * missing
        first = list(accumulate([0, *n]))[:-1] + [self.tokens] * missing
        numbers = [slots, n + [1] * missing, first]
        if numbers != self.numbers:  # mostly the same requests go on
            refill(self.rows_3R, numbers)
            self.numbers = numbers
        self.graph.replay()


class DraftStepGraph:
    """One more draft of `drafter` for up to `rows` rows, which have up to `widest`: a graph for each kind of draw."""

    def __init__(
        self,
        drafter: AutoregressiveDrafter,
        kernels: DraftKernels,
        rows: int,
        widest: int,
        slots: Slots,
        planes: Planes,
        spare: int,
    ) -> None:
        self.drafter, self.kernels, self.rows, self.widest = drafter, kernels, rows, widest
        self.slots, self.planes, device = slots, planes, planes.device
        self.kept_SW = slots.extra[HIDDEN]
        self.begun_2R = torch.tensor([spare] * rows + [0] * rows, device=device)  # padding, to begin with
        self.rows_2R = self.begun_2R.clone()
        slot_R, ahead_R = self.rows_2R.view(2, rows)
        state_RW = torch.zeros(rows, self.kept_SW.shape[1], dtype=self.kept_SW.dtype, device=device)
        drafts_RK = torch.zeros(rows, widest, dtype=torch.int64, device=device)
        self.chain = DraftChain(slot_R, ahead_R, state_RW, drafts_RK, torch.ones(rows, dtype=torch.bool, device=device))
        self.made_KR = torch.arange(widest + 1, device=device).unsqueeze(1).repeat(1, rows)
        self.graphs: dict[SamplingNeeds, Graph] = {}

    def record(self, max_kv_len: int, pool: GraphPool) -> None:
        begin = partial(self._begin, self.begun_2R[: self.rows])
        for needs in NEEDS:
            self.graphs[needs], _ = capture(pool, partial(self._draft, needs, max_kv_len), begin)

    def _begin(self, slot_E: Tensor) -> None:
        torch.cat((slot_E, self.begun_2R[len(slot_E) :]), out=self.rows_2R)
        torch.index_select(self.kept_SW, 0, self.chain.slot_E, out=self.chain.state_EW)

    def _draft(self, needs: SamplingNeeds, max_kv_len: int) -> None:
        self.drafter.draft(self.kernels, self.chain, needs, max_kv_len, self.slots, self.planes)

    def fits(self, rows: int, width: int) -> bool:
        return rows <= self.rows and 0 < width <= self.widest

    def replay(self, asked: DraftRequest, width: int) -> DraftOutput:
        rows = len(asked.slot_E)
        self._begin(asked.slot_E)
        graph = self.graphs[SamplingNeeds(asked.needs.random, asked.needs.truncated)]
        for _ in range(width):
            graph.replay()
        return DraftOutput(self.chain.drafts_EK[:rows, :width], self.made_KR[width, :rows], self.chain.sound_E[:rows])


class TreeBuildGraph:
    """Dynamic trees of `width` drafts for up to `rows` rows: a graph for each kind of sampling."""

    def __init__(
        self, drafter: TreeDrafter, rows: int, width: int, slots: Slots, planes: Planes, spare: int, max_kv_len: int
    ) -> None:
        self.drafter, self.rows, self.width, self.slots, self.planes = drafter, rows, width, slots, planes
        self.max_kv_len, device = max_kv_len, planes.device
        self.spares_R = torch.full((rows,), spare, dtype=torch.int64, device=device)
        self.slot_R = self.spares_R.clone()
        # outside the pool, see `tree_graphs.TreeGraph`
        token_RK = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.out = BuiltTree(token_RK, torch.zeros_like(token_RK), torch.ones(rows, dtype=torch.bool, device=device))
        self.made_R = torch.full_like(self.slot_R, width)
        self.graphs: dict[SamplingNeeds, Graph] = {}

    def record(self, pool: GraphPool) -> None:
        for needs in NEEDS:
            self.graphs[needs], _ = capture(pool, partial(self._build, needs))

    def _build(self, needs: SamplingNeeds) -> None:
        request = DraftRequest(self.slot_R, self.max_kv_len, needs)
        self.drafter.grow(request, self.width, self.slots, self.planes, self.out)

    def fits(self, rows: int, width: int) -> bool:
        return rows <= self.rows and width == self.width

    def replay(self, request: DraftRequest, width: int) -> DraftOutput:
        rows, out = len(request.slot_E), self.out
        torch.cat((request.slot_E, self.spares_R[rows:]), out=self.slot_R)
        self.graphs[SamplingNeeds(request.needs.random, request.needs.truncated)].replay()
        return DraftOutput(out.token_EK, self.made_R, out.sound_E, out.parent_EK).first(rows)


class DraftGraphs:
    """See `drafting.CapturedDrafts`."""

    def __init__(
        self, extends: Sequence[DraftExtendGraph], proposes: Sequence[DraftStepGraph | TreeBuildGraph]
    ) -> None:
        self.extends = {id(graph.batch): graph for graph in extends}
        self.proposes = sorted(proposes, key=lambda graph: graph.rows)

    def extend(self, seen: DraftExtendInput) -> bool:
        graph = self.extends.get(id(seen.batch))
        if graph is None:
            return False
        graph.replay(seen)
        return True

    def propose(self, request: DraftRequest, width: int) -> DraftOutput | None:
        rows = len(request.slot_E)
        graph = next((graph for graph in self.proposes if graph.fits(rows, width)), None)
        return None if graph is None else graph.replay(request, width)
