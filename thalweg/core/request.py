"""State of one sequence in the scheduler, which alone changes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from thalweg.core.acceptance import AcceptanceCounter
from thalweg.core.errors import ContextOverflow, InvalidRequest
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.plan import Bind, SamplingNeeds, TokenLogprob
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.core.ticket import Ticket


class RequestState(enum.Enum):
    QUEUED = "queued"
    LOADING = "loading"  # waits on a ticket: host tier, external store, prefill peer
    RUNNING = "running"
    SENDING = "sending"  # its pages are being copied elsewhere
    DONE = "done"


class ReleaseReason(enum.Enum):
    """Why a request releases its slot. This is a mark: slot and pages are released when its last step in flight
    retires.
    """

    NONE = ""
    PREEMPT = "preempt"
    ABORT = "abort"
    FINISH = "finish"


@dataclass(slots=True, eq=False)
class Request:
    """Host state of one sequence."""

    # fixed
    uid: int  # increases in order of arrival
    prompt: tuple[int, ...]  # token ids
    params: SamplingParams
    end: int  # length in tokens at which the sequence is full
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    salt: int = 0  # part of the prefix cache's key
    priority: int = 0  # under the priority policy larger values are served first
    send: bool = False  # its pages are copied to the tier when it has finished
    sibling: Request | None = None  # for n > 1: the request that computes the shared prompt, until it has done so
    needs: SamplingNeeds = SamplingNeeds()
    has_grammar: bool = False  # a grammar constrains its next tokens
    grammar: Grammar = NO_GRAMMAR
    retention: CacheRetention = RETAIN_ALL
    arrived: float = 0.0  # by the scheduler's clock

    # committed
    state: RequestState = RequestState.QUEUED
    release_reason: ReleaseReason = ReleaseReason.NONE
    output_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # each position once
    drafts: tuple[int, ...] = ()  # proposed by the last committed step that sampled
    parents: tuple[int, ...] = ()  # of these drafts, see `Output`
    finish: str = ""  # "stop", "length", "abort", "error"; "" while it runs
    stop_id: int = -1  # the stop token id that ended it

    # slot and pages
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    is_bound: bool = False  # a plan has put the request into its slot
    ticket: Ticket | None = None
    prefill_len: int = 0  # known tokens when it was admitted: the tokens to prefill
    num_computed_tokens: int = 0  # tokens whose KV has been launched
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache
    preempted: int = 0  # number of preemptions
    bypass_count: int = 0  # later requests that were admitted because this one did not fit

    # steps in flight
    rows_in_flight: int = 0  # rows in flight
    samples_in_flight: int = 0  # of these, rows that sample
    max_tokens_in_flight: int = 0  # most tokens that these rows may yield
    last_sampled: int = -1  # last step in which it sampled
    num_drafts: int = 0  # drafts that this step was asked to propose
    acceptance_rates: tuple[float, ...] = ()  # of its recent drafts, see `scheduler.draft_length`
    acceptance: AcceptanceCounter | None = None  # of its drafts; None before the first verification

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output_ids)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output_ids)

    @property
    def prompt_logprobs_start(self) -> int:
        """First prompt position whose own log-probability is wanted; beyond the prompt if none is."""
        return 1 if self.params.prompt_logprobs is not None else 1 << 30

    def bind(self, computed: int) -> Bind:
        """Puts the request into its slot. computed: tokens that have KV already."""
        return Bind(
            self.slot,
            self.tokens,
            len(self.prompt),
            computed,
            self.end,
            self.seed,
            self.stop_ids,
            self.params,
            self.salt,
            self.has_grammar,
        )


def check_request(
    prompt: Sequence[int], params: SamplingParams, context: int, vocab: int, grammar: Grammar = NO_GRAMMAR
) -> None:
    """The check of every request. context: longest sequence, prompt and output together, in tokens.

    Raises InvalidRequest that names the first wrong field.
    """
    if not prompt:
        raise InvalidRequest("prompt", "is empty: at least one token is needed")
    longest = context if params.max_tokens == 0 else context - 1
    if len(prompt) > longest:
        room = "" if len(prompt) > context else ", which leaves no room for output"
        raise ContextOverflow("prompt", context, f"{len(prompt)} tokens", room)
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocab:
            raise InvalidRequest("prompt", f"token id {token} is out of vocabulary, which has {vocab}")
    params.check(vocab)
    if grammar.masks:
        grammar.check(params, vocab)
