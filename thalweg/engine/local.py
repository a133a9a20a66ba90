"""An engine in the caller's thread, for offline generation and benchmarks: the caller turns its loop."""

from __future__ import annotations

import time
from typing import Callable, Sequence, TypedDict, Unpack

import msgspec

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import EngineDead, InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.core.messages import (
    Abort,
    Control,
    ControlReply,
    FlushCache,
    FromEngine,
    Rejected,
    StepUpdate,
    Submit,
    ToEngine,
    TokenDelta,
)
from thalweg.core.retention import CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.engine.build import build


class SubmitOptions(TypedDict, total=False):
    """Fields of `Submit` that all sequences of a request share."""

    priority: int
    salt: int
    grammar: Grammar
    retention: CacheRetention


def sequences(
    first_uid: int, prompt: Sequence[int], params: SamplingParams, **options: Unpack[SubmitOptions]
) -> list[Submit]:
    """The params.n sequences of a request. The later ones wait until the first has computed the shared prompt."""
    return [
        Submit(first_uid + i, tuple(prompt), choice_params(params, i), sibling=first_uid if i else -1, **options)
        for i in range(params.n)
    ]


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index` of n. A given seed is increased, so that choices differ and can be repeated."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, n=1, seed=seed)


class LocalChannel:
    """Both ends in one thread: the engine receives what is put into `inbox`, and sends to `outbox`."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.outbox: list[FromEngine] = []

    def receive(self, timeout: float | None) -> list[ToEngine]:
        if timeout and not self.inbox:
            time.sleep(timeout)  # only a ticket can change anything
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        self.outbox.append(message)


class LocalEngine:
    """`submit` requests, then `step` until `idle`."""

    def __init__(self, config: EngineConfig) -> None:
        self.channel = LocalChannel()
        self.loop, self.runner, facts, self.config = build(config, self.channel)
        self.vocab, self.context = facts.vocab, self.loop.scheduler.context
        self.next_uid = 0
        self.is_broken = False  # a step began and did not end

    @property
    def idle(self) -> bool:
        return not self.channel.inbox and self.loop.scheduler.is_idle and not self.loop.inflight

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, **options: Unpack[SubmitOptions]
    ) -> tuple[int, ...]:
        """Queues params.n sequences and returns their uids."""
        submits = sequences(self.next_uid, prompt, params, **options)
        self.next_uid += params.n
        self.channel.inbox += submits
        return tuple(message.uid for message in submits)

    def abort(self, uids: Sequence[int]) -> None:
        self.channel.inbox.append(Abort(tuple(uids)))

    def flush_cache(self) -> None:
        self.channel.inbox.append(FlushCache(-1))

    def step(self) -> list[TokenDelta]:
        """Runs one step of the loop. Returns the deltas of the step that was committed.

        Raises InvalidRequest for a request that the engine refuses, and EngineDead after a step that failed or was
        interrupted.
        """
        self._run(self.loop.step)
        messages, self.channel.outbox = self.channel.outbox, []
        deltas: list[TokenDelta] = []
        for message in messages:
            if isinstance(message, Rejected):
                raise InvalidRequest(message.field, message.message)
            if isinstance(message, StepUpdate):
                deltas += message.deltas
        return deltas

    def control(self, message: Control) -> str:
        """Carries out a control message between two steps and returns its result. Raises InvalidRequest."""
        self.channel.inbox.append(message)
        self._run(self.loop.receive)
        replies = (reply for reply in self.channel.outbox if isinstance(reply, ControlReply))
        reply = next(reply for reply in replies if reply.id == message.id)
        self.channel.outbox.remove(reply)
        if reply.error:
            raise InvalidRequest(reply.field, reply.error)
        return reply.result

    def _run(self, work: Callable[[], None]) -> None:
        if self.is_broken:
            raise EngineDead("a step failed or was interrupted, so its results are unknown: make a new engine")
        self.is_broken = True
        try:
            work()
        except Exception as error:
            if self.loop.recorder:
                self.loop.recorder.save_crash(error)
            raise
        self.is_broken = False
