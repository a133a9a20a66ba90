"""The two halves of every step on the device stream: forward (inputs, model pass, logits), then sample and draft
(masks, acceptance, draft KV, drafts).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from thalweg.batch.inputs import build_inputs, padding_inputs
from thalweg.batch.slots import Slots
from thalweg.core.agreement import SCORE_CHUNK, AgreedStep, Record, agree, record_of
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import Output, Row, StepPlan, TokenLogprob
from thalweg.memory.planes import Planes
from thalweg.models.interface import Model
from thalweg.runner.accepted_path import compact_accepted_path, kv_mover
from thalweg.runner.captured import CapturedStep
from thalweg.runner.draft_graphs import NO_DRAFT_GRAPHS, DraftGraphs
from thalweg.runner.drafting import Drafting
from thalweg.runner.piecewise import Piecewise
from thalweg.sampling.catalog import sampler_on
from thalweg.sampling.sample import NO_TOKEN, Moved, Sampled, Sampler, accept
from thalweg.spec.drafter import NO_DRAFTER, Drafter, DraftExtendInput, DraftOutput, DraftRequest

RowDrafts = tuple[tuple[int, ...], tuple[int, ...]]  # drafts and parents of a row, see `Output`
NO_DRAFTS: RowDrafts = (), ()


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What the first half of a step leaves for the second."""

    plan: StepPlan
    logits_NV: Tensor | None  # `plan.sampled_per_row` rows for each emitting row
    slot_E: Tensor  # of the emitting rows
    ints_EI: Tensor  # the slots' integers of the emitting rows
    scores: dict[int, tuple[TokenLogprob, ...]]  # row index → log-probabilities of its next tokens
    seen: DraftExtendInput | None = None
    graph: CapturedStep | None = None  # the replayed graph, if the second half can be replayed as well
    agreed: AgreedStep | None = None  # with several ranks


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the second half of a step leaves on the device."""

    forwarded: ForwardResult
    sampled: Sampled | None  # None if no row emits
    proposed: DraftOutput | None = None  # None if nothing was drafted
    lost: bool = False  # the drafter has failed


class CapturedSteps:
    """The captured steps of a runner, verifications first, the smallest first; and the captured work of its drafter."""

    def __init__(self, graphs: Sequence[CapturedStep] = (), drafts: DraftGraphs = NO_DRAFT_GRAPHS) -> None:
        self.graphs, self.drafts = sorted(graphs, key=lambda graph: (graph.query == 1, graph.rows)), drafts

    def get(self, plan: StepPlan, agreed: AgreedStep | None = None) -> CapturedStep | None:
        """The first graph that holds the agreed step, or with one rank the plan; None for what was not captured."""
        if not self.graphs:
            return None
        step = agreed or agree([record_of(plan)])
        return next((graph for graph in self.graphs if graph.fits(step)), None)


class Runner:
    """One model on one device, with its planes and slots, which the drafter shares."""

    def __init__(
        self, model: Model, steps: Model | Piecewise, planes: Planes, slots: Slots, drafter: Drafter = NO_DRAFTER
    ) -> None:
        self.model, self.planes, self.slots = model, planes, slots
        self.steps = steps  # runs the model pass: the model itself, or captured parts of it
        self.drafting = Drafting(drafter, slots, planes)
        self.sampler: Sampler = sampler_on(planes.device)
        self.move = kv_mover(planes, model.planes() if slots.tree.is_tree else ())
        self.graphs = CapturedSteps()
        self.digest = 0  # of all passes with several ranks, see `Record`

    def eager(self) -> None:
        """Replays no captured step any more: the model was changed in a way that a capture does not follow."""
        self.steps, self.graphs = self.model, CapturedSteps()

    def record(self, plan: StepPlan, epoch: int = 0) -> Record:
        """What this rank says about its next step."""
        return self.drafting.record(plan, record_of(plan)._replace(epoch=epoch, digest=self.digest))

    @torch.inference_mode()
    def forward(self, plan: StepPlan, agreed: AgreedStep | None = None) -> ForwardResult | None:
        """The first half. agreed: by all ranks; None is one rank, whose own plan decides. The sizes of all passes
        follow from `agreed`: smaller ranks are padded. None for a step without rows on any rank.
        """
        if agreed is not None and agreed.ranks == 1:
            agreed = None
        if not (plan.rows if agreed is None else agreed.tokens):
            return None
        if agreed is not None or not self.drafting.is_off:
            self.drafting.prepare(plan, agreed)
        self.slots.bind(plan.binds)
        self.slots.append(plan.appends)
        if plan.binds and not self.drafting.is_off:
            self.drafting.bind(plan.binds)
        graph = self.graphs.get(plan, agreed)
        if agreed is not None:
            key = tuple(agreed), None if graph is None else graph.key
            self.digest = zlib.crc32(repr(key).encode(), self.digest)
        if graph is not None:
            logits_RV, slot_E, ints_EI, seen = graph.forward(plan)
            replayed = graph if graph.draws(plan) else None
            return ForwardResult(plan, logits_RV, slot_E, ints_EI, {}, seen, replayed, agreed)
        return self._eager_forward(plan, agreed)

    def _eager_forward(self, plan: StepPlan, agreed: AgreedStep | None) -> ForwardResult:
        inputs = build_inputs(plan, self.slots) if plan.rows else padding_inputs(self.slots)
        if agreed is not None:
            inputs = inputs.padded(agreed.tokens)
        hidden_TH = self.steps.forward(inputs.batch, self.planes)
        sampled_NH = hidden_TH if inputs.all_sampled else hidden_TH[inputs.batch.emit_N]
        logits_NV = self._logits(sampled_NH, 0 if agreed is None else agreed.logits)
        scores = self._scores(plan, hidden_TH, agreed)
        seen = DraftExtendInput(plan, inputs.batch, hidden_TH)
        return ForwardResult(plan, logits_NV, inputs.slot_E, inputs.ints_EI, scores, seen, None, agreed)

    @torch.inference_mode()
    def sample(
        self, forwarded: ForwardResult | None, masks: GrammarMasks | None = None, num_drafts: int = 0
    ) -> StepResult | None:
        """The second half. masks: of the rows with a grammar. num_drafts: drafts to make for the next step."""
        if forwarded is None:
            return None
        plan, logits_NV, graph, sampled = forwarded.plan, forwarded.logits_NV, forwarded.graph, None
        if logits_NV is not None and len(logits_NV):
            slots, sampler = (self.slots, forwarded.slot_E, forwarded.ints_EI), self.sampler
            captured = None if graph is None else partial(graph.sample, len(plan.rows), sampler=sampler)
            sampled = accept(logits_NV, *slots, plan.needs, plan.max_kv_len, masks, sampler, captured)
        seen, agreed = forwarded.seen, forwarded.agreed
        if graph is not None and not plan.rows and graph.sample(0, plan.needs, self.sampler) and seen is not None:
            seen = seen.compacted or seen  # an idle rank: the replay makes it padding
        request = None if sampled is None else DraftRequest(forwarded.slot_E, plan.max_kv_len, plan.needs)
        if seen is not None and sampled is not None and sampled.nodes_EQ is not None:
            paths = forwarded.slot_E, forwarded.ints_EI, sampled.nodes_EQ, sampled.count_E
            seen = (
                seen.compacted
                if isinstance(sampled, Moved)
                else compact_accepted_path(seen, *paths, self.slots, self.move)
            )
        if agreed is None and self.drafting.is_off:
            return StepResult(forwarded, sampled, None, self.drafting.lost)
        proposed = self.drafting.draft(seen, request, num_drafts, self.graphs.drafts, agreed)
        return StepResult(forwarded, sampled, proposed, self.drafting.lost)

    def _logits(self, hidden_NH: Tensor, rows: int) -> Tensor | None:
        """Logits of hidden states. rows: of the head pass, if that is more."""
        own = len(hidden_NH)
        if own < rows:
            hidden_NH = torch.cat((hidden_NH, hidden_NH.new_zeros(rows - own, hidden_NH.shape[1])))
        return self.model.logits(hidden_NH)[:own] if len(hidden_NH) else None

    def _scores(
        self, plan: StepPlan, hidden_TH: Tensor, agreed: AgreedStep | None
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """Prompt log-probabilities: of the token after each position in [score_from, score_to) of a row."""
        scores, token, passes = {}, 0, 0
        for i, row in enumerate(plan.rows):
            if row.score_from < row.score_to:
                parts = [
                    self._score(row, hidden_TH[token : token + row.n], start, agreed)
                    for start in range(row.score_from, row.score_to, SCORE_CHUNK)
                ]
                scores[i], passes = tuple(score for part in parts for score in part), passes + len(parts)
            token += row.n
        for _ in range(agreed.score_passes - passes if agreed else 0):
            self._logits(hidden_TH[:0], SCORE_CHUNK)
        return scores

    def _score(self, row: Row, hidden_NH: Tensor, start: int, agreed: AgreedStep | None) -> list[TokenLogprob]:
        stop = min(start + SCORE_CHUNK, row.score_to)
        logits_NV = self._logits(hidden_NH[start - row.start : stop - row.start], SCORE_CHUNK if agreed else 0)
        assert logits_NV is not None, "a chunk has positions"
        next_N = self.slots.tokens_SL[row.slot, start + 1 : stop + 1].to(torch.int64)
        return _token_logprobs(*self.sampler.logprobs(logits_NV, next_N, row.score_top))

    def outputs(self, result: StepResult | None) -> tuple[Output, ...]:
        """One Output for each row of the plan. Waits for what is still on a device. A drafter whose output turns out
        to be NaN is switched off here.
        """
        if result is None:
            return ()
        if result.proposed is not None and not result.proposed.sound.all():
            self.drafting.reject_output()
            result = replace(result, lost=True)
        return _outputs(result)


def _outputs(result: StepResult) -> tuple[Output, ...]:
    forwarded, sampled, lost, outputs, e = result.forwarded, result.sampled, result.lost, list[Output](), 0
    if sampled is not None:
        tokens, count, done = sampled.tokens_EQ.tolist(), sampled.count_E.tolist(), sampled.done_E.tolist()
        logprobs = _token_logprobs(sampled.logprob_N, sampled.top_ids_NK, sampled.top_logprobs_NK)
        nodes: list[list[int]] = [] if sampled.nodes_EQ is None else sampled.nodes_EQ.tolist()
        drafts, query = _row_drafts(result.proposed, len(tokens)), len(tokens[0])
    for i, row in enumerate(forwarded.plan.rows):
        scores, emits, n = forwarded.scores.get(i, ()), row.emit and sampled is not None, 0
        is_nan = any(math.isnan(score.logprob) for score in scores)
        if emits:
            n = int(count[e])
            is_nan = is_nan or n > 0 and tokens[e][n - 1] == NO_TOKEN
        if is_nan:
            outputs.append(Output(done=emits, drafter_failed=lost, is_nan=True))
        elif not emits:
            outputs.append(Output(scores=scores, drafter_failed=lost))
        else:
            proposed, parents = NO_DRAFTS if done[e] else drafts[e]
            path = sum(1 << node - 1 for node in nodes[e][1:n]) if nodes else (1 << max(n - 1, 0)) - 1
            own = tuple(logprobs[e * query : e * query + n])
            outputs.append(Output(tuple(tokens[e][:n]), proposed, done[e], own, scores, lost, parents, path))
        e += emits
    return tuple(outputs)


def _row_drafts(proposed: DraftOutput | None, rows: int) -> list[RowDrafts]:
    if proposed is None:
        return [NO_DRAFTS] * rows
    drafts, counts = proposed.drafts_EK.tolist(), proposed.made_E.tolist()
    parents = [[]] * rows if proposed.parents_EK is None else proposed.parents_EK.tolist()
    return [(tuple(d[:n]), tuple(p[:n])) for d, p, n in zip(drafts, parents, counts, strict=True)]


def _token_logprobs(logprob: Tensor | None, ids: Tensor | None, values: Tensor | None) -> list[TokenLogprob]:
    if logprob is None or ids is None or values is None:
        return []
    rows = zip(logprob.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprob(p, tuple(i), tuple(v)) for p, i, v in rows]
