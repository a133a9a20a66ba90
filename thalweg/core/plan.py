"""The values of a step, in the order in which they flow: `Bind`/`Row` → `StepPlan` → `Output`.

There is one kind of row, "compute n tokens of this slot, the last `drafts` of them unverified; sample at the end or not":
a prefill chunk, a decode and a verification differ in numbers only. The host plans with UPPER BOUNDS while up to `depth`
steps are unknown to it; the truth (lengths, tokens, done) lives in the device's `Slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thalweg.core.sampling import SamplingParams

PAGE = 64  # tokens a page; FlashMLA's and the indexer cache's page (DESIGN §3)
NULL_PAGE = 0  # never leased: padding writes go here


class Bind(NamedTuple):
    """Puts a request into a slot: every device field is rebuilt from these values alone.

    tokens: prompt and committed output; prompt_len of them are the prompt; `computed` of them have KV (a prefix hit).
    end: the length at which the sequence is full. seed: already drawn, never None. stop_ids: EOS and stop token ids.
    """

    slot: int
    tokens: tuple[int, ...]
    prompt_len: int
    computed: int
    end: int
    seed: int
    stop_ids: tuple[int, ...]
    params: SamplingParams
    salt: int = 0
    masked: bool = False


class Row(NamedTuple):
    """Compute n tokens of `slot`, the last `drafts` of them unverified (an upper bound: the true count is in `Slots`).

    start: upper bound of the first computed position (exact for a prefill row). emit: sample at the end.
    score_from, score_to: positions q in [score_from, score_to) of this row whose NEXT token's logprob is wanted
    (prompt logprobs); score_top: how many alternatives with each.
    """

    uid: int
    slot: int
    start: int
    n: int
    drafts: int
    emit: bool
    score_from: int = 0
    score_to: int = 0
    score_top: int = 0


class Needs(NamedTuple):
    """What the emitting rows of a plan ask of sampling, so that B computes nothing nobody asked for."""

    random: bool = False  # some row samples (temperature above 0)
    truncated: bool = False  # some row uses top-k, top-p or min-p
    penalised: bool = False
    biased: bool = False  # a logit bias, or a minimum length (which bans the stop ids for a while)
    logprobs: int = -1  # most alternatives that a row wants; -1 is none, 0 the chosen token's logprob only


class Append(NamedTuple):
    """Pages that a slot's page table gets from entry `at` on. A binding plan gives the whole table, with at = 0."""

    slot: int
    at: int
    pages: tuple[int, ...]


class Shape(NamedTuple):
    """What the DP ranks agree on, and what a graph is keyed by: rows, tokens and `reach`, the longest context in tokens."""

    rows: int
    tokens: int
    reach: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one rank.

    step: its number, common to all ranks. seen: every pipeline stage hears the publishes up to `seen` before `prepare`.
    rows: uniform decode rows first, ragged ones after. masked: some row's grammar mask depends on a token not yet committed.
    draft: the width that B of THIS step is asked to make. reach: upper bound of the longest row's context, in tokens.
    """

    step: int
    seen: int
    rows: tuple[Row, ...] = ()
    binds: tuple[Bind, ...] = ()
    appends: tuple[Append, ...] = ()
    masked: bool = False
    draft: int = 0
    needs: Needs = Needs()
    reach: int = 0

    @property
    def tokens(self) -> int:
        return sum(row.n for row in self.rows)

    @property
    def decodes(self) -> bool:
        """Whether every row computes one token and emits: the commonest step, and the one that recordings are made of."""
        return all(row.n == 1 and row.emit and row.score_from == row.score_to for row in self.rows)

    @property
    def verifies(self) -> bool:
        """Whether every row computes its next token and the drafts behind it, and emits: `decodes`, and more of each row."""
        return all(row.n == 1 + row.drafts and row.emit and row.score_from == row.score_to for row in self.rows)

    @property
    def query(self) -> int:
        """Positions of each emitting row that are sampled: the last one, and before it one for each draft of the row that has most."""
        return 1 + max((row.drafts for row in self.rows if row.emit), default=0)

    @property
    def shape(self) -> Shape:
        return Shape(len(self.rows), self.tokens, self.reach)


class TokenLogprob(NamedTuple):
    """logprob of the token that stands there, and the most likely ones (ids and logprobs, best first)."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def asked(logprobs: tuple[TokenLogprob, ...], top: int) -> tuple[TokenLogprob, ...]:
    """What one row wants of them, -1 being nothing: a step makes as many for each row as its most demanding one asks."""
    if top < 0:
        return ()
    return tuple(TokenLogprob(entry.logprob, entry.top_ids[:top], entry.top_logprobs[:top]) for entry in logprobs)


class Output(NamedTuple):
    """What the device says of one row, one or more steps later.

    tokens: accepted and sampled tokens (empty for a row that does not emit, and for a slot that was done already).
    drafts: proposals for the next step (the grammar of a masked row must walk them); parents: of each of them the node of the tree before it
    (`core.tree`), empty for a chain. path: which drafts of this step were accepted, bit i of draft i. done: the slot has ended.
    logprobs: of the tokens. scores: one entry for each position in [score_from, score_to). lost: the drafter failed in this step, and makes no
    more drafts. broken: the model computed no numbers (NaN) where the next token was to be drawn, or for a score; there are no tokens.
    """

    tokens: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    done: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    lost: bool = False
    parents: tuple[int, ...] = ()
    path: int = 0
    broken: bool = False


class MaskState(NamedTuple):
    """What a grammar needs to build the masks of a row: its committed tokens so far, the last one, and the drafts behind it. parents: see
    `Output`."""

    known: int
    last: int
    drafts: tuple[int, ...]
    parents: tuple[int, ...] = ()
