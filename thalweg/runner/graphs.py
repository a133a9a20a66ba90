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
from thalweg.batch.slots import Slots, refill, upload
from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import PAGE, SamplingNeeds, StepPlan
from thalweg.kernels.build_inputs import triton as input_kernels
from thalweg.kernels.verify import triton as verify
from thalweg.memory.planes import Planes
from thalweg.models.decoder import Model
from thalweg.runner.captured import CapturedSteps, ordered
from thalweg.runner.decode_attention import halving
from thalweg.runner.draft_graphs import DraftExtendGraph, DraftGraphs, DraftStepGraph, TokenExtendGraph, TreeBuildGraph
from thalweg.runner.drafting import NO_CAPTURED_DRAFTS, blamed_on_drafter
from thalweg.runner.graph_pool import MOST, NEEDS, GraphPool, capture, view_of
from thalweg.runner.piecewise import Piecewise, PiecewiseBuffers, PiecewiseGraph
from thalweg.runner.runner import Runner
from thalweg.runner.tree_graphs import TreeGraph, forms, tree_graphs
from thalweg.runner.verify_graphs import VerifyGraph, verifications
from thalweg.sampling.kernel_sampling import sample_into, sampled
from thalweg.sampling.sample import Sampled, Sampler
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.drafter import DraftExtendInput

Progress = Callable[[int, int], None]  # recorded buckets, of how many


class DecodeGraph:
    """Both halves of a step of up to `rows` tokens, each of which is a row. mixed: they may be prompt tokens, too."""

    def __init__(
        self, rows: int, max_kv_len: int, model: Model, planes: Planes, slots: Slots, spare: int, mixed: bool
    ) -> None:
        self.rows, self.slots, self.spare, self.max_kv_len, self.mixed = rows, slots, spare, max_kv_len, mixed
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
        self.batch = Batch(ids, positions, write, table, real, self.every_R, b.groups, b.extents)
        for one in learning:
            one.batch = self.batch

    def _a(self) -> tuple[Batch, Tensor, Tensor, Tensor]:
        slots, rows, max_kv_len = self.slots, self.rows, self.max_kv_len
        pages = -(-max_kv_len // PAGE)
        step = input_kernels.build_inputs(self.slot_R, self.ahead_R, slots.tensors(is_tree=False), pages, PAGE)
        group, extents = Group(0, rows, 0, 1, max_kv_len), (RowExtent(1, max_kv_len),) * rows
        batch = Batch(*step[:3], step.table_RP, step.real_T, self.every_R, (group,), extents)
        hidden = self.model.forward(batch, self.planes)
        return batch, hidden, self.model.logits(hidden), step.ints_TI

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

    def fits(self, step: AgreedStep) -> bool:
        is_known = step.is_verify or self.mixed and not step.score_passes
        return is_known and not self.slots.tree.is_tree_step(step.sampled_per_row) and step.tokens <= self.rows

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
    """Captures whole steps for these numbers of rows, and the static parts of other steps for these numbers of tokens;
    the runner replays them from now on. mixed: whole steps may have prompt tokens, too. context: the longest, in
    tokens. spare: a slot that no request gets. widths: numbers of drafts that the rows of a step may have. Raises
    UnsupportedConfig, and DrafterError if only the drafter's part fails.
    """
    pool, done = GraphPool(), itertools.count(1)
    tree, slots, planes = runner.slots.tree, runner.slots, runner.planes
    beside = halving([bucket for bucket in rows if bucket <= max(tokens)]) if tokens else []
    chains = [width for width in widths if rows and not tree.is_tree_step(1 + width)]
    drafter = runner.drafting.drafter
    kernels = drafter.kernels if chains and isinstance(drafter, AutoregressiveDrafter) else None
    drafting = halving([min(bucket, MOST) for bucket in rows]) if kernels else []
    count = len(rows) + len(tokens) + len(beside) + len(drafting) + len(forms(rows, widths, tree, spare))

    def report() -> None:
        progress(next(done), count)

    if tokens:
        _capture_pieces(runner, tokens, beside, context, pool, report)
    steps = list[DecodeGraph](), list[VerifyGraph]()
    extends, proposes = list[DraftExtendGraph](), list[DraftStepGraph | TreeBuildGraph]()
    pairs = verifications(rows, chains) if chains else []
    for bucket in sorted(rows, reverse=True):
        step = DecodeGraph(bucket, context, runner.model, planes, slots, spare, mixed)
        here = [pair for pair in pairs if bucket == min(one for one in rows if one >= pair[0] * pair[1])]
        verified = [VerifyGraph(*pair, step, runner.sampler, verify.verify) for pair in here]
        own = list[DraftExtendGraph]()
        if kernels is not None and isinstance(drafter, AutoregressiveDrafter):
            own.append(TokenExtendGraph(drafter, kernels, bucket, slots, planes, spare))
        with pool.running(f"{bucket} rows"):
            step.record(pool, verified, own)
        steps[0].append(step)
        steps[1].extend(verified)
        extends += own
        report()
    trees = list[TreeGraph]()
    if tree.is_tree and rows:
        trees, tree_extends, builds = tree_graphs(runner, rows, widths, (context, spare), pool, report)
        extends, proposes = extends + tree_extends, [*proposes, *builds]
    for bucket in drafting:
        assert kernels is not None and isinstance(drafter, AutoregressiveDrafter), "there are buckets for such alone"
        with pool.running(f"drafts of {bucket} rows"), blamed_on_drafter():
            draft = DraftStepGraph(drafter, kernels, bucket, max(chains), slots, planes, spare)
            draft.record(context, pool)
        proposes.append(draft)
        report()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the memory of the eager runs belongs to the pool's stream, and nobody else can have it
    if rows:
        drafts = DraftGraphs(extends, proposes) if extends or proposes else NO_CAPTURED_DRAFTS
        runner.graphs = CapturedSteps([*ordered(steps[1]), *ordered(trees), *ordered(steps[0])], drafts)


def _capture_pieces(
    runner: Runner,
    tokens: Sequence[int],
    beside: Sequence[int],
    context: int,
    pool: GraphPool,
    report: Callable[[], None],
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
        report()
    runner.steps = steps = Piecewise(model, pieces)
    for many in beside:
        with other.running(f"attention of {many} rows"):
            steps.record(many, context, planes, other)
        report()
