"""The sheet on which one step is planned; `StepPlan` is its frozen result."""

from __future__ import annotations

from thalweg.core.plan import Bind, PageAppend, Row, SamplingNeeds, StepPlan
from thalweg.core.request import Request


class Sheet:
    """What a plan has so far. left: tokens of the budget not yet dealt out."""

    __slots__ = ("appends", "asked", "binds", "chunks", "emitting", "grammars", "left", "masked", "reach", "rows")

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.rows: list[Row] = []
        self.binds: list[Bind] = []
        self.appends: list[PageAppend] = []
        self.emitting: list[Request] = []
        self.chunks: list[Request] = []  # they compute prompt tokens in this step
        self.grammars: list[Request] = []  # emitting rows under a grammar
        self.asked: set[SamplingNeeds] = set()
        self.masked = False
        self.reach = 0

    def chunk(self, r: Request, n: int, step: int) -> None:
        """The next n of the tokens that `r` knew when it was admitted."""
        start = r.computed
        if not r.bound:
            self.binds.append(
                Bind(r.slot, r.tokens, len(r.prompt), start, r.end, r.seed, r.stop_ids, r.params, r.salt, r.has_grammar)
            )
            self.appends.append(PageAppend(r.slot, 0, tuple(r.pages)))
            r.bound = True
        emit = start + n == r.base < r.end  # a request for no tokens (its prompt's logprobs) never samples
        self.rows.append(Row(r.uid, r.slot, start, n, 0, emit, *_scored(r, start, n)))
        self.chunks.append(r)
        self.left -= n
        self.reach = max(self.reach, start + n)
        r.computed += n
        r.flight += 1
        if emit:
            self.emit(r, step, 0)

    def emit(self, r: Request, step: int, right: int) -> None:
        """`r` samples in this step: at most 1 + right tokens come of it."""
        if r.has_grammar:
            self.masked |= r.emits > 0  # the mask depends on a token that is not committed yet
            self.grammars.append(r)
        r.emits += 1
        r.slack += 1 + right
        r.last = step
        self.emitting.append(r)
        self.asked.add(r.needs)

    def plan(self, step: int, seen: int, draft: int) -> StepPlan:
        return StepPlan(
            step=step,
            seen=seen,
            rows=tuple(self.rows),
            binds=tuple(self.binds),
            appends=tuple(self.appends),
            waits_for_commit=self.masked,
            num_drafts=draft,
            needs=merge(self.asked),
            max_kv_len=self.reach,
        )


def _scored(r: Request, start: int, n: int) -> tuple[int, int, int]:
    """score_from, score_to and score_top of a row: positions whose next prompt token's logprob is wanted and not yet
    known. In flight are only positions before `start`, and a preempted request waits until it has them, so each comes
    once.
    """
    first = max(start, r.score_from - 1 + len(r.scores))
    last = min(start + n, len(r.prompt) - 1)
    return (first, last, r.params.prompt_logprobs or 0) if first < last else (0, 0, 0)


def merge(asked: set[SamplingNeeds]) -> SamplingNeeds:
    """The least that covers all of them."""
    return SamplingNeeds(
        random=any(n.random for n in asked),
        truncated=any(n.truncated for n in asked),
        penalised=any(n.penalised for n in asked),
        biased=any(n.biased for n in asked),
        logprobs=max((n.logprobs for n in asked), default=-1),
    )
