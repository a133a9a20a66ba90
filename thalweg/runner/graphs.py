"""Whole steps as CUDA graphs: A and B of DESIGN §1, one graph each for every bucket of rows of one token.

A reads which slots it computes from a persistent buffer and everything else from `Slots`, so a replay needs one small
copy. Rows that fill a bucket up are those of a spare slot that has ended: they are padding, and touch the null page
only. All graphs share one memory pool; the largest is recorded first, so that the others fit into what it took.
"""

from __future__ import annotations

import itertools
from functools import partial
from itertools import accumulate
from typing import Callable, Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.batch.inputs import sampled_tokens
from thalweg.batch.slots import Slots
from thalweg.batch.upload import refill, upload
from thalweg.core.agreement import AgreedStep, agree, record_of
from thalweg.core.plan import PAGE, SamplingNeeds, StepPlan
from thalweg.kernels.build_inputs import triton as preparing
from thalweg.kernels.verify_chain import triton as verifying
from thalweg.memory.planes import Planes
from thalweg.models.decoder import Model
from thalweg.runner.decode_attention import halving
from thalweg.runner.draft_graphs import DraftExtendGraph, DraftGraphs, DraftStepGraph
from thalweg.runner.drafting import NO_CAPTURED_DRAFTS, CapturedDrafts, blamed_on_drafter
from thalweg.runner.graph_pool import MOST, NEEDS, GraphPool, capture, view_of
from thalweg.runner.piecewise import Piecewise, PiecewiseBuffers, PiecewiseGraph
from thalweg.runner.runner import Runner
from thalweg.runner.tree_graphs import forms, tree_graphs
from thalweg.runner.verify_graphs import VerifyGraph, verifications
from thalweg.sampling.kernel_sampling import sample_into, sampled
from thalweg.sampling.sample import Sampled, Sampler
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.draft_kernels import DraftKernels
from thalweg.spec.drafter import DraftExtendInput

Progress = Callable[[int, int], None]  # recorded buckets, of how many


class DecodeGraph:
    """A and B for up to `rows` rows. apart: as of `Batch`."""

    def __init__(
        self, rows: int, max_kv_len: int, model: Model, planes: Planes, slots: Slots, spare: int, apart: bool = True
    ) -> None:
        self.rows, self.slots, self.spare, self.max_kv_len, self.apart = rows, slots, spare, max_kv_len, apart
        # slots of the rows, and how far behind its slot's next position each row's lies
        self.numbers = [[spare] * rows, [0] * rows]
        self.inputs_2R = torch.tensor(self.numbers, device=planes.device)
        self.slot_R, self.ahead_R = self.inputs_2R
        self.every_R = torch.arange(rows, device=planes.device)
        self.b: dict[SamplingNeeds, torch.cuda.CUDAGraph] = {}
        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        self.out = (
            torch.zeros(rows, dtype=torch.int64, device=planes.device),
            torch.zeros(rows, dtype=torch.bool, device=planes.device),
            torch.zeros(rows, dtype=torch.bool, device=planes.device),
        )
        self.model, self.planes = model, planes
        self.hidden_RH = self.logits_RV = self.ints_RI = self.slot_R
        self.batch: Batch | None = None

    def record(
        self, pool: GraphPool, verified: Sequence[VerifyGraph] = (), learning: Sequence[DraftExtendGraph] = ()
    ) -> None:
        """Runs each half eagerly, then records it, B also of rows with drafts, and what a drafter learns of it. What is
        computed goes to the spare slot and the null page.
        """
        self.a, left = capture(pool, self._a)
        self.batch, self.hidden_RH, self.logits_RV, self.ints_RI = left
        self.a.replay()  # B's eager runs read what A left
        for needs in NEEDS:
            self.b[needs], _ = capture(pool, partial(self._b, needs), warm_ups=1)
        with blamed_on_drafter():
            for verification in verified:
                verification.record(pool)
            for one in learning:
                one.record(self.batch, self.hidden_RH, pool)
        # B's recordings are made: later buckets may use this memory, since between A and its B nothing is replayed
        self.hidden_RH, self.logits_RV, self.ints_RI = map(view_of, (self.hidden_RH, self.logits_RV, self.ints_RI))
        b = self.batch
        ids, positions, write, table, real = map(view_of, (b.ids_T, b.positions_T, b.write_T, b.table_RP, b.real_T))
        self.batch = Batch(ids, positions, write, table, real, self.every_R, b.groups, b.extents, apart=self.apart)
        for one in learning:
            one.batch = self.batch

    def _a(self) -> tuple[Batch, Tensor, Tensor, Tensor]:
        slots, rows, max_kv_len = self.slots, self.rows, self.max_kv_len
        ids, positions, write, real, table, ints = preparing.build_decode_inputs(
            self.slot_R, self.ahead_R, slots.ints_SI, slots.tokens_SL, slots.table_SP, -(-max_kv_len // PAGE), PAGE
        )
        group, extents = Group(0, rows, 0, 1, max_kv_len), (RowExtent(1, max_kv_len),) * rows
        batch = Batch(ids, positions, write, table, real, self.every_R, (group,), extents, apart=self.apart)
        hidden = self.model.forward(batch, self.planes)
        return batch, hidden, self.model.logits(hidden), ints

    def _b(self, needs: SamplingNeeds) -> None:
        sample_into(self.out, self.logits_RV, self.slots, self.slot_R, self.ints_RI, needs, self.slots.ints_SI)

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        """A of this plan, each of whose tokens becomes a row: logits, slots and the slots' integers of its emitting
        rows; what a drafter sees.
        """
        tokens, device = plan.tokens, self.slot_R.device
        slot_T = [row.slot for row in plan.rows for _ in range(row.n)]
        self.run(slot_T, [ahead for row in plan.rows for ahead in range(row.n)])
        if plan.is_decode:
            assert self.batch is not None, "record() comes first"
            seen = DraftExtendInput(plan, self.batch, self.hidden_RH)
            return self.logits_RV[:tokens], self.slot_R[:tokens], self.ints_RI[:tokens], seen
        return self._emitting(plan, device)

    def run(self, slot_T: list[int], ahead_T: list[int]) -> None:
        """A of the tokens that stand so far behind the next position of these slots; all others are padding."""
        filling = self.rows - len(slot_T)
        numbers = [slot_T + [self.spare] * filling, ahead_T + [0] * filling]
        if numbers != self.numbers:  # mostly the same requests go on
            refill(self.inputs_2R, numbers)
            self.numbers = numbers
        self.a.replay()

    def _emitting(self, plan: StepPlan, device: torch.device) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        """Those of the rows' sampled tokens; the chunks that do not emit move their slots on."""
        first = [0, *accumulate(row.n for row in plan.rows)]
        silent = [(row.slot, row.n) for row in plan.rows if not row.emit]
        if silent:
            slot_C, n_C = upload(list(zip(*silent, strict=True)), torch.int64, device)
            self.slots.at.index_add_(0, slot_C, n_C)
        sampled_N = sampled_tokens(plan, device)
        first_E = upload([at for at, row in zip(first, plan.rows, strict=False) if row.emit], torch.int64, device)
        assert self.batch is not None, "record() comes first"
        seen = DraftExtendInput(plan, self.batch, self.hidden_RH)
        return self.logits_RV[sampled_N], self.slot_R[first_E], self.ints_RI[first_E], seen

    @property
    def key(self) -> tuple[object, ...]:
        return "tokens", self.rows

    def draws(self, plan: StepPlan) -> bool:
        return plan.is_decode

    def sample(self, rows: int, needs: SamplingNeeds, sampler: Sampler) -> Sampled | None:
        if needs not in self.b:
            return None
        self.b[needs].replay()
        tokens, done, live = self.out
        return sampled((tokens[:rows], done[:rows], live[:rows]))


class CudaGraphs:
    """The recorded steps of a runner, by bucket. Drafts are rows like others; mixed: prompt tokens too. verified: those
    whose rows have drafts. drafts: what its drafter does.
    """

    def __init__(
        self,
        recorded: Sequence[DecodeGraph],
        mixed: bool,
        verified: Sequence[VerifyGraph] = (),
        drafts: CapturedDrafts = NO_CAPTURED_DRAFTS,
    ) -> None:
        self.recorded, self.mixed, self.drafts = sorted(recorded, key=lambda one: one.rows), mixed, drafts
        self.verified = sorted(verified, key=lambda one: one.rows)

    def get(self, plan: StepPlan, agreed: AgreedStep | None = None) -> DecodeGraph | VerifyGraph | None:
        """The smallest bucket that holds its tokens; None beyond the largest, and for what was not recorded."""
        step = agreed or agree([record_of(plan)])
        if not step.is_verify and (not self.mixed or step.score_passes):
            return None
        query = step.sampled_per_row
        if query > 1 and step.is_verify:
            fit = (one for one in self.verified if one.query == query and one.rows >= step.rows)
            verified = next(fit, None)
            if verified is not None:
                return verified
        return next((one for one in self.recorded if one.rows >= step.tokens), None)


@torch.inference_mode()
def record(
    runner: Runner,
    rows: Sequence[int],
    tokens: Sequence[int],
    mixed: bool,
    context: int,
    spare: int,
    progress: Progress,
    widths: Sequence[int] = (),
) -> None:
    """Records whole steps for these numbers of rows, and the static parts of other steps for these numbers of tokens;
    the runner runs them from now on. mixed: see `CudaGraphs`. context: the longest, in tokens. spare: a slot that no
    request gets. widths: drafts that the rows of a step may have. Raises UnsupportedConfig, and DrafterFails where it
    is what a drafter needs.
    """
    pool, done = GraphPool(), itertools.count(1)
    beside = halving([many for many in rows if many <= max(tokens)]) if tokens else []
    tree = runner.slots.tree
    alone = [width for width in widths if rows and not tree.is_tree_step(1 + width)]
    chains = _chains(runner) if alone else []
    drafting = halving([min(many, MOST) for many in rows]) if chains else []
    count = len(rows) + len(tokens) + len(beside) + len(drafting) + len(forms(rows, widths, tree, spare))

    def told() -> None:
        progress(next(done), count)

    if tokens:
        _in_pieces(runner, tokens, beside, context, pool, told)
    apart = not (mixed or widths or tree.is_tree)
    whole, verified, learning = _whole(runner, rows, alone, chains, (context, spare, apart), pool, told)
    if tree.is_tree and rows:
        runner.tree_graphs = tree_graphs(runner, rows, widths, (context, spare), pool, told)
    proposing: list[DraftStepGraph] = []
    for many in drafting:
        with pool.running(f"drafts of {many} rows"), blamed_on_drafter():
            for one in chains:
                proposing.append(DraftStepGraph(*one, many, max(alone), runner.slots, runner.planes, spare))
                proposing[-1].record(context, pool)
        told()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what the eager runs took belongs to the tape's stream, and nobody else can have it
    if whole:
        drafts = DraftGraphs(learning, proposing) if chains else NO_CAPTURED_DRAFTS
        runner.graphs = CudaGraphs(whole, mixed, verified, drafts)


def _chains(runner: Runner) -> list[tuple[AutoregressiveDrafter, DraftKernels]]:
    """The runner's drafter, where it is one whose work can be recorded."""
    drafter = runner.drafting.drafter
    if not isinstance(drafter, AutoregressiveDrafter) or drafter.kernels is None:
        return []
    return [(drafter, drafter.kernels)]


def _in_pieces(
    runner: Runner,
    tokens: Sequence[int],
    beside: Sequence[int],
    context: int,
    pool: GraphPool,
    told: Callable[[], None],
) -> None:
    """Has the runner's steps go in pieces, of so many tokens, and of decode rows beside prompts attention in graphs, of
    so many rows.
    """
    model, planes = runner.model, runner.planes
    shared, pieces, other = PiecewiseBuffers(max(tokens), planes.device), list[PiecewiseGraph](), GraphPool()
    for many in sorted(tokens, reverse=True):
        pieces.append(PiecewiseGraph(many, model, shared))
        with pool.running(f"{many} tokens"):
            pieces[-1].record(planes, context, pool)
        told()
    runner.steps = steps = Piecewise(model, pieces)
    for many in beside:
        with other.running(f"attention of {many} rows"):
            steps.record(many, context, planes, other)
        told()


def _whole(
    runner: Runner, rows: Sequence[int], widths: Sequence[int], chains: Sequence[tuple[AutoregressiveDrafter, DraftKernels]],
    bounds: tuple[int, int, bool], pool: GraphPool, told: Callable[[], None],
) -> tuple[list[DecodeGraph], list[VerifyGraph], list[DraftExtendGraph]]:  # fmt: skip
    """bounds: the longest context, the spare slot, and whether rows are apart."""
    slots, planes, (context, spare, apart) = runner.slots, runner.planes, bounds
    pairs = verifications(rows, widths) if widths else []
    made, verified, learning = list[DecodeGraph](), list[VerifyGraph](), list[DraftExtendGraph]()
    for many in sorted(rows, reverse=True):
        made.append(DecodeGraph(many, context, runner.model, planes, slots, spare, apart))
        here = [pair for pair in pairs if many == min(one for one in rows if one >= pair[0] * pair[1])]
        accepts = [VerifyGraph(*pair, made[-1], runner.sampler, verifying.verify_chain) for pair in here]
        own = [DraftExtendGraph(*one, many, slots, planes, spare) for one in chains]
        with pool.running(f"{many} rows"):
            made[-1].record(pool, accepts, own)
        verified += accepts
        learning += own
        told()
    return made, verified, learning
