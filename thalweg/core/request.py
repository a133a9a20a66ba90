"""A sequence as the brain sees it: one `Request` per sequence, owned and edited by the scheduler alone."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from thalweg.core.drafts import DraftCount
from thalweg.core.grammar import FREE, Grammar
from thalweg.core.keep import WHOLE, Keep
from thalweg.core.plan import Needs, TokenLogprob
from thalweg.core.sampling import SamplingParams
from thalweg.core.ticket import Ticket


class State(enum.Enum):
    QUEUED = "queued"
    LOADING = "loading"  # waits on a ticket: host tier, external store, prefill peer
    RUNNING = "running"
    SENDING = "sending"  # its pages are being copied elsewhere
    DONE = "done"


class Leave(enum.Enum):
    """Why a request is leaving its slot. A mark only: slot and pages come home at its last retirement."""

    STAYS = ""
    PREEMPT = "preempt"
    ABORT = "abort"
    FINISH = "finish"


@dataclass(slots=True, eq=False)
class Request:
    """Host state of one sequence.

    Fixed: uid (its order of arrival), prompt (token ids), params, end (length at which it is full), seed, stop_ids, salt (part of the
    cache key), priority (larger is served first under the priority policy), first (n > 1: the sibling that fills the shared prompt), needs
    (what its emitting rows ask of sampling), keep (what of it stays in the prefix cache after it).
    Committed: out, scores (prompt logprobs, each position once). The rest is bookkeeping of the steps in flight:
    `computed` tokens have their KV launched; `base` = tokens known at bind; `flight` rows in flight, `emits` of them emitting, which
    may bring at most `slack` tokens; `last` = last emitting step and `made` = the width agreed in it. `odds`: how good its drafts were lately, see
    `scheduler.widths`; `drafted`: what became of all of them.
    """

    uid: int
    prompt: tuple[int, ...]
    params: SamplingParams
    end: int
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    salt: int = 0
    priority: int = 0
    masked: bool = False
    send: bool = False
    first: Request | None = None
    needs: Needs = Needs()
    grammar: Grammar = FREE
    keep: Keep = WHOLE

    state: State = State.QUEUED
    leave: Leave = Leave.STAYS
    out: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # of these drafts, see `Output`
    finish: str = ""  # "stop", "length", "abort", "error"; "" while it runs
    stop_id: int = -1  # the stop token id that ended it

    slot: int = -1
    pages: list[int] = field(default_factory=list)
    bound: bool = False
    ticket: Ticket | None = None
    base: int = 0
    computed: int = 0
    cached: int = 0  # prompt tokens that the first admission found in the prefix cache
    preempted: int = 0
    flight: int = 0
    emits: int = 0
    slack: int = 0
    last: int = -1
    made: int = 0
    odds: tuple[float, ...] = ()
    drafted: DraftCount = field(default_factory=DraftCount)

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.out)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.out)

    @property
    def score_from(self) -> int:
        """The first prompt position whose own logprob is wanted; beyond the prompt where none is."""
        return 1 if self.params.prompt_logprobs is not None else 1 << 30
