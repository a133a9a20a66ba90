"""Messages between a front (HTTP server or `LLM`) and the engine process: msgspec structs, msgpack on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.plan import PAGE, TokenLogprob
from thalweg.core.report import Report
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams

# ---- front → engine


class Submit(msgspec.Struct, tag=True, frozen=True):
    """One sequence to compute."""

    uid: int  # drawn by the front, increasing
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: int = 0
    sibling: int = -1  # for n > 1: uid of the sequence that computes the shared prompt, or -1
    grammar: Grammar = NO_GRAMMAR
    retention: CacheRetention = RETAIN_ALL


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends these sequences in whatever state they are. A `TokenDelta` with finish "abort" answers each that had not
    ended.
    """

    uids: tuple[int, ...]


class FlushCache(msgspec.Struct, tag=True, frozen=True):
    """Empties the prefix cache; running requests keep their pages. A `ControlReply` with the same id answers."""

    id: int


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Replaces weights between two steps; running requests continue with the new ones. A `ControlReply` with the same
    id answers.
    """

    id: int
    path: str  # folder with the tensors to replace, some or all of a checkpoint's
    flush: bool = True  # empty the prefix cache too; what the old weights computed never enters it again
    abort: bool = False  # end all requests first
    version: str = ""  # the user's name for these weights


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """Profiles the steps from here on. A `ControlReply` with the same id answers."""

    id: int
    folder: str  # where the trace is written
    steps: int = 0  # number of steps; 0: until `StopProfile`
    cpu: bool = True
    gpu: bool = True
    shapes: bool = False  # record the shapes of the operations' inputs
    stacks: bool = False  # record Python stacks


class StopProfile(msgspec.Struct, tag=True, frozen=True):
    """Ends a profile; the `ControlReply` that answers names the file."""

    id: int


class DumpExperts(msgspec.Struct, tag=True, frozen=True):
    """Writes where experts are, and how many tokens chose each. The `ControlReply` with the same id names the file."""

    id: int
    folder: str


class FillCache(msgspec.Struct, tag=True, frozen=True):
    """Random vectors become the KV of these prompts' full pages, for benchmarks of decoding at long contexts. A
    `ControlReply` with the same id answers.
    """

    id: int
    seed: int
    prompts: tuple[tuple[int, ...], ...]  # of this data-parallel rank


class Drain(msgspec.Struct, tag=True, frozen=True):
    """No new work will come: finish what runs, then exit."""


# ---- engine → front


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence."""

    uid: int
    tokens: tuple[int, ...]
    finish: str = ""  # "" while it runs, else "stop", "length", "abort", or "error" if the model computed NaN
    stop_id: int = -1  # the stop token id that ended it
    cached: int = 0  # first delta only: prompt tokens that came from the prefix cache
    logprobs: tuple[TokenLogprob, ...] = ()  # of each token, if requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # first delta only: of the prompt positions 1 to the last
    # of the whole sequence; in its last delta, and in every delta if a stop string may end it
    acceptance: AcceptanceCounts | None = None

    def merge(self, later: TokenDelta) -> TokenDelta:
        """This delta and the next one of the same sequence as one."""
        return msgspec.structs.replace(
            later,
            tokens=self.tokens + later.tokens,
            cached=max(self.cached, later.cached),
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
        )


class Stats(msgspec.Struct):
    """Gauges of the engine, and counters since its start, which never fall. The scheduler counts in one of its own."""

    running: int = 0
    waiting: int = 0
    page_size: int = PAGE  # tokens of a page
    pages: int = 0
    pages_used: int = 0  # acquired by requests
    pages_cached: int = 0  # held by the prefix cache only, so they can be evicted
    steps: int = 0
    prefill_tokens: int = 0  # prompt tokens computed, recomputed ones too
    decode_tokens: int = 0  # tokens sampled and committed
    prompt_tokens: int = 0  # prompt tokens admitted
    cached_tokens: int = 0  # of these, found in the prefix cache
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    step_seconds: float = 0.0  # time in which steps were in flight
    verifications: int = 0  # steps that verified drafts of a sequence, see `AcceptanceCounts`
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    wasted_drafts: int = 0  # drafts that were never verified: their sequence ended or was preempted
    steps_by_num_drafts: tuple[
        int, ...
    ] = ()  # with a drafter: steps that sampled, by drafts of each sequence, from 0 on
    drafter_failures: int = 0  # drafters that failed and were switched off
    broken: int = 0  # requests that ended because the model computed NaN
    slow_steps: int = 0  # steps with decode rows that took longer than the target between tokens
    late_first_tokens: int = 0  # first tokens after their target
    # with moving experts, of each layer with experts: the largest load of a rank over the mean, by the last counts
    expert_imbalance: tuple[float, ...] = ()
    expert_moves: int = 0  # experts copied to another slot
    expert_rebalances: int = 0  # times that experts got new places

    @property
    def acceptance(self) -> AcceptanceCounts:
        """Of all drafts that were verified."""
        return AcceptanceCounts(
            self.verifications, self.drafted_tokens, self.accepted_tokens, self.drafted_at, self.accepted_at
        )


# of ranks that run the same steps
LARGEST = "page_size", "steps", "step_seconds", "expert_imbalance", "expert_moves", "expert_rebalances"


def merged_stats(of_ranks: Sequence[Stats]) -> Stats:
    """The gauges and counters of all data-parallel ranks together."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    merged: dict[str, Any] = {}
    for name in Stats.__struct_fields__:
        values = [getattr(stats, name) for stats in of_ranks]
        if name in LARGEST:
            merged[name] = max(values)
        elif isinstance(values[0], tuple):
            merged[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            merged[name] = sum(values)
    return Stats(**merged)


class RequestEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event of a sequence other than new tokens."""

    uid: int
    kind: str  # "admitted" (the first time it leaves the queue) or "preempted"
    at: float  # the engine's time.time()


class StepUpdate(msgspec.Struct, tag=True, frozen=True):
    """News of all sequences: one message a step."""

    deltas: tuple[TokenDelta, ...]
    at: float  # the engine's time.time() when the step retired
    stats: Stats | None = None  # a few times a second
    events: tuple[RequestEvent, ...] = ()


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The engine refuses a sequence: the value of `field` cannot be served."""

    uid: int
    field: str
    message: str


class ControlReply(msgspec.Struct, tag=True, frozen=True):
    """Answer to a control message."""

    id: int
    result: str = ""
    replaced_all: bool = False  # of an `UpdateWeights`: every tensor was replaced
    error: str = ""  # why it was not carried out
    field: str = ""  # the part of the message that is wrong


def merged_reply(replies: Sequence[ControlReply]) -> ControlReply:
    """The answer of all data-parallel ranks as one: the first error, else the first result."""
    failed = next((reply for reply in replies if reply.error), None)
    return failed or msgspec.structs.replace(replies[0], replaced_all=all(reply.replaced_all for reply in replies))


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """The engine serves from now on."""

    pid: int
    context: int  # longest sequence that it can hold
    vocab: int
    pages: int
    slots: int
    report: Report  # the decisions about its configuration
    weights_lost: str = ""  # why it has the starting weights and not those that have replaced them


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The engine ends because of this error."""

    message: str
    at: float = 0.0  # time.time() of the error on its node: of several processes, the first that failed is the cause


# carried out between two steps, with none in flight
Control = UpdateWeights | StartProfile | StopProfile | DumpExperts | FillCache
ToEngine = Submit | Abort | FlushCache | Control | Drain
FromEngine = StepUpdate | Rejected | ControlReply | EngineReady | Fatal
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding such messages raises
