"""The values of a step, in the order in which they flow: `Bind` and `Row` → `StepPlan` → `Output`.

There is one kind of row: compute n tokens of a slot, of which the last `num_drafts` are unverified, and sample at the
end or not. A prefill chunk, a decode and a verification differ in numbers only.

The host plans with UPPER BOUNDS, because it does not know the results of up to `depth` steps in flight. The device's
`Slots` have the true lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thalweg.core.sampling import SamplingParams

PAGE = 64  # tokens of a page; also that of FlashMLA and of the indexer cache
NULL_PAGE = 0  # never handed out: padding is written to it


class Bind(NamedTuple):
    """Puts a request into a slot: every device field of the slot is rebuilt from these values."""

    slot: int
    tokens: tuple[int, ...]  # prompt and committed output
    prompt_len: int  # of these tokens, the prompt
    computed: int  # tokens that have KV already (a prefix hit)
    end: int  # length at which the sequence is full
    seed: int  # drawn by the scheduler if the user gave none
    stop_ids: tuple[int, ...]  # end-of-sequence and stop token ids
    params: SamplingParams
    salt: int = 0
    has_grammar: bool = False


class Row(NamedTuple):
    """Compute n tokens of a slot, of which the last `num_drafts` are unverified."""

    uid: int
    slot: int
    start: int  # upper bound of the first computed position; exact for a prefill row
    n: int
    num_drafts: int  # upper bound: the true count is in `Slots`
    samples: bool  # sample at the end
    # prompt log-probabilities: those of the token after each position in [start, stop)
    prompt_logprobs_start: int = 0
    prompt_logprobs_stop: int = 0
    prompt_logprobs_top_k: int = 0  # alternatives to return with each


class SamplingNeeds(NamedTuple):
    """Union of the sampling features that the sampled rows of a plan use."""

    random: bool = False  # some row has a temperature above 0
    truncated: bool = False  # some row uses top-k, top-p or min-p
    penalised: bool = False  # some row has a penalty
    biased: bool = False  # a logit bias, or a minimum length (which bans the stop ids for a while)
    logprobs: int = -1  # most alternatives of a row; 0: the chosen token's log-probability only; -1: none
    num_logprob_ids: int = 0  # most `logprob_token_ids` of a row


class PageAppend(NamedTuple):
    """Pages to write into a slot's page table, from entry `first_entry` on. A plan that binds the slot gives the whole
    table, with first_entry = 0.
    """

    slot: int
    first_entry: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one rank."""

    step: int  # common to all ranks
    # every pipeline stage receives the tokens of the steps up to this one before it builds its inputs
    published_step: int
    rows: tuple[Row, ...] = ()  # decode rows first, all with the same n, then prefill rows
    binds: tuple[Bind, ...] = ()
    appends: tuple[PageAppend, ...] = ()
    waits_for_commit: bool = False  # some row's grammar mask depends on a token that is not committed yet
    # drafts to propose at the end of this step for each sampled row: `row.num_drafts` of its next step
    num_drafts: int = 0
    needs: SamplingNeeds = SamplingNeeds()
    max_kv_len: int = 0  # upper bound of the longest row's context, in tokens

    @property
    def tokens(self) -> int:
        return sum(row.n for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Every row computes one token and samples: the most frequent step, for which CUDA graphs are captured."""
        return all(
            row.n == 1 and row.samples and row.prompt_logprobs_start == row.prompt_logprobs_stop for row in self.rows
        )

    @property
    def sampled_per_row(self) -> int:
        """Positions that are sampled of each sampled row: 1 + the largest number of drafts."""
        return 1 + max((row.num_drafts for row in self.rows if row.samples), default=0)


class TokenLogprob(NamedTuple):
    """Log-probability of a token, and of others: the most likely ones, best first, or those that a request lists."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def requested_logprobs(logprobs: tuple[TokenLogprob, ...], top: int) -> tuple[TokenLogprob, ...]:
    """Cuts the alternatives to the `top` that one row asked for; -1 is none at all. A step computes the most that any
    row asked for.
    """
    if top < 0:
        return ()
    return tuple(TokenLogprob(entry.logprob, entry.top_ids[:top], entry.top_logprobs[:top]) for entry in logprobs)


class Output(NamedTuple):
    """Result of one row, which the host receives one or more steps later."""

    tokens: tuple[int, ...] = ()  # accepted and sampled; () if the row does not sample or its slot has ended
    drafts: tuple[int, ...] = ()  # proposals for the next step
    done: bool = False  # the slot has ended
    logprobs: tuple[TokenLogprob, ...] = ()  # of `tokens`
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # one for each position in [prompt_logprobs_start, _stop)
    drafter_failed: bool = False  # in this step; it proposes no more drafts
    parents: tuple[int, ...] = ()  # tree node before each draft (`core.tree`); () for a chain
    accepted_mask: int = 0  # bit i is set if draft i of this step was accepted
    is_nan: bool = False  # the model computed NaN for the next token or a prompt log-probability; `tokens` is empty


class GrammarState(NamedTuple):
    """What a grammar needs to build the masks of a row."""

    num_tokens: int  # committed
    last_token: int
    drafts: tuple[int, ...]  # proposed after the last token
    parents: tuple[int, ...] = ()  # of the drafts, see `Output`
