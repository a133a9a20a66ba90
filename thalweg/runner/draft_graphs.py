"""Drafting as CUDA graphs: what a chain's drafter learns of a recorded step, and what it does for one more draft.

Both read slots, planes and what A left, and write slots, planes and buffers of their own outside the tape's pool. Only
drafters of one head are recorded, of one that drafts trees what it does for a single draft: all that they do is on the
device, and depends on shapes alone. A draft knows by itself how many are before it, so that one graph is for all
widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.batch.slots import Slots
from thalweg.batch.upload import refill
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.draft_state.ref import DraftChain, DraftRows
from thalweg.memory.planes import Planes
from thalweg.runner.decode_attention import Graph
from thalweg.runner.graph_pool import NEEDS, GraphPool, capture
from thalweg.spec.autoregressive import HIDDEN, AutoregressiveDrafter
from thalweg.spec.draft_kernels import DraftKernels
from thalweg.spec.drafter import DraftExtendInput, DraftOutput, DraftRequest


class DraftExtendGraph:
    """What `drafter` does with the tokens of a recorded step, each a row there, however they belong together."""

    def __init__(
        self,
        drafter: AutoregressiveDrafter,
        kernels: DraftKernels,
        tokens: int,
        slots: Slots,
        planes: Planes,
        spare: int,
    ) -> None:
        self.drafter, self.kernels, self.tokens = drafter, kernels, tokens
        self.slots, self.planes, self.spare = slots, planes, spare
        # slot, tokens and first token of each row; a row that there is not begins behind the last token
        self.numbers = [[spare] * tokens, [1] * tokens, [tokens] * tokens]
        self.rows_3R = torch.tensor(self.numbers, device=planes.device)
        self.batch: Batch | None = None

    def record(self, batch: Batch, hidden_TX: Tensor, pool: GraphPool) -> None:
        """batch, hidden_TX: where A puts them at every replay."""
        self.graph, _ = capture(pool, lambda: self._learn(batch, hidden_TX))

    def _learn(self, batch: Batch, hidden_TX: Tensor) -> None:
        rows = DraftRows(*self.rows_3R.unbind(0))
        self.drafter.learn_few(self.kernels, rows, batch, hidden_TX, self.slots, self.planes)

    def replay(self, seen: DraftExtendInput) -> None:
        n, missing = [row.n for row in seen.plan.rows], self.tokens - len(seen.plan.rows)
        slots = [row.slot for row in seen.plan.rows] + [self.spare] * missing
        first = [0, *accumulate(n[:-1])] + [self.tokens] * missing
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

    def replay(self, asked: DraftRequest, width: int) -> DraftOutput:
        rows = len(asked.slot_E)
        self._begin(asked.slot_E)
        graph = self.graphs[SamplingNeeds(asked.needs.random, asked.needs.truncated)]
        for _ in range(width):
            graph.replay()
        return DraftOutput(self.chain.drafts_EK[:rows, :width], self.made_KR[width, :rows], self.chain.sound_E[:rows])


class DraftGraphs:
    """See `drafting.CapturedDrafts`."""

    def __init__(self, learning: Sequence[DraftExtendGraph], proposing: Sequence[DraftStepGraph]) -> None:
        self.learning = {id(one.batch): one for one in learning}
        self.proposing = sorted(proposing, key=lambda one: one.rows)

    def extend(self, seen: DraftExtendInput) -> bool:
        one = self.learning.get(id(seen.batch))
        if one is None:
            return False
        one.replay(seen)
        return True

    def propose(self, asked: DraftRequest, width: int) -> DraftOutput | None:
        rows = len(asked.slot_E)
        fitting = next((one for one in self.proposing if one.rows >= rows), None)
        return None if fitting is None or not 0 < width <= fitting.widest else fitting.replay(asked, width)
