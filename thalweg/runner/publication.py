"""What sampling and drafting on the last pipeline stage changed in the slots, sent to all other stages.

Of each sampled row: the integers of its slot, the tokens and drafts behind what was known before, and of trees the
nodes and the accepted path, whose KV each stage moves itself. A stage applies it before a later step: the scheduler
plans no row of a slot before its last sample is published (`StepPlan.published_step`).

Letters: E sampled rows, Q sampled positions of each, X numbers of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.batch.slots import Slots, upload
from thalweg.core.plan import StepPlan
from thalweg.kernels.build_inputs.ref import INTS, LENGTH
from thalweg.parallel.pipeline import Pipe
from thalweg.runner.accepted_path import Move, path_places
from thalweg.sampling.sample import Sampled


class SampledStep(NamedTuple):
    """The sizes that follow from a plan on every stage."""

    step: int
    slots: Sequence[int]  # of the sampled rows
    query: int  # sampled positions of each
    num_drafts: int  # proposed for each at most


class Publication:
    """Of one process."""

    def __init__(self, pipe: Pipe, slots: Slots, compact_kv: Move) -> None:
        self.pipe, self.slots, self.compact_kv = pipe, slots, compact_kv
        self._expected: deque[SampledStep] = deque()  # on a stage that is not the last
        self._sending: deque[tuple[int, Callable[[], object]]] = deque()  # on the last: step, what waits for its sends
        self._needed = -1  # other stages had received up to this step before they sent the last hidden states

    def after_step(self, plan: StepPlan, num_drafts: int, sampled: Sampled | None) -> None:
        """The last stage has sampled and drafted; another one expects what came of it."""
        if self.pipe.stages == 1:
            return
        slots = [row.slot for row in plan.rows if row.samples]
        step = SampledStep(plan.step, slots, plan.sampled_per_row, num_drafts)
        if not slots:
            return
        if self.pipe.is_last:
            assert sampled is not None, "there are sampled rows"
            self._sending.append((step.step, self.pipe.publish(self._pack(step, sampled))))
        else:
            self._expected.append(step)

    def before_step(self, published_step: int) -> None:
        """Applies what was published of the steps up to this one."""
        while self._expected and self._expected[0].step <= published_step:
            self._receive(self._expected.popleft())
        while self._sending and self._sending[0][0] <= self._needed:
            self._sending.popleft()[1]()
        self._needed = published_step

    def finish(self) -> None:
        """Nothing is under way any more. All stages call it together."""
        while self._expected:
            self._receive(self._expected.popleft())
        while self._sending:
            self._sending.popleft()[1]()
        self._needed = -1

    def _pack(self, step: SampledStep, sampled: Sampled) -> Tensor:
        """int64 [E, X], see `_sizes`."""
        slots, slot_E = self.slots, self._slot_E(step)
        ints_EI = slots.ints_SI.index_select(0, slot_E)
        count_E = sampled.count_E.to(torch.int64)
        first_E = ints_EI[:, LENGTH] - count_E
        columns_EW = self._columns(first_E, step)
        parts = [ints_EI, slots.tokens_SL[slot_E.unsqueeze(1), columns_EW].to(torch.int64)]
        if slots.tree.is_tree_step(step.query):
            assert sampled.nodes_EQ is not None, "trees are verified node by node"
            nodes_EQ = F.pad(sampled.nodes_EQ, (0, step.query - sampled.nodes_EQ.shape[1]))
            parts += [count_E.unsqueeze(1), nodes_EQ]
        if slots.tree.is_tree:
            parts.append(slots.nodes_SN3.index_select(0, slot_E).flatten(1))
        return torch.cat(parts, 1)

    def _receive(self, step: SampledStep) -> None:
        slots, slot_E = self.slots, self._slot_E(step)
        sizes = self._sizes(step)
        like_EX = torch.empty(len(step.slots), sum(sizes), dtype=torch.int64, device=slot_E.device)
        ints_EI, tokens_EW, *path, nodes_EX = torch.split(self.pipe.receive_published(like_EX), sizes, 1)
        before_EI = slots.ints_SI.index_select(0, slot_E)
        if path:
            count_E1, nodes_EQ = path
            self.compact_kv(*path_places(slots, slot_E, before_EI, nodes_EQ, count_E1.squeeze(1)))
        columns_EW = self._columns(before_EI[:, LENGTH], step)
        slots.tokens_SL[slot_E.unsqueeze(1), columns_EW] = tokens_EW.to(torch.int32)
        slots.ints_SI[slot_E] = ints_EI
        if slots.tree.is_tree:
            slots.nodes_SN3[slot_E] = nodes_EX.reshape(len(step.slots), *slots.nodes_SN3.shape[1:])

    def _sizes(self, step: SampledStep) -> list[int]:
        """Numbers of a row: integers, tokens, of trees their count and their path, and all nodes."""
        tree = self.slots.tree
        path = [1, step.query] if tree.is_tree_step(step.query) else []
        nodes = self.slots.nodes_SN3[0].numel() if tree.is_tree else 0
        return [len(INTS), step.query + step.num_drafts, *path, nodes]

    def _slot_E(self, step: SampledStep) -> Tensor:
        return upload(step.slots, torch.int64, self.slots.ints_SI.device)

    def _columns(self, first_E: Tensor, step: SampledStep) -> Tensor:
        """Where the new tokens and drafts are; the spare last column for those behind the end."""
        ahead_W = torch.arange(step.query + step.num_drafts, device=first_E.device)
        return (first_E.unsqueeze(1) + ahead_W).clamp(max=self.slots.context)
