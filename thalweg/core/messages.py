"""What crosses between a front (HTTP server or `LLM`) and the engine process: msgspec structs, msgpack on the wire."""

from __future__ import annotations

import msgspec

from thalweg.core.drafts import Drafted
from thalweg.core.grammar import FREE, Grammar
from thalweg.core.keep import WHOLE, Keep
from thalweg.core.report import Report
from thalweg.core.sampling import SamplingParams


class Submit(msgspec.Struct, tag=True, frozen=True):
    """One sequence to compute. uid: drawn by the front, increasing. first: uid of the n > 1 sibling whose prompt this shares, or -1.
    arrival: the front's clock (time.time()), for queue-time metrics. keep: what of it the next turn of its conversation will need."""

    uid: int
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: int = 0
    first: int = -1
    arrival: float = 0.0
    grammar: Grammar = FREE
    keep: Keep = WHOLE


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends these sequences wherever they are. A `Delta` with finish "abort" answers each that was still there."""

    uids: tuple[int, ...]


class FlushCache(msgspec.Struct, tag=True, frozen=True):
    """Empties the prefix cache (leased pages stay with their holders); `Done` with the same id answers."""

    id: int


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Replaces the tensors that the checkpoint in the folder `path` holds; those of a checkpoint may be few. Carried out between two steps;
    running requests go on with the new weights. flush: empty the prefix cache too, and let nothing enter it that the old weights made.
    abort: end all requests first. version: the user's name for these weights. `Done` with the same id answers."""

    id: int
    path: str
    flush: bool = True
    abort: bool = False
    version: str = ""


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """Profiles the steps from here on. folder: where the trace is written. steps: after so many it ends by itself, 0: when it is told to. cpu,
    gpu: what is watched. shapes, stacks: of operations, noted too. `Done` with the same id answers."""

    id: int
    folder: str
    steps: int = 0
    cpu: bool = True
    gpu: bool = True
    shapes: bool = False
    stacks: bool = False


class StopProfile(msgspec.Struct, tag=True, frozen=True):
    """Ends a profile; the `Done` that answers tells the file."""

    id: int


class Drain(msgspec.Struct, tag=True, frozen=True):
    """No new work will come: finish what runs, then exit."""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """News of one sequence. finish: "" while it runs, else "stop", "length", "abort", or "error" where the model computed no numbers; stop_id: the
    stop token id, or -1.
    logprobs and prompt_logprobs: (logprob, top ids, top logprobs) each, empty unless asked for; the first delta of a
    sequence carries all its prompt logprobs (of prompt positions 1 to the last) and `cached`, the prompt tokens that came from the cache; the last
    one `drafted`, of all of it, and every one where a stop string may end it."""

    uid: int
    tokens: tuple[int, ...]
    finish: str = ""
    stop_id: int = -1
    cached: int = 0
    logprobs: tuple[tuple[float, tuple[int, ...], tuple[float, ...]], ...] = ()
    prompt_logprobs: tuple[tuple[float, tuple[int, ...], tuple[float, ...]], ...] = ()
    drafted: Drafted | None = None

    def then(self, later: Delta) -> Delta:
        """This one and the next of the same sequence as one."""
        return Delta(
            self.uid,
            self.tokens + later.tokens,
            later.finish,
            later.stop_id,
            max(self.cached, later.cached),
            self.logprobs + later.logprobs,
            self.prompt_logprobs + later.prompt_logprobs,
            later.drafted,
        )


class Stats(msgspec.Struct, frozen=True):
    """What the engine is doing: gauges now, counters since its start. *_tokens counters never fall."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_used: int = 0  # leased by requests
    pages_cached: int = 0  # held by the prefix cache only, reclaimable
    steps: int = 0
    prefill_tokens: int = 0  # prompt tokens computed
    decode_tokens: int = 0  # tokens sampled and committed
    prompt_tokens: int = 0  # prompt tokens admitted
    cached_tokens: int = 0  # of these, found in the prefix cache
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    step_seconds: float = 0.0  # time in which steps were in flight
    verifications: int = 0  # drafts of one sequence, verified in one step
    drafted_tokens: int = 0  # drafts that were verified
    accepted_tokens: int = 0  # of these, accepted
    drafted_at: tuple[int, ...] = ()  # verifications with a draft 1, 2, ... places behind the known tokens
    accepted_at: tuple[int, ...] = ()  # of these, those that accepted one there
    wasted_drafts: int = 0  # drafts that were never verified: their sequence ended, or gave its pages back
    steps_by_width: tuple[int, ...] = ()  # with a drafter: steps that sampled, by drafts of each sequence, from 0 on
    drafter_failures: int = 0  # drafters that failed and were switched off
    broken: int = 0  # requests that ended because the model computed no numbers

    @property
    def drafts(self) -> Drafted:
        """What became of all drafts that were verified."""
        return Drafted(self.verifications, self.drafted_tokens, self.accepted_tokens, self.drafted_at, self.accepted_at)


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What befell a sequence beside its tokens. kind: "admitted" (the first time it leaves the queue) or "preempted"; at: the engine's
    time.time()."""

    uid: int
    kind: str
    at: float


class StepNews(msgspec.Struct, tag=True, frozen=True):
    """One message a step: the news of every sequence that has some. `at`: the engine's time.time() when the step retired.
    stats come a few times a second, not with every step."""

    deltas: tuple[Delta, ...]
    at: float
    stats: Stats | None = None
    marks: tuple[Mark, ...] = ()


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The engine refuses a sequence: what the user sent in `field` cannot be served."""

    uid: int
    field: str
    message: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """A control message was carried out, or not: error says why, and field what part of it is wrong. told: what came of it. whole: of
    an `UpdateWeights`, that nothing is left of the weights before."""

    id: int
    told: str = ""
    whole: bool = False
    error: str = ""
    field: str = ""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine serves from now on. context: the longest sequence it can hold; report: the decisions about its configuration."""

    pid: int
    context: int
    vocab: int
    pages: int
    slots: int
    report: Report


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The engine ends because of this error."""

    message: str


Control = UpdateWeights | StartProfile | StopProfile  # what is done between two steps, with none in flight
ToEngine = Submit | Abort | FlushCache | Control | Drain
FromEngine = StepNews | Rejected | Done | Ready | Fatal
