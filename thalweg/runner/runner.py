"""A and B, the two halves of every step, on the device stream. A: prepare → forward → logits. B: accept → publish."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.batch.prepare import prepare
from thalweg.batch.slots import Slots
from thalweg.core.grammar import Masks
from thalweg.core.plan import Needs, Output, Row, StepPlan, TokenLogprob
from thalweg.memory.planes import Planes
from thalweg.models.base import Model
from thalweg.sampling.catalog import sampling_on
from thalweg.sampling.sample import Sampled, accept

SCORE_CHUNK = 256  # positions a scoring pass of the head; bounds the logits it materialises


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What A leaves for B: logits, slots and the slots' integers of the emitting rows. scores: row index → log-probabilities of its next
    tokens. graph: what replayed A, where B's recording can follow it."""

    plan: StepPlan
    logits_EV: Tensor | None
    slot_E: Tensor
    ints_EI: Tensor
    scores: dict[int, tuple[TokenLogprob, ...]]
    graph: StepGraph | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """What B leaves on the device. sampled: None where no row emits."""

    forwarded: Forwarded
    sampled: Sampled | None


class Steps(Protocol):
    """What runs a step's forward: the model itself, or one that was recorded."""

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        """See `models.base.Model`."""


class StepGraph(Protocol):
    """A step that was recorded, for a number of tokens that is at least the plan's."""

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Replays A. → logits_EV, slot_E, ints_EI of the emitting rows."""

    def sample(self, rows: int, needs: Needs) -> Sampled | None:
        """Replays B, of the first `rows`; None where these needs were not recorded."""


class Graphs(Protocol):
    """What whole steps were recorded."""

    def get(self, plan: StepPlan) -> StepGraph | None: ...


class NoGraphs:
    """Off is a value."""

    def get(self, plan: StepPlan) -> None:
        return None


class Runner:
    """One model on one device with its planes and slots. steps: what runs its steps, the model itself or its recorded ones."""

    def __init__(self, model: Model, steps: Steps, planes: Planes, slots: Slots) -> None:
        self.model, self.steps, self.planes, self.slots = model, steps, planes, slots
        self.sampling = sampling_on(planes.device)
        self.graphs: Graphs = NoGraphs()

    def eager(self) -> None:
        """Runs no recorded step any more: the model was changed in a way that a recording does not follow."""
        self.steps, self.graphs = self.model, NoGraphs()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded | None:
        """A. None for a rank that has no rows in this step."""
        if not plan.rows:
            return None
        self.slots.bind(plan.binds)
        self.slots.append(plan.appends)
        graph = self.graphs.get(plan)
        if graph is not None:
            return Forwarded(plan, *graph.forward(plan), {}, graph if plan.decodes else None)
        prepared = prepare(plan, self.slots)
        batch = prepared.batch
        hidden_TH = self.steps.forward(batch, self.planes)
        emits = batch.emit_E.shape[0]
        logits_EV = None
        if emits:
            logits_EV = self.model.logits(hidden_TH if emits == len(hidden_TH) else hidden_TH[batch.emit_E])
        return Forwarded(plan, logits_EV, prepared.slot_E, prepared.ints_EI, self._scores(plan, hidden_TH))

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded | None, masks: Masks | None = None) -> Published | None:
        """B. masks: of the rows under a grammar."""
        if forwarded is None:
            return None
        plan, logits_EV, graph = forwarded.plan, forwarded.logits_EV, forwarded.graph
        if logits_EV is None or not len(logits_EV):
            return Published(forwarded, None)
        slots, kernels = (self.slots, forwarded.slot_E, forwarded.ints_EI), self.sampling
        recorded = None if graph is None else partial(graph.sample, len(plan.rows))
        sampled = accept(logits_EV, *slots, plan.needs, plan.reach, masks, kernels, recorded)
        return Published(forwarded, sampled)

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
            found += _token_logprobs(*self.sampling.logprobs(logits_NV, next_N, row.score_top))
        return found


def outputs(published: Published | None) -> tuple[Output, ...]:
    """One Output a row of the plan. Waits for what is still on a device."""
    if published is None:
        return ()
    forwarded, sampled = published.forwarded, published.sampled
    tokens: list[int] = []
    done: list[bool] = []
    live: list[bool] = []
    found: list[TokenLogprob] = []
    if sampled is not None:
        tokens, done, live = sampled.tokens_E.tolist(), sampled.done_E.tolist(), sampled.live_E.tolist()
        found = _token_logprobs(sampled.logprob_E, sampled.top_ids_EK, sampled.top_logprobs_EK)
    made, e = [], 0
    for i, row in enumerate(forwarded.plan.rows):
        scores = forwarded.scores.get(i, ())
        if not row.emit:
            made.append(Output(scores=scores))
            continue
        if live[e]:
            made.append(Output((tokens[e],), (), done[e], tuple(found[e : e + 1]), scores))
        else:
            made.append(Output(done=True, scores=scores))
        e += 1
    return tuple(made)


def _token_logprobs(logprob: Tensor | None, ids: Tensor | None, values: Tensor | None) -> list[TokenLogprob]:
    if logprob is None or ids is None or values is None:
        return []
    return [
        TokenLogprob(p, tuple(i), tuple(v))
        for p, i, v in zip(logprob.tolist(), ids.tolist(), values.tolist(), strict=True)
    ]
