"""Outputs of the rows of a step, from its tensors on the host."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from thalweg.core.plan import Output, StepPlan, TokenLogprob
from thalweg.sampling.sample import NO_TOKEN, Sampled
from thalweg.spec.drafter import DraftOutput

Scores = tuple[TokenLogprob, ...]


def outputs(
    plan: StepPlan, scores: dict[int, Scores], sampled: Sampled | None, proposed: DraftOutput | None, lost: bool
) -> tuple[Output, ...]:
    """One Output for each row of the plan. lost: the drafter has failed."""
    if sampled is None:
        return tuple(_without_tokens(scores.get(i, ()), lost) for i in range(len(plan.rows)))
    tokens, count, done = sampled.tokens_EQ.tolist(), sampled.count_E.tolist(), sampled.done_E.tolist()
    logprobs = token_logprobs(sampled.logprob_N, sampled.top_ids_NK, sampled.top_logprobs_NK)
    drafts = _row_drafts(proposed, len(tokens))
    nodes: list[list[int]] = [] if sampled.nodes_EQ is None else sampled.nodes_EQ.tolist()
    rows, e, query = [], 0, len(tokens[0])
    for i, row in enumerate(plan.rows):
        own = scores.get(i, ())
        if not row.emit:
            rows.append(_without_tokens(own, lost))
            continue
        n = int(count[e])
        if n and tokens[e][n - 1] == NO_TOKEN or _has_nan(own):
            rows.append(Output(done=True, drafter_failed=lost, is_nan=True))
        else:
            row_drafts = NO_DRAFTS if done[e] else drafts[e]
            path = sum(1 << node - 1 for node in nodes[e][1:n]) if nodes else (1 << max(n - 1, 0)) - 1
            first = e * query
            rows.append(
                Output(
                    tuple(tokens[e][:n]), row_drafts.tokens, done[e], tuple(logprobs[first : first + n]), own, lost,
                    row_drafts.parents, path,
                )
            )  # fmt: skip
        e += 1
    return tuple(rows)


def _without_tokens(scores: Scores, lost: bool) -> Output:
    """Output of a row that does not emit."""
    return Output(drafter_failed=lost, is_nan=True) if _has_nan(scores) else Output(scores=scores, drafter_failed=lost)


def _has_nan(scores: Scores) -> bool:
    return any(math.isnan(score.logprob) for score in scores)


class RowDrafts(NamedTuple):
    """Drafts of a row, see `Output`."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


NO_DRAFTS = RowDrafts()


def _row_drafts(proposed: DraftOutput | None, rows: int) -> list[RowDrafts]:
    if proposed is None:
        return [NO_DRAFTS] * rows
    drafts, counts = proposed.drafts_EK.tolist(), proposed.made_E.tolist()
    parents = [[]] * rows if proposed.parents_EK is None else proposed.parents_EK.tolist()
    return [RowDrafts(tuple(d[:n]), tuple(p[:n])) for d, p, n in zip(drafts, parents, counts, strict=True)]


def token_logprobs(logprob: Tensor | None, ids: Tensor | None, values: Tensor | None) -> list[TokenLogprob]:
    if logprob is None or ids is None or values is None:
        return []
    return [
        TokenLogprob(p, tuple(i), tuple(v))
        for p, i, v in zip(logprob.tolist(), ids.tolist(), values.tolist(), strict=True)
    ]
