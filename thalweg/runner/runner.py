"""A and B, the two halves of every step, on the device stream. A: prepare → forward → logits. B: mask → accept →
observe → propose → publish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.batch.inputs import build_inputs
from thalweg.batch.slots import Slots
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import Output, Row, SamplingNeeds, StepPlan, TokenLogprob
from thalweg.memory.planes import Planes
from thalweg.models.decoder import Model
from thalweg.runner.accepted_path import compact_accepted_path, kv_mover
from thalweg.runner.drafting import NO_CAPTURED_DRAFTS, CapturedDrafts, Drafting, Either
from thalweg.sampling.catalog import sampler_on
from thalweg.sampling.distribution import NO_TOKEN
from thalweg.sampling.sample import Moved, Sampled, Sampler, accept
from thalweg.spec.drafter import NO_DRAFTER, Drafter, DraftExtendInput, DraftOutput, DraftRequest

SCORE_CHUNK = 256  # positions a scoring pass of the head; bounds the logits it materialises


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What A leaves for B: logits, of each emitting row as many as `plan.query`; slots and the slots' integers of the
    emitting rows. scores: row index → log-probabilities of its next tokens. seen: for the drafter. graph: what replayed
    A, where B's recording can follow it.
    """

    plan: StepPlan
    logits_NV: Tensor | None
    slot_E: Tensor
    ints_EI: Tensor
    scores: dict[int, tuple[TokenLogprob, ...]]
    seen: DraftExtendInput | None = None
    graph: StepGraph | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What B leaves on the device. sampled: None where no row emits. proposed: None where nothing was drafted. lost:
    the drafter has failed.
    """

    forwarded: ForwardResult
    sampled: Sampled | None
    proposed: DraftOutput | None = None
    lost: bool = False


class Steps(Protocol):
    """What runs a step's forward: the model itself, or one that was recorded."""

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        """See `models.decoder.Model`."""


class StepGraph(Protocol):
    """A step that was recorded, for a number of tokens that is at least the plan's."""

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor, DraftExtendInput]:
        """Replays A. → logits_NV, slot_E, ints_EI of the emitting rows; and what a drafter sees."""

    def draws(self, plan: StepPlan) -> bool:
        """Whether its B can follow its A of this plan."""

    def sample(self, rows: int, needs: SamplingNeeds, sampler: Sampler) -> Sampled | None:
        """Replays B, of the first `rows`; None where these needs, or drafts accepted by this sampling, were not
        recorded.
        """


class CapturedGraphs(Protocol):
    """What whole steps were recorded."""

    def get(self, plan: StepPlan) -> StepGraph | None: ...

    @property
    def drafts(self) -> CapturedDrafts: ...


class NoCapturedGraphs:
    """Off is a value."""

    drafts = NO_CAPTURED_DRAFTS

    def get(self, plan: StepPlan) -> None:
        return None


class Runner:
    """One model on one device with its planes and slots, which are the drafter's too. steps: what runs its steps, the
    model itself or its recorded ones.
    """

    def __init__(self, model: Model, steps: Steps, planes: Planes, slots: Slots, drafter: Drafter = NO_DRAFTER) -> None:
        self.model, self.steps, self.planes, self.slots = model, steps, planes, slots
        self.drafting = Drafting(drafter, slots, planes)
        self.sampler: Sampler = sampler_on(planes.device)
        self.move = kv_mover(planes, model.planes() if slots.tree.is_tree else ())
        self.graphs: CapturedGraphs = NoCapturedGraphs()
        self.tree_graphs: CapturedGraphs = NoCapturedGraphs()  # of steps whose drafts part ways

    def eager(self) -> None:
        """Runs no recorded step any more: the model was changed in a way that a recording does not follow."""
        self.steps, self.graphs, self.tree_graphs = self.model, NoCapturedGraphs(), NoCapturedGraphs()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardResult | None:
        """A. None for a rank that has no rows in this step."""
        if not plan.rows:
            return None
        self.drafting.leave(plan)
        self.slots.bind(plan.binds)
        self.slots.append(plan.appends)
        self.drafting.bind(plan.binds)
        graph = (self.tree_graphs if self.slots.tree.is_tree_step(plan.sampled_per_row) else self.graphs).get(plan)
        if graph is not None:
            logits_RV, slot_E, ints_EI, seen = graph.forward(plan)
            return ForwardResult(plan, logits_RV, slot_E, ints_EI, {}, seen, graph if graph.draws(plan) else None)
        inputs = build_inputs(plan, self.slots)
        batch = inputs.batch
        hidden_TH = self.steps.forward(batch, self.planes)
        sampled_NH = hidden_TH if inputs.all_sampled else hidden_TH[batch.emit_N]
        logits_NV = self.model.logits(sampled_NH) if len(sampled_NH) else None
        scores, seen = self._scores(plan, hidden_TH), DraftExtendInput(plan, batch, hidden_TH)
        return ForwardResult(plan, logits_NV, inputs.slot_E, inputs.ints_EI, scores, seen)

    @torch.inference_mode()
    def sample(
        self, forwarded: ForwardResult | None, masks: GrammarMasks | None = None, width: int = 0
    ) -> StepResult | None:
        """B. masks: of the rows under a grammar. width: drafts to make for the next step."""
        if forwarded is None:
            return None
        plan, logits_NV, graph, sampled = forwarded.plan, forwarded.logits_NV, forwarded.graph, None
        if logits_NV is not None and len(logits_NV):
            slots, kernels = (self.slots, forwarded.slot_E, forwarded.ints_EI), self.sampler
            recorded = None if graph is None else partial(graph.sample, len(plan.rows), sampler=kernels)
            sampled = accept(logits_NV, *slots, plan.needs, plan.max_kv_len, masks, kernels, recorded)
        asked = None if sampled is None else DraftRequest(forwarded.slot_E, plan.max_kv_len, plan.needs)
        seen = forwarded.seen
        if seen is not None and sampled is not None and sampled.nodes_EQ is not None:
            paths = forwarded.slot_E, forwarded.ints_EI, sampled.nodes_EQ, sampled.count_E
            seen = (
                seen.compacted
                if isinstance(sampled, Moved)
                else compact_accepted_path(seen, *paths, self.slots, self.move)
            )
        drafts = Either((self.tree_graphs.drafts, self.graphs.drafts))
        proposed = self.drafting.draft(seen, asked, width, drafts)
        return StepResult(forwarded, sampled, proposed, self.drafting.lost)

    def _scores(self, plan: StepPlan, hidden_TH: Tensor) -> dict[int, tuple[TokenLogprob, ...]]:
        """Prompt log-probabilities: of the token after each position in [score_from, score_to) of a row."""
        scores, token = {}, 0
        for i, row in enumerate(plan.rows):
            if row.score_from < row.score_to:
                scores[i] = tuple(self._score(row, hidden_TH[token : token + row.n]))
            token += row.n
        return scores

    def _score(self, row: Row, hidden_NH: Tensor) -> list[TokenLogprob]:
        found: list[TokenLogprob] = []
        for start in range(row.score_from, row.score_to, SCORE_CHUNK):
            stop = min(start + SCORE_CHUNK, row.score_to)
            logits_NV = self.model.logits(hidden_NH[start - row.start : stop - row.start])
            next_N = self.slots.tokens_SL[row.slot, start + 1 : stop + 1].to(torch.int64)
            found += _token_logprobs(*self.sampler.logprobs(logits_NV, next_N, row.score_top))
        return found

    def outputs(self, result: StepResult | None) -> tuple[Output, ...]:
        """One Output a row of the plan. Waits for what is still on a device; a drafter that turns out to have computed
        rubbish there is off then.
        """
        if result is None:
            return ()
        if result.proposed is not None and not result.proposed.sound.all():
            self.drafting.rubbish()
            result = replace(result, lost=True)
        return outputs(result)


def outputs(result: StepResult) -> tuple[Output, ...]:
    """One Output a row of the plan."""
    forwarded, sampled, lost = result.forwarded, result.sampled, result.lost
    if sampled is None:
        return tuple(_silent(forwarded.scores.get(i, ()), lost) for i in range(len(forwarded.plan.rows)))
    tokens, count, done = sampled.tokens_EQ.tolist(), sampled.count_E.tolist(), sampled.done_E.tolist()
    found = _token_logprobs(sampled.logprob_N, sampled.top_ids_NK, sampled.top_logprobs_NK)
    drafts = _drafts(result.proposed, len(tokens))
    nodes: list[list[int]] = [] if sampled.nodes_EQ is None else sampled.nodes_EQ.tolist()
    made, e, query = [], 0, len(tokens[0])
    for i, row in enumerate(forwarded.plan.rows):
        scores = forwarded.scores.get(i, ())
        if not row.emit:
            made.append(_silent(scores, lost))
            continue
        n = int(count[e])
        if n and tokens[e][n - 1] == NO_TOKEN or _broken(scores):
            made.append(Output(done=True, drafter_failed=lost, is_nan=True))
            e += 1
            continue
        logprobs = tuple(found[e * query : e * query + n])
        ahead = NOTHING if done[e] else drafts[e]
        path = sum(1 << node - 1 for node in nodes[e][1:n]) if nodes else (1 << max(n - 1, 0)) - 1
        made.append(Output(tuple(tokens[e][:n]), ahead.drafts, done[e], logprobs, scores, lost, ahead.parents, path))
        e += 1
    return tuple(made)


def _silent(scores: tuple[TokenLogprob, ...], lost: bool) -> Output:
    """Of a row that does not emit."""
    return Output(drafter_failed=lost, is_nan=True) if _broken(scores) else Output(scores=scores, drafter_failed=lost)


def _broken(scores: tuple[TokenLogprob, ...]) -> bool:
    """Whether the model computed no numbers somewhere."""
    return any(math.isnan(score.logprob) for score in scores)


class _Drafts(NamedTuple):
    """Of a row, as of `Output`."""

    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


NOTHING = _Drafts()


def _drafts(proposed: DraftOutput | None, rows: int) -> list[_Drafts]:
    if proposed is None:
        return [NOTHING] * rows
    drafts, made = proposed.drafts_EK.tolist(), proposed.made_E.tolist()
    parents = [[]] * rows if proposed.parents_EK is None else proposed.parents_EK.tolist()
    return [_Drafts(tuple(d[:n]), tuple(p[:n])) for d, p, n in zip(drafts, parents, made, strict=True)]


def _token_logprobs(logprob: Tensor | None, ids: Tensor | None, values: Tensor | None) -> list[TokenLogprob]:
    if logprob is None or ids is None or values is None:
        return []
    return [
        TokenLogprob(p, tuple(i), tuple(v))
        for p, i, v in zip(logprob.tolist(), ids.tolist(), values.tolist(), strict=True)
    ]
