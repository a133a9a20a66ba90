"""Verifications as CUDA graphs: accept of a recorded step whose rows have drafts.

Its graph of A has a row for each token. Here they stand row by row, each with as many tokens as the one with most
drafts, those that it has not being padding; so logits lie as accept wants them, and nothing has to be gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Callable, Protocol

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.batch.slots import Slots
from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import PAGE, SamplingNeeds, StepPlan
from thalweg.kernels.build_inputs.ref import InputTensors
from thalweg.kernels.verify.ref import Verification
from thalweg.runner.decode_attention import Graph
from thalweg.runner.graph_pool import MOST, NEEDS, GraphPool, capture
from thalweg.sampling.sample import Sampled, Sampler
from thalweg.spec.drafter import DraftExtendInput

WIDEST = 8  # drafts; who makes more has to accept many of them, for which the time is little
FAR = 1 << 40  # tokens ahead of any: padding


class Computed(Protocol):
    """What A of `rows` rows leaves at every replay: the step's batch, and of each of its tokens what the names say.
    slot_R: their slots.
    """

    rows: int
    slots: Slots
    slot_R: Tensor
    batch: Batch | None
    hidden_RH: Tensor
    logits_RV: Tensor
    ints_RI: Tensor

    def run(self, slot_R: list[int], ahead_R: list[int]) -> None:
        """Computes the tokens that stand so far behind the next position of these slots; all others are padding."""


class VerifyGraph:
    """Up to `rows` rows of `query` tokens each, in a recorded step of as many tokens or more."""

    def __init__(self, rows: int, query: int, of: Computed, sampler: Sampler, verify: Callable[..., None]) -> None:
        """verify: see `kernels.verify.ref`."""
        self.rows, self.query, self.of, self.sampler, self.verify = rows, query, of, sampler, verify
        device = of.slot_R.device
        # outside the pool, see `graphs.DecodeGraph`
        tokens_RQ = torch.zeros(rows, query, dtype=torch.int64, device=device)
        done_R = torch.zeros(rows, dtype=torch.bool, device=device)
        self.out = Verification(tokens_RQ, None, tokens_RQ[:, 0].clone(), done_R)
        self.graphs: dict[SamplingNeeds, Graph] = {}

    def record(self, pool: GraphPool) -> None:
        """Behind A: what that left is read."""
        for needs in NEEDS:
            self.graphs[needs], _ = capture(pool, partial(self._accept, needs))

    def _accept(self, needs: SamplingNeeds) -> None:
        of, slots, tokens = self.of, self.of.slots, self.rows * self.query
        assert of.batch is not None, "A comes first"
        slot_N, ints_NI, batch = of.slot_R[:tokens], of.ints_RI[:tokens], of.batch
        # drawing writes where drafts are: the step's own tokens stay
        drawn_N = self.sampler.draw(of.logits_RV[:tokens], slots, slot_N, ints_NI, needs)
        step = InputTensors(
            batch.ids_T, batch.positions_T, batch.write_T, batch.real_T, batch.table_RP, ints_NI, slot_N
        )
        self.verify(drawn_N, step, slots.tensors(is_tree=False), PAGE, self.out, None)

    def fits(self, step: AgreedStep) -> bool:
        return step.is_verify and step.sampled_per_row == self.query and step.rows <= self.rows

    @property
    def key(self) -> tuple[object, ...]:
        return "verify", self.rows, self.query

    def draws(self, plan: StepPlan) -> bool:
        return True

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        query, rows, of = self.query, plan.rows, self.of
        ahead = [j if j < row.n else FAR for row in rows for j in range(query)]
        of.run([row.slot for row in rows for _ in range(query)], ahead)
        assert of.batch is not None, "record() comes first"
        alike = replace(plan, rows=tuple(row._replace(n=query, num_drafts=query - 1) for row in rows))
        tokens = len(rows) * query
        slot_E = of.slot_R[:tokens].view(-1, query)[:, 0]
        ints_EI = of.ints_RI[:tokens].view(-1, query, of.ints_RI.shape[1])[:, 0]
        return of.logits_RV[:tokens], slot_E, ints_EI, DraftExtendInput(alike, of.batch, of.hidden_RH)

    def sample(self, rows: int, needs: SamplingNeeds, sampler: Sampler) -> Sampled | None:
        if needs not in self.graphs or sampler is not self.sampler:
            return None
        self.graphs[needs].replay()
        return Sampled(self.out.tokens_RD[:rows], self.out.count_R[:rows], self.out.done_R[:rows])


def verifications(steps: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int]]:
    """Rows and tokens of each for which accept is recorded, where whole steps of so many tokens are, and steps may have
    so many drafts: of each width as many numbers of rows as there are such steps up to MOST, and as many rows as the
    largest step has room for.
    """
    largest = max(steps)
    made = {
        (rows, 1 + width)
        for width in widths
        if 0 < width <= WIDEST
        for rows in {*steps, min(largest // (1 + width), MOST)}
        if 0 < rows <= MOST and rows * (1 + width) <= largest
    }
    return sorted(made)
