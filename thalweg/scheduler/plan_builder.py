"""Builds one `StepPlan`, and what decides how many prompt tokens it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from thalweg.core.plan import Bind, PageAppend, Row, SamplingNeeds, StepPlan
from thalweg.core.request import Request


class LatencyTargets(NamedTuple):
    """What the user asked for, in seconds; 0.0: nothing."""

    first_token: float = 0.0  # from the arrival of a request
    between_tokens: float = 0.0  # time of a step with decode rows


class DecodeLoad(NamedTuple):
    """The decode rows of a step."""

    rows: int
    tokens: int
    context: int  # sum of the tokens before the rows


class WaitingPrompt(NamedTuple):
    """A request that has no token yet."""

    tokens: int  # prompt tokens to compute
    start: int  # tokens before them
    seconds: float  # since it came
    is_first: bool  # false for a preempted request that has had its first token


class PromptShare(Protocol):
    """Chooses the prompt tokens of a step."""

    targets: LatencyTargets

    def choose(self, load: DecodeLoad, waiting: Iterable[WaitingPrompt], others: int, most: int) -> int:
        """Prompt tokens beside these decode rows, from 1 to `most`. waiting: the next requests in order. others: so
        many more wait.
        """

    def expect(self, step: int, load: DecodeLoad, tokens: int, pairs: int) -> None:
        """The step was planned with so many prompt tokens; pairs: with tokens before their chunks."""

    def observe(self, step: int, is_busy: bool) -> bool:
        """The step was committed. is_busy: it was in flight, or planned at once, when the step before was committed.

        Returns whether it has missed the target between tokens.
        """


class WholeBudget:
    """Prompts get all that the budget of a step leaves."""

    targets = LatencyTargets()

    def choose(self, load: DecodeLoad, waiting: Iterable[WaitingPrompt], others: int, most: int) -> int:
        return most

    def expect(self, step: int, load: DecodeLoad, tokens: int, pairs: int) -> None:
        return

    def observe(self, step: int, is_busy: bool) -> bool:
        return False


class PlanBuilder:
    """Collects the rows of the next step and their requests."""

    def __init__(self, step: int, published_step: int, budget: int) -> None:
        self.step, self.published_step = step, published_step
        self.tokens_left = budget
        self.decode_tokens = self.decode_context = self.prompt_tokens = self.prompt_pairs = 0
        self.rows: list[Row] = []
        self.binds: list[Bind] = []
        self.appends: list[PageAppend] = []
        self.sampling: list[Request] = []  # requests that sample in this step
        self.prefilling: list[Request] = []  # requests that compute prompt tokens in this step
        self.masked: list[Request] = []  # of `sampling`, those with a grammar
        self.needs: set[SamplingNeeds] = set()
        self.waits_for_commit = False
        self.max_kv_len = 0

    def add_prefill_row(self, r: Request, n: int) -> None:
        """The next `n` of the tokens that `r` had when it was admitted."""
        start = r.num_computed_tokens
        if not r.is_bound:
            self.binds.append(r.bind(start))
            self.appends.append(PageAppend(r.slot, 0, tuple(r.pages)))
            r.is_bound = True
        # a request for no tokens, only for its prompt's log-probabilities, never samples
        samples = start + n == r.prefill_len < r.end
        self.prefilling.append(r)
        self.prompt_tokens, self.prompt_pairs = self.prompt_tokens + n, self.prompt_pairs + n * start
        r.num_computed_tokens += n
        self._add(r, Row(r.uid, r.slot, start, n, 0, samples, *_scored(r, start, n)), start + n)
        if samples:
            self._add_sampling(r, 0)

    def add_decode_row(self, r: Request, start: int, max_accepted: int) -> None:
        """The last known token and its drafts, from the upper bound `start` on."""
        n = 1 + r.num_drafts
        self.decode_tokens, self.decode_context = self.decode_tokens + n, self.decode_context + start
        self._add(r, Row(r.uid, r.slot, start, n, r.num_drafts, True), min(start + n, r.end))
        self._add_sampling(r, max_accepted)

    def _add(self, r: Request, row: Row, kv_len: int) -> None:
        self.rows.append(row)
        self.tokens_left -= row.n
        if kv_len > self.max_kv_len:
            self.max_kv_len = kv_len
        r.rows_in_flight += 1

    def _add_sampling(self, r: Request, max_accepted: int) -> None:
        if r.has_grammar:
            self.waits_for_commit |= r.samples_in_flight > 0  # the mask depends on a token that is not committed yet
            self.masked.append(r)
        r.samples_in_flight += 1
        r.max_tokens_in_flight += 1 + max_accepted
        r.last_sampled = self.step
        self.sampling.append(r)
        self.needs.add(r.needs)

    @property
    def decode_load(self) -> DecodeLoad:
        return DecodeLoad(len(self.rows) - len(self.prefilling), self.decode_tokens, self.decode_context)

    def build(self, num_drafts: int) -> StepPlan:
        return StepPlan(
            step=self.step,
            published_step=self.published_step,
            rows=tuple(self.rows),
            binds=tuple(self.binds),
            appends=tuple(self.appends),
            waits_for_commit=self.waits_for_commit,
            num_drafts=num_drafts,
            needs=SamplingNeeds(*map(max, zip(SamplingNeeds(), *self.needs, strict=True))),
            max_kv_len=self.max_kv_len,
        )


def _scored(r: Request, start: int, n: int) -> tuple[int, int, int]:
    """prompt_logprobs_start, _stop and _top_k of a row. Each position comes once: those in flight are before `start`,
    and a preempted request resumes only when it has their log-probabilities.
    """
    first = max(start, r.prompt_logprobs_start - 1 + len(r.prompt_logprobs))
    last = min(start + n, len(r.prompt) - 1)
    return (first, last, r.params.prompt_logprobs or 0) if first < last else (0, 0, 0)
