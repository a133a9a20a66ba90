"""The two halves of every step on the device stream: forward (inputs, model pass, logits), then sample and draft
(masks, acceptance, draft KV, drafts).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from thalweg.batch.inputs import build_inputs, padding_inputs
from thalweg.batch.slots import Slots
from thalweg.core.agreement import PROMPT_LOGPROBS_CHUNK, AgreedStep, RankStep, coordinate_step, rank_step_of
from thalweg.core.errors import RankLost
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import Output, Row, StepPlan, TokenLogprob
from thalweg.memory.planes import Planes
from thalweg.models.interface import Model
from thalweg.runner.accepted_path import compact_accepted_path, kv_mover
from thalweg.runner.captured import CapturedStep
from thalweg.runner.draft_graphs import NO_DRAFT_GRAPHS, DraftGraphs
from thalweg.runner.drafting import Drafting, DraftsElsewhere
from thalweg.runner.piecewise import Piecewise
from thalweg.runner.publication import Publication
from thalweg.sampling.catalog import sampler_on
from thalweg.sampling.sample import NO_TOKEN, Sampled, Sampler, accept
from thalweg.sampling.sharded import sharded
from thalweg.spec.drafter import NO_DRAFTER, Drafter, DraftExtendInput, DraftOutput, DraftRequest

RowDrafts = tuple[tuple[int, ...], tuple[int, ...]]  # drafts and parents of a row, see `Output`
NO_DRAFTS: RowDrafts = (), ()


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Output of the forward half of a step."""

    plan: StepPlan
    logits_NV: Tensor | None  # `plan.sampled_per_row` positions of each sampled row
    slot_E: Tensor  # slots of the sampled rows
    ints_EI: Tensor  # their slots' integers
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]  # row index → log-probabilities of its next tokens
    draft_input: DraftExtendInput | None = None
    graph: CapturedStep | None = None  # the replayed graph, if the second half can be replayed as well
    agreed: AgreedStep | None = None  # with several ranks


class CapturedSteps:
    """The captured steps of a runner, verifications first, the smallest first; and the captured work of its drafter."""

    def __init__(self, graphs: Sequence[CapturedStep] = (), drafts: DraftGraphs = NO_DRAFT_GRAPHS) -> None:
        self.graphs, self.drafts = sorted(graphs, key=lambda graph: (graph.query == 1, graph.rows)), drafts

    def get(self, plan: StepPlan, agreed: AgreedStep | None = None) -> CapturedStep | None:
        """The first graph that holds the agreed step, or with one rank the plan; None for what was not captured."""
        if not self.graphs:
            return None
        step = agreed or coordinate_step([rank_step_of(plan)])
        return next((graph for graph in self.graphs if graph.fits(step)), None)


class Balancer(Protocol):
    """Moves experts between ranks."""

    def before_step(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        """Fields of `core.messages.Stats`."""


class NoBalancer:
    """Experts stay where they are."""

    def before_step(self) -> None:
        return

    def stats(self) -> dict[str, Any]:
        return {}


class Runner:
    """One model on one device, with its planes and slots, which the drafter shares."""

    def __init__(
        self,
        model: Model,
        forward_model: Model | Piecewise,
        planes: Planes,
        slots: Slots,
        drafter: Drafter = NO_DRAFTER,
    ) -> None:
        self.model, self.planes, self.slots = model, planes, slots
        self.forward_model = forward_model  # the model, or its piecewise graphs
        self.pipe = model.factory.layout.pipe
        self.drafting = Drafting(drafter, slots, planes) if self.pipe.is_last else DraftsElsewhere(slots, planes)
        self.sampler: Sampler = sharded(sampler_on(planes.device), model.shards)
        moved = model.planes() if slots.tree.is_tree else ()
        self.compact_kv = kv_mover(planes, moved, model.factory.layout.dcp)
        self.publication = Publication(self.pipe, slots, self.compact_kv)
        self.graphs = CapturedSteps()
        self.balancer: Balancer = NoBalancer()
        self.failed: Tensor | None = None  # see `kernels.peer_words`, where kernels wait for other ranks
        self.pass_checksum = 0  # of all passes with several ranks, see `RankStep`

    def disable_graphs(self) -> None:
        """Runs every step eagerly from now on: the captured graphs do not follow a change of the model."""
        self.forward_model, self.graphs = self.model, CapturedSteps()

    def rank_step(self, plan: StepPlan, epoch: int = 0) -> RankStep:
        """The sizes of this rank's next step, for `coordinate_step`."""
        return self.drafting.rank_step(plan, rank_step_of(plan)._replace(epoch=epoch, pass_checksum=self.pass_checksum))

    @torch.inference_mode()
    def forward(self, plan: StepPlan, agreed: AgreedStep | None = None) -> ForwardResult | None:
        """The first half. agreed: by all ranks; None is one rank, whose own plan decides. The sizes of all passes
        follow from `agreed`: smaller ranks are padded. None for a step without rows on any rank.
        """
        agreed = None if agreed is not None and agreed.ranks == 1 else agreed
        if not (plan.rows if agreed is None else agreed.tokens):
            return None
        self.publication.before_step(plan.published_step)
        self.balancer.before_step()
        if agreed is not None or not self.drafting.is_off:
            self.drafting.prepare(plan, agreed)
        self.slots.bind(plan.binds)
        self.planes.forget([bind.slot for bind in plan.binds])
        self.slots.append(plan.appends)
        if plan.binds and not self.drafting.is_off:
            self.drafting.bind(plan.binds)
        graph = self.graphs.get(plan, agreed)
        if agreed is not None:
            key = tuple(agreed), None if graph is None else graph.key
            self.pass_checksum = zlib.crc32(repr(key).encode(), self.pass_checksum)
        if graph is not None:
            logits_RV, slot_E, ints_EI, draft_input = graph.forward(plan)
            replayed = graph if graph.can_replay_sampling(plan) else None
            return ForwardResult(plan, logits_RV, slot_E, ints_EI, {}, draft_input, replayed, agreed)
        return self._eager_forward(plan, agreed)

    def _eager_forward(self, plan: StepPlan, agreed: AgreedStep | None) -> ForwardResult:
        inputs = build_inputs(plan, self.slots) if plan.rows else padding_inputs(self.slots)
        if agreed is not None:
            inputs = inputs.padded(agreed.tokens)
        hidden_TH = self.forward_model.forward(inputs.batch, self.planes)
        if not self.pipe.is_last:
            return ForwardResult(plan, None, inputs.slot_E, inputs.ints_EI, {}, agreed=agreed)
        sampled_NH = hidden_TH if inputs.all_sampled else hidden_TH[inputs.batch.logits_indices_N]
        logits_NV = self._logits(sampled_NH, 0 if agreed is None else agreed.logits)
        prompt_logprobs = self._prompt_logprobs(plan, hidden_TH, agreed)
        draft_input = DraftExtendInput(plan, inputs.batch, hidden_TH)
        return ForwardResult(plan, logits_NV, inputs.slot_E, inputs.ints_EI, prompt_logprobs, draft_input, None, agreed)

    @torch.inference_mode()
    def sample(self, forwarded: ForwardResult | None, masks: GrammarMasks | None = None) -> Sampled | None:
        """The second half. masks: of the rows with a grammar. None if no row samples, or another stage does."""
        if not self.pipe.is_last or forwarded is None or forwarded.logits_NV is None or not len(forwarded.logits_NV):
            return None
        plan, graph, sampler = forwarded.plan, forwarded.graph, self.sampler
        captured = None if graph is None else partial(graph.sample, len(plan.rows), sampler=sampler)
        slots = self.slots, forwarded.slot_E, forwarded.ints_EI
        return accept(forwarded.logits_NV, *slots, plan.needs, plan.max_kv_len, masks, sampler, captured)

    @torch.inference_mode()
    def draft(self, forwarded: ForwardResult | None, sampled: Sampled | None, num_drafts: int) -> DraftOutput | None:
        """After `sample`: moves the KV of accepted drafts, extends the drafter, proposes drafts for the next step, and
        tells other pipeline stages. None if nothing was drafted.
        """
        if forwarded is None:
            return None
        drafted = self._draft(forwarded, sampled, num_drafts)
        self.publication.after_step(forwarded.plan, num_drafts, sampled)
        return drafted

    def _draft(self, forwarded: ForwardResult, sampled: Sampled | None, num_drafts: int) -> DraftOutput | None:
        draft_input, request, agreed = self._draft_input(forwarded, sampled), None, forwarded.agreed
        if agreed is None and self.drafting.is_off:
            return None
        if sampled is not None:
            request = DraftRequest(forwarded.slot_E, forwarded.plan.max_kv_len, forwarded.plan.needs)
        return self.drafting.draft(draft_input, request, num_drafts, self.graphs.drafts, agreed)

    def _draft_input(self, forwarded: ForwardResult, sampled: Sampled | None) -> DraftExtendInput | None:
        """Of the accepted tokens alone."""
        plan, graph, draft_input = forwarded.plan, forwarded.graph, forwarded.draft_input
        if draft_input is None:
            return None
        if sampled is None:  # on an idle rank the replay makes it padding
            is_idle = graph is not None and not plan.rows and graph.sample(0, plan.needs, self.sampler)
            return draft_input.compacted or draft_input if is_idle else draft_input
        if sampled.nodes_EQ is None or sampled.kv_is_compacted:
            return draft_input if sampled.nodes_EQ is None else draft_input.compacted
        paths = forwarded.slot_E, forwarded.ints_EI, sampled.nodes_EQ, sampled.count_E
        return compact_accepted_path(draft_input, *paths, self.slots, self.compact_kv)

    def _logits(self, hidden_NH: Tensor, rows: int) -> Tensor | None:
        """This rank's logits of hidden states. rows: of the head pass, if that is more."""
        if (own := len(hidden_NH)) < rows:
            hidden_NH = torch.cat((hidden_NH, hidden_NH.new_zeros(rows - own, hidden_NH.shape[1])))
        return self.model.shard_logits(hidden_NH)[:own] if len(hidden_NH) else None

    def _prompt_logprobs(
        self, plan: StepPlan, hidden_TH: Tensor, agreed: AgreedStep | None
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """Prompt log-probabilities: those of the tokens after the positions [start, stop) of a row."""
        prompt_logprobs, token, passes = {}, 0, 0
        for i, row in enumerate(plan.rows):
            if row.prompt_logprobs_start < row.prompt_logprobs_stop:
                parts = [
                    self._prompt_logprobs_chunk(row, hidden_TH[token : token + row.n], start, agreed)
                    for start in range(row.prompt_logprobs_start, row.prompt_logprobs_stop, PROMPT_LOGPROBS_CHUNK)
                ]
                prompt_logprobs[i], passes = tuple(entry for part in parts for entry in part), passes + len(parts)
            token += row.n
        for _ in range(agreed.prompt_logprobs_passes - passes if agreed else 0):
            self._logits(hidden_TH[:0], PROMPT_LOGPROBS_CHUNK)
        return prompt_logprobs

    def _prompt_logprobs_chunk(
        self, row: Row, hidden_NH: Tensor, start: int, agreed: AgreedStep | None
    ) -> list[TokenLogprob]:
        stop, padded = (
            min(start + PROMPT_LOGPROBS_CHUNK, row.prompt_logprobs_stop),
            PROMPT_LOGPROBS_CHUNK if agreed else 0,
        )
        logits_NV = self._logits(hidden_NH[start - row.start : stop - row.start], padded)
        assert logits_NV is not None, "a chunk has positions"
        next_N = self.slots.tokens_SL[row.slot, start + 1 : stop + 1].to(torch.int64)
        return _token_logprobs(*self.sampler.logprobs(logits_NV, next_N, row.prompt_logprobs_top_k))

    def raise_if_lost(self) -> None:
        """Raises RankLost if a kernel of this device has given up waiting for another rank: its results are invalid."""
        if self.failed is not None and self.failed.item():
            raise RankLost("a kernel gave up waiting for another rank")

    def outputs(self, forwarded: ForwardResult | None, sampled: Sampled | None) -> tuple[Output, ...]:
        """One Output for each row of the plan, without drafts. Waits for what is still on a device."""
        if forwarded is None:
            return ()
        self.raise_if_lost()
        outputs, e = list[Output](), 0
        if sampled is not None:
            tokens, count, done = sampled.tokens_EQ.tolist(), sampled.count_E.tolist(), sampled.done_E.tolist()
            num_listed = forwarded.plan.needs.num_logprob_ids
            logprobs = _token_logprobs(sampled.logprob_N, sampled.top_ids_NK, sampled.top_logprobs_NK, num_listed)
            nodes: list[list[int]] = [] if sampled.nodes_EQ is None else sampled.nodes_EQ.tolist()
            query = len(tokens[0])
        for i, row in enumerate(forwarded.plan.rows):
            is_sampled, n, prompt_logprobs = (
                row.samples and sampled is not None,
                0,
                forwarded.prompt_logprobs.get(i, ()),
            )
            is_nan = any(math.isnan(entry.logprob) for entry in prompt_logprobs)
            if is_sampled:
                n = int(count[e])
                is_nan = is_nan or n > 0 and tokens[e][n - 1] == NO_TOKEN
            if is_nan:
                outputs.append(Output(done=is_sampled, is_nan=True))
            elif not is_sampled:
                outputs.append(Output(prompt_logprobs=prompt_logprobs))
            else:
                path = sum(1 << node - 1 for node in nodes[e][1:n]) if nodes else (1 << max(n - 1, 0)) - 1
                own = tuple(logprobs[e * query : e * query + n])
                outputs.append(Output(tuple(tokens[e][:n]), (), done[e], own, prompt_logprobs, accepted_mask=path))
            e += is_sampled
        return tuple(outputs)

    def add_drafts(self, plan: StepPlan, outputs: Sequence[Output], drafted: DraftOutput | None) -> Sequence[Output]:
        """The outputs with the drafts of their rows, and whether the drafter has failed. A drafter whose output turns
        out to be NaN is switched off here.
        """
        if drafted is not None and not drafted.is_valid.all():
            self.drafting.reject_output()
        failed = self.drafting.has_failed
        if drafted is None and not failed:
            return outputs
        sampled = iter([] if drafted is None else _row_drafts(drafted))
        made = (next(sampled, NO_DRAFTS) if row.samples else NO_DRAFTS for row in plan.rows)
        rows = ((o, NO_DRAFTS if o.done else drafts) for o, drafts in zip(outputs, made, strict=True))
        return [output._replace(drafts=d, parents=p, drafter_failed=failed) for output, (d, p) in rows]


def _row_drafts(drafted: DraftOutput) -> list[RowDrafts]:
    drafts, counts = drafted.drafts_EK.tolist(), drafted.num_drafts_E.tolist()
    parents = [[]] * len(drafts) if drafted.parents_EK is None else drafted.parents_EK.tolist()
    return [(tuple(d[:n]), tuple(p[:n])) for d, p, n in zip(drafts, parents, counts, strict=True)]


def _token_logprobs(
    logprob: Tensor | None, ids: Tensor | None, values: Tensor | None, num_listed: int = 0
) -> list[TokenLogprob]:
    """num_listed: so many ids of each row come first, padded with -1. A row that has any keeps only those."""
    if logprob is None or ids is None or values is None:
        return []
    rows, made = zip(logprob.tolist(), ids.tolist(), values.tolist(), strict=True), []
    for own, row_ids, row_values in rows:
        count = sum(i >= 0 for i in row_ids[:num_listed])
        kept = slice(count) if count else slice(num_listed, None)
        made.append(TokenLogprob(own, tuple(row_ids[kept]), tuple(row_values[kept])))
    return made
