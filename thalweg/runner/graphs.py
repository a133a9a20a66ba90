"""Captures what a runner replays: whole steps, the pieces of other steps, and the work of a drafter.

All graphs share one memory pool; the largest is captured first, so that the others fit into what it took.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from thalweg.batch.inputs import sampled_tokens
from thalweg.batch.slots import upload
from thalweg.core.agreement import AgreedStep
from thalweg.core.plan import SamplingNeeds, StepPlan
from thalweg.kernels.draft_state.ref import DraftRows
from thalweg.models.one_of_each import one_layer_of_each_kind
from thalweg.runner.captured import (
    CaptureContext,
    CapturedPass,
    CapturedStep,
    CompactedPaths,
    VerifyStep,
    chain_shapes,
    halving,
    tree_shapes,
)
from thalweg.runner.draft_graphs import DraftExtendGraph, DraftGraph, DraftGraphs, DraftStepGraph, TreeBuildGraph
from thalweg.runner.drafting import raise_as_drafter_error
from thalweg.runner.graph_pool import MAX_CAPTURED_ROWS, GraphPool
from thalweg.runner.piecewise import Piecewise, PiecewiseGraph
from thalweg.runner.ragged_graphs import ragged_graphs
from thalweg.runner.runner import CapturedSteps, Runner
from thalweg.runner.step_buffers import StepBuffers
from thalweg.sampling.sample import Sampled
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.drafter import DraftExtendInput
from thalweg.spec.tree import TreeDrafter

Progress = Callable[[int, int], None]  # captured buckets, of how many


class TokenStep(CapturedStep):
    """A step each of whose tokens becomes a row of the pass; its draws are those of decode rows."""

    kind = "tokens"

    def __init__(self, captured_pass: CapturedPass, mixed: bool) -> None:
        """mixed: there may be prompt tokens, too."""
        super().__init__(captured_pass, captured_pass.rows, 1)
        self.mixed, device = mixed, captured_pass.slot_R.device
        # outside the pool, whose memory the next replay may write while these are still being copied to the host
        self.out = Sampled(
            torch.zeros(captured_pass.rows, 1, dtype=torch.int64, device=device),
            torch.zeros(captured_pass.rows, dtype=torch.bool, device=device),
            torch.zeros(captured_pass.rows, dtype=torch.bool, device=device),
        )

    def _sample_tokens(self, needs: SamplingNeeds) -> None:
        captured_pass, context = self.captured_pass, self.captured_pass.context
        rows = captured_pass.slot_R, captured_pass.step.ints_TI
        context.sampler.sample_into_slots(captured_pass.logits_TV, context.slots, *rows, needs, self.out)

    def _sampled(self, rows: int) -> Sampled:
        return Sampled(self.out.tokens_EQ[:rows], self.out.count_E[:rows], self.out.done_E[:rows])

    def fits(self, step: AgreedStep) -> bool:
        is_known = step.is_verify or self.mixed and not step.prompt_logprobs_passes
        is_tree = self.captured_pass.context.slots.tree.is_tree_step(step.sampled_per_row)
        return is_known and not is_tree and step.tokens <= self.rows

    def can_replay_sampling(self, plan: StepPlan) -> bool:
        return plan.is_decode

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        captured_pass, rows, tokens = self.captured_pass, plan.rows, plan.tokens
        captured_pass.run(
            [row.slot for row in rows for _ in range(row.n)], [ahead for row in rows for ahead in range(row.n)]
        )
        draft_input, ints_TI = (
            DraftExtendInput(plan, captured_pass.batch, captured_pass.hidden_TX),
            captured_pass.step.ints_TI,
        )
        if plan.is_decode:
            return captured_pass.logits_TV[:tokens], captured_pass.slot_R[:tokens], ints_TI[:tokens], draft_input
        first, device = [0, *accumulate(row.n for row in rows)], captured_pass.slot_R.device
        unsampled = [(row.slot, row.n) for row in rows if not row.samples]
        if unsampled:  # prefill chunks that do not sample advance `num_computed`
            slot_C, n_C = upload(list(zip(*unsampled, strict=True)), torch.int64, device)
            captured_pass.context.slots.num_computed.index_add_(0, slot_C, n_C)
        sampled_N = sampled_tokens(plan, device)
        first_E = upload([at for at, row in zip(first, rows, strict=False) if row.samples], torch.int64, device)
        return captured_pass.logits_TV[sampled_N], captured_pass.slot_R[first_E], ints_TI[first_E], draft_input


class Capture:
    """The whole steps of a runner and the work of its drafter, as they are captured."""

    def __init__(self, runner: Runner, context: int, spare: int, pool: GraphPool, has_drafts: bool) -> None:
        """context: the longest, in tokens. spare: a slot that no request gets. has_drafts: rows may have drafts."""
        drafter, self.pool, self.has_drafts = runner.drafting.drafter, pool, has_drafts
        self.drafter = drafter if isinstance(drafter, AutoregressiveDrafter) else None
        attends = self.drafter is not None and self.drafter.head.attends
        model = runner.model
        self.context = CaptureContext(
            model, one_layer_of_each_kind(model), runner.planes, runner.slots, runner.sampler, runner.compact_kv,
            attends, context, spare, runner.pipe.is_last,
        )  # fmt: skip
        self.steps, self.extends, self.proposes = list[CapturedStep](), list[DraftExtendGraph](), list[DraftGraph]()

    def tokens(self, tokens: int, mixed: bool, chains: Sequence[tuple[int, int]], extends: bool) -> None:
        """Steps of so many single tokens. chains: rows and tokens of a row of the verifications that they can be.
        extends: whether the drafter's extension is captured, too.
        """
        with self.pool.running(f"{tokens} rows"):
            captured_pass = CapturedPass(self.context, tokens, shares_slots=mixed or self.has_drafts)
            captured_pass.capture(self.pool)
            self._step(TokenStep(captured_pass, mixed))
            with raise_as_drafter_error():
                for chain in chains:
                    self._step(VerifyStep(captured_pass, *chain))
                if extends:
                    self._extend(captured_pass)
            captured_pass.release_pool_memory()

    def trees(self, rows: int, query: int) -> None:
        """Verifications of trees of so many nodes with the root, and what the drafter does after them."""
        with self.pool.running(f"{rows} trees of {query - 1} drafts"), raise_as_drafter_error():
            captured_pass = CapturedPass(self.context, rows, query, is_tree=True)
            captured_pass.capture(self.pool)
            step = VerifyStep(captured_pass, rows, query)
            self._step(step)
            captured_pass.release_pool_memory()
            if step.compacted is not None and self.drafter is not None:
                n_R = torch.full_like(captured_pass.slot_R, step.compacted.deepest)
                first_R = n_R * torch.arange(rows, device=n_R.device)
                self._extend(step.compacted, DraftRows(captured_pass.slot_R, n_R, first_R))
            if isinstance(self.drafter, TreeDrafter) and self.context.slots.tree.dynamic:
                self._propose(TreeBuildGraph(self.drafter, self.context, rows, query - 1))

    def drafts(self, rows: int, num_drafts: int) -> None:
        """Up to `num_drafts` drafts of a chain."""
        assert self.drafter is not None, "only drafters of one head are captured"
        with self.pool.running(f"drafts of {rows} rows"), raise_as_drafter_error():
            self._propose(DraftStepGraph(self.drafter, self.context, rows, num_drafts))

    def pieces(self, runner: Runner, tokens: Sequence[int], beside: Sequence[int], report: Callable[[], None]) -> None:
        """Steps of so many tokens in pieces and with their attention, beside which there may be so many decode rows."""
        model, thin, planes = self.context.model, self.context.thin_model, self.context.planes
        ranks, pieces, other = model.factory.layout.cp, list[PiecewiseGraph](), GraphPool()
        shared = StepBuffers(max(tokens), planes.device, ranks, model.border_topk)
        for many in sorted(tokens, reverse=True):
            pieces.append(PiecewiseGraph(many, model, shared))
            with self.pool.running(f"{many} tokens"):
                pieces[-1].capture(planes, self.context.max_kv_len, self.pool, thin)
            report()
        decode, context = max(beside, default=0), self.context.max_kv_len
        # a division of tokens is made on the host
        ragged = ragged_graphs(model, planes, tokens if ranks.size == 1 else (), decode, context, shared)
        for one in ragged:
            with self.pool.running(f"{one.tokens} tokens with their attention"):
                one.capture(planes, self.pool, thin)
        runner.forward_model = steps = Piecewise(model, pieces, ragged)
        for many in beside:
            with other.running(f"attention of {many} rows"):
                steps.capture(many, self.context.max_kv_len, planes, other)
            report()

    def _step(self, step: CapturedStep) -> None:
        step.capture(self.pool)
        self.steps.append(step)

    def _extend(self, step: CapturedPass | CompactedPaths, rows: DraftRows | None = None) -> None:
        assert self.drafter is not None, "only drafters of one head are captured"
        self.extends.append(DraftExtendGraph(self.drafter, self.context, step, rows))
        self.extends[-1].capture(self.pool)

    def _propose(self, graph: DraftGraph) -> None:
        graph.capture(self.pool)
        self.proposes.append(graph)

    def captured(self) -> CapturedSteps:
        return CapturedSteps(self.steps, DraftGraphs(self.extends, self.proposes))


@torch.inference_mode()
def capture_steps(
    runner: Runner,
    rows: Sequence[int],
    tokens: Sequence[int],
    mixed: bool,
    context: int,
    spare: int,
    progress: Progress,
    draft_counts: Sequence[int] = (),
) -> None:
    """Captures whole steps for these numbers of rows, and the static parts of other steps for these numbers of tokens;
    the runner replays them from now on. mixed: whole steps may have prompt tokens, too. context, spare: as of
    `Capture`. draft_counts: numbers of drafts that the rows of a step may have. Raises UnsupportedConfig, and
    DrafterError if only the drafter's part fails.
    """
    capture = Capture(runner, context, spare, GraphPool(), bool(draft_counts))
    done, tree = itertools.count(1), runner.slots.tree
    # context-parallel ranks exchange what all tokens store at once, and not decode rows alone
    has_beside = tokens and runner.model.factory.layout.cp.size == 1
    beside = halving([bucket for bucket in rows if bucket <= max(tokens)]) if has_beside else []
    chain_counts = [num_drafts for num_drafts in draft_counts if rows and not tree.is_tree_step(1 + num_drafts)]
    has_drafts = bool(chain_counts) and capture.drafter is not None
    chains = chain_shapes(rows, chain_counts) if chain_counts else []
    trees, drafting = (
        tree_shapes(rows, draft_counts, tree, spare),
        halving([min(n, MAX_CAPTURED_ROWS) for n in rows]) if has_drafts else [],
    )
    count = len(rows) + len(tokens) + len(beside) + len(drafting) + len(trees)

    def report() -> None:
        progress(next(done), count)

    if tokens:
        capture.pieces(runner, tokens, beside, report)
    for bucket in sorted(rows, reverse=True):
        here = [(many, query) for many, query in chains if bucket == min(n for n in rows if n >= many * query)]
        capture.tokens(bucket, mixed, here, has_drafts)
        report()
    for shape in trees:
        capture.trees(*shape)
        report()
    for bucket in drafting:
        capture.drafts(bucket, max(chain_counts))
        report()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the memory of the eager runs belongs to the pool's stream, and nobody else can have it
    if rows:
        runner.graphs = capture.captured()
