"""Whole steps as CUDA graphs: A and B of DESIGN §1, one graph each for every bucket of rows of one token.

A reads which slots it computes from a persistent buffer and everything else from `Slots`, so a replay needs one small copy. Rows that fill a
bucket up are those of a spare slot that has ended: they are padding, and touch the null page only. All graphs share one memory pool;
the largest is recorded first, so that the others fit into what it took.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Callable, Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Extent, Group
from thalweg.batch.prepare import sampled_tokens
from thalweg.batch.slots import Slots
from thalweg.batch.upload import refill, upload
from thalweg.core.plan import PAGE, Needs, StepPlan
from thalweg.kernels.prepare import triton as preparing
from thalweg.memory.planes import Planes
from thalweg.models.base import Model
from thalweg.runner.pieces import Pieces, Piecewise, Shared
from thalweg.runner.runner import Runner
from thalweg.runner.tape import Tape, borrow
from thalweg.sampling.launched import choose_into, sampled
from thalweg.sampling.sample import Sampled
from thalweg.spec.drafter import Seen

NEEDS = (Needs(), Needs(random=True), Needs(random=True, truncated=True))  # of B's draw; edits before it run eagerly
WARM_UPS = 2  # eager runs before a recording: kernels compile, libraries make their handles

Progress = Callable[[int, int], None]  # recorded buckets, of how many


class Recorded:
    """A and B for up to `rows` rows."""

    def __init__(self, rows: int, reach: int, model: Model, planes: Planes, slots: Slots, spare: int) -> None:
        self.rows, self.slots, self.spare, self.reach = rows, slots, spare, reach
        # slots of the rows, and how far behind its slot's next position each row's lies
        self.inputs_2R = torch.zeros(2, rows, dtype=torch.int64, device=planes.device)
        self.slot_R, self.ahead_R = self.inputs_2R
        self.slot_R.fill_(spare)
        self.every_R = torch.arange(rows, device=planes.device)
        self.b: dict[Needs, torch.cuda.CUDAGraph] = {}
        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        self.out = (
            torch.zeros(rows, dtype=torch.int64, device=planes.device),
            torch.zeros(rows, dtype=torch.bool, device=planes.device),
            torch.zeros(rows, dtype=torch.bool, device=planes.device),
        )
        self.model, self.planes = model, planes
        self.hidden_RH = self.logits_RV = self.ints_RI = self.slot_R
        self.batch: Batch | None = None

    def record(self, tape: Tape) -> None:
        """Runs each half eagerly, then records it. What is computed goes to the spare slot and the null page."""
        for _ in range(WARM_UPS):
            self._a()
        tape.begin()
        self.batch, self.hidden_RH, self.logits_RV, self.ints_RI = self._a()
        self.a = tape.end()
        self.a.replay()  # B's eager runs read what A left
        for needs in NEEDS:
            self._b(needs)
            tape.begin()
            self._b(needs)
            self.b[needs] = tape.end()
        # B's recordings are made: later buckets may use this memory, since between A and its B nothing is replayed
        self.hidden_RH, self.logits_RV, self.ints_RI = map(borrow, (self.hidden_RH, self.logits_RV, self.ints_RI))
        b = self.batch
        ids, positions, write, table, real = map(borrow, (b.ids_T, b.positions_T, b.write_T, b.table_RP, b.real_T))
        self.batch = Batch(ids, positions, write, table, real, self.every_R, b.groups, b.extents)

    def _a(self) -> tuple[Batch, Tensor, Tensor, Tensor]:
        slots, rows, reach = self.slots, self.rows, self.reach
        ids, positions, write, real, table, ints = preparing.decode(
            self.slot_R, self.ahead_R, slots.ints_SI, slots.tokens_SL, slots.table_SP, -(-reach // PAGE), PAGE
        )
        group, extents = Group(0, rows, 0, 1, reach), (Extent(1, reach),) * rows
        batch = Batch(ids, positions, write, table, real, self.every_R, (group,), extents)
        hidden = self.model.forward(batch, self.planes)
        return batch, hidden, self.model.logits(hidden), ints

    def _b(self, needs: Needs) -> None:
        choose_into(self.out, self.logits_RV, self.slots, self.slot_R, self.ints_RI, needs, self.slots.ints_SI)

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, Seen]:
        """A of this plan, each of whose tokens becomes a row: logits, slots and the slots' integers of its emitting rows; what a drafter sees."""
        tokens, device = plan.tokens, self.slot_R.device
        filling = self.rows - tokens
        slot_R = [row.slot for row in plan.rows for _ in range(row.n)] + [self.spare] * filling
        ahead_R = [ahead for row in plan.rows for ahead in range(row.n)] + [0] * filling
        refill(self.inputs_2R, [slot_R, ahead_R])
        self.a.replay()
        if plan.decodes:
            assert self.batch is not None, "record() comes first"
            seen = Seen(plan, self.batch, self.hidden_RH)
            return self.logits_RV[:tokens], self.slot_R[:tokens], self.ints_RI[:tokens], seen
        return self._emitting(plan, device)

    def _emitting(self, plan: StepPlan, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Seen]:
        """Those of the rows' sampled tokens; the chunks that do not emit move their slots on."""
        first = [0, *accumulate(row.n for row in plan.rows)]
        silent = [(row.slot, row.n) for row in plan.rows if not row.emit]
        if silent:
            slot_C, n_C = upload(list(zip(*silent, strict=True)), torch.int64, device)
            self.slots.at.index_add_(0, slot_C, n_C)
        sampled_N = upload(sampled_tokens(plan), torch.int64, device)
        first_E = upload([at for at, row in zip(first, plan.rows, strict=False) if row.emit], torch.int64, device)
        assert self.batch is not None, "record() comes first"
        seen = Seen(plan, self.batch, self.hidden_RH)
        return self.logits_RV[sampled_N], self.slot_R[first_E], self.ints_RI[first_E], seen

    def sample(self, rows: int, needs: Needs) -> Sampled | None:
        if needs not in self.b:
            return None
        self.b[needs].replay()
        tokens, done, live = self.out
        return sampled((tokens[:rows], done[:rows], live[:rows]))


class CudaGraphs:
    """The recorded steps of a runner, by bucket. Drafts are rows like others; mixed: prompt tokens too."""

    def __init__(self, recorded: Sequence[Recorded], mixed: bool) -> None:
        self.recorded, self.mixed = sorted(recorded, key=lambda one: one.rows), mixed

    def get(self, plan: StepPlan) -> Recorded | None:
        """The smallest bucket that holds its tokens; None beyond the largest, and for what was not recorded."""
        if not plan.verifies and (not self.mixed or any(row.score_from < row.score_to for row in plan.rows)):
            return None
        tokens = plan.tokens
        return next((one for one in self.recorded if one.rows >= tokens), None)


@torch.inference_mode()
def record(
    runner: Runner,
    rows: Sequence[int],
    tokens: Sequence[int],
    mixed: bool,
    context: int,
    spare: int,
    progress: Progress,
) -> None:
    """Records whole steps for these numbers of rows, and the static parts of other steps for these numbers of tokens; the runner runs them
    from now on. mixed: see `CudaGraphs`. context: the longest, in tokens. spare: a slot that no request gets. Raises CannotServe.
    """
    tape, model, planes, count = Tape(), runner.model, runner.planes, len(rows) + len(tokens)
    whole: list[Recorded] = []
    pieces: list[Pieces] = []
    if tokens:
        shared = Shared(max(tokens), planes.device)
        for many in sorted(tokens, reverse=True):
            pieces.append(Pieces(many, model, shared))
            with tape.running(f"{many} tokens"):
                pieces[-1].record(planes, context, tape)
            progress(len(pieces), count)
        runner.steps = Piecewise(model, pieces)
    for many in sorted(rows, reverse=True):
        whole.append(Recorded(many, context, model, planes, runner.slots, spare))
        with tape.running(f"{many} rows"):
            whole[-1].record(tape)
        progress(len(pieces) + len(whole), count)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what the eager runs took belongs to the tape's stream, and nobody else can have it
    if whole:
        runner.graphs = CudaGraphs(whole, mixed)
