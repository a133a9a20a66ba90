"""Steps whose drafts part ways as CUDA graphs: A, and growing the next trees, for a few numbers of rows, each with a whole tree.

Everything is read from `Slots` by the slot numbers in a persistent buffer, trees too, so a replay needs one small copy. What lies between, accepting
a path, runs eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Tree
from thalweg.batch.prepare import Prepared, verification
from thalweg.batch.slots import Slots
from thalweg.batch.upload import refill
from thalweg.core.plan import Needs, StepPlan
from thalweg.memory.planes import Planes
from thalweg.models.base import Model
from thalweg.runner.drafting import NOT_RECORDED, RecordedDrafts
from thalweg.runner.tape import NEEDS, Tape, borrow, recorded
from thalweg.sampling.sample import Sampled, Sampling
from thalweg.spec.drafter import Asked, Drafter, Proposed, Seen
from thalweg.spec.tree import Branching

TREES = 8  # rows with whole trees; more keep the device busier than Python


class Grove:
    """A of up to `rows` rows of `query` tokens. reach: the longest context. spare: a slot that no request gets."""

    def __init__(
        self, rows: int, query: int, reach: int, model: Model, planes: Planes, slots: Slots, spare: int
    ) -> None:
        self.rows, self.query, self.reach, self.spare = rows, query, reach, spare
        self.model, self.planes, self.slots = model, planes, slots
        self.slot_R = torch.full((rows,), spare, dtype=torch.int64, device=planes.device)
        self.every_T = torch.arange(rows * query, device=planes.device)

    def record(self, tape: Tape) -> None:
        self.graph, (prepared, hidden_TX, logits_TV) = recorded(tape, self._a)
        self.hidden_TX, self.logits_TV, self.ints_RI = map(borrow, (hidden_TX, logits_TV, prepared.ints_EI))
        self.batch = _borrowed(prepared.batch, self.every_T)

    def _a(self) -> tuple[Prepared, Tensor, Tensor]:
        prepared = verification(self.slots, self.slot_R, self.query, self.reach)
        hidden_TX = self.model.forward(prepared.batch, self.planes)
        return prepared, hidden_TX, self.model.logits(hidden_TX)

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, Seen]:
        many = len(plan.rows)
        refill(self.slot_R, [row.slot for row in plan.rows] + [self.spare] * (self.rows - many))
        self.graph.replay()
        seen = Seen(plan, self.batch, self.hidden_TX)
        return self.logits_TV[: many * self.query], self.slot_R[:many], self.ints_RI[:many], seen

    def draws(self, plan: StepPlan) -> bool:
        return False

    def sample(self, rows: int, needs: Needs, sampling: Sampling) -> Sampled | None:
        return None


class Growing:
    """The trees of up to `rows` rows: a graph for each kind of draw."""

    def __init__(self, drafter: Branching, rows: int, slots: Slots, planes: Planes, spare: int) -> None:
        self.drafter, self.rows, self.slots, self.planes, device = drafter, rows, slots, planes, planes.device
        self.spares_R = torch.full((rows,), spare, dtype=torch.int64, device=device)
        self.slot_R = self.spares_R.clone()
        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        token_RK = torch.zeros(rows, slots.tree.nodes, dtype=torch.int64, device=device)
        sound_R = torch.ones(rows, dtype=torch.bool, device=device)
        self.out = Proposed(token_RK, torch.zeros_like(self.slot_R), sound_R, torch.zeros_like(token_RK))
        self.graphs: dict[Needs, torch.cuda.CUDAGraph] = {}

    def record(self, reach: int, tape: Tape) -> None:
        for needs in NEEDS:
            self.graphs[needs], _ = recorded(tape, partial(self._grow, needs, reach))

    def _grow(self, needs: Needs, reach: int) -> None:
        asked, out = Asked(self.slot_R, reach, needs), self.out
        made = self.drafter.propose(asked, self.slots.tree.nodes, self.slots, self.planes)
        assert made is not None and made.parents_EK is not None and out.parents_EK is not None, "a tree was asked for"
        out.drafts_EK.copy_(made.drafts_EK)
        out.made_E.copy_(made.made_E)
        out.sound.copy_(made.sound)
        out.parents_EK.copy_(made.parents_EK)

    def replay(self, asked: Asked) -> Proposed:
        many, out = len(asked.slot_E), self.out
        torch.cat((asked.slot_E, self.spares_R[many:]), out=self.slot_R)
        self.graphs[Needs(asked.needs.random, asked.needs.truncated)].replay()
        parents_EK = None if out.parents_EK is None else out.parents_EK[:many]
        return Proposed(out.drafts_EK[:many], out.made_E[:many], out.sound[:many], parents_EK)


class TreeDrafts:
    """See `drafting.RecordedDrafts`."""

    def __init__(self, growing: Sequence[Growing]) -> None:
        self.growing = sorted(growing, key=lambda one: one.rows)

    def observe(self, seen: Seen) -> bool:
        return False

    def propose(self, asked: Asked, width: int) -> Proposed | None:
        fitting = next((one for one in self.growing if one.rows >= len(asked.slot_E)), None)
        return None if fitting is None or width != fitting.slots.tree.nodes else fitting.replay(asked)


class Groves:
    """The recorded numbers of rows. drafts: how their next trees are grown."""

    def __init__(self, groves: Sequence[Grove], drafts: RecordedDrafts) -> None:
        self.groves, self.drafts = sorted(groves, key=lambda one: one.rows), drafts

    def get(self, plan: StepPlan) -> Grove | None:
        """The smallest that holds its rows; None beyond the largest, and where a row has not a whole tree."""
        if not plan.verifies:
            return None
        fit = (one for one in self.groves if one.rows >= len(plan.rows))
        found = next(fit, None)
        return found if found is not None and all(row.n == found.query for row in plan.rows) else None


def groves(
    rows: Sequence[int],
    model: Model,
    planes: Planes,
    slots: Slots,
    drafter: Drafter,
    context: int,
    spare: int,
    tape: Tape,
) -> Groves:
    """Records those of these numbers of rows that are few. Raises CannotServe."""
    made, growing = list[Grove](), list[Growing]()
    for many in sorted({min(count, TREES) for count in rows}, reverse=True):
        made.append(Grove(many, 1 + slots.tree.nodes, context, model, planes, slots, spare))
        with tape.running(f"{many} trees"):
            made[-1].record(tape)
            if isinstance(drafter, Branching) and slots.tree.dynamic:
                growing.append(Growing(drafter, many, slots, planes, spare))
                growing[-1].record(context, tape)
    return Groves(made, TreeDrafts(growing) if growing else NOT_RECORDED)


def _borrowed(batch: Batch, every_T: Tensor) -> Batch:
    assert batch.tree is not None, "what is recorded here are trees"
    held = batch.ids_T, batch.positions_T, batch.write_T, batch.table_RP, batch.real_T, *batch.tree[:2]
    ids, positions, write, table, real, columns, hides = map(borrow, held)
    return replace(
        batch, ids_T=ids, positions_T=positions, write_T=write, table_RP=table, real_T=real, emit_N=every_T,
        tree=Tree(columns, hides, batch.tree.rows),
    )  # fmt: skip
