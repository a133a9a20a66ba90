"""An engine in the caller's thread, for offline generation and benchmarks: the caller turns its loop. Where several
processes share the model, the caller's is the first of them.
"""

from __future__ import annotations

import time
import weakref
from typing import Callable, Sequence, TypedDict, Unpack

import msgspec

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import EngineDead, InvalidRequest, UnsupportedConfig
from thalweg.core.grammar import Grammar
from thalweg.core.messages import (
    Abort,
    Control,
    ControlReply,
    FillCache,
    FlushCache,
    FromEngine,
    Rejected,
    StepUpdate,
    Submit,
    ToEngine,
    TokenDelta,
    merged_reply,
)
from thalweg.core.retention import CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.engine.build import build
from thalweg.engine.group import ALONE, RankContext
from thalweg.engine.other_processes import OtherProcesses, end
from thalweg.engine.routing import RequestRouter
from thalweg.runner.runner import Runner

LONGEST_WAIT = 0.05  # seconds to wait for other processes, between two looks at the requests


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
    """Both ends in one thread: the engine receives what is put into `inbox`, and sends to `outbox`. wait: sleeps up to
    so many seconds, while only a ticket or another process can change anything.
    """

    def __init__(self, wait: Callable[[float], None] = time.sleep) -> None:
        self.inbox: list[ToEngine] = []
        self.outbox: list[FromEngine] = []
        self.wait = wait

    def receive(self, timeout: float | None) -> list[ToEngine]:
        if timeout and not self.inbox:
            self.wait(timeout)
        elif timeout is None and not self.inbox and self.wait is not time.sleep:
            self.wait(LONGEST_WAIT)
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        self.outbox.append(message)


class NoOthers:
    """The caller's process is the only one."""

    running = 0

    def join(self) -> RankContext:
        return ALONE

    def wait_ready(self) -> None:
        return

    wait = staticmethod(time.sleep)

    def send(self, rank: int, message: ToEngine) -> None:
        raise AssertionError(f"there is no data-parallel rank {rank}")

    def receive(self) -> list[FromEngine]:
        return []

    def close(self, error: Exception | None = None) -> None:
        return


NO_OTHERS = NoOthers()


class LocalEngine:
    """`submit` requests, then `step` until `idle`."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises UnsupportedConfig for several nodes."""
        if config.nnodes > 1:
            raise UnsupportedConfig("nnodes: an engine in this process has one node; use `thalweg serve` for several")
        self.others = OtherProcesses(config) if config.processes > 1 else NO_OTHERS
        runners = list[Runner]()
        self._close = weakref.finalize(self, end, self.others.close, runners)  # also at the end of the interpreter
        self.channel = LocalChannel(self.others.wait)
        try:
            self.loop, self.runner, facts, self.config = build(config, self.channel, self.others.join())
            if self.config.processes > 1 and self.config.device == "cuda":
                runners.append(self.runner)
            self.others.wait_ready()
        except Exception as error:
            self.others.close(error)
            raise
        self.vocab, self.context = facts.vocab, self.loop.scheduler.context
        self.router = RequestRouter(config.dp_size, self.config.num_pages, self.config.page_size)
        self.next_uid = self.next_control = 0
        self.is_broken = False  # a step began and did not end

    def close(self) -> None:
        """Ends the other processes that share the model. Nothing can be submitted any more."""
        self.is_broken = True
        self._close()

    @property
    def idle(self) -> bool:
        has_ended = self.loop.scheduler.is_idle and not self.loop.inflight and not self.others.running
        # the other ranks end a step with rows by one without, in which this one takes part
        return not self.channel.inbox and not self.channel.outbox and has_ended and not self.loop.coordinator.is_busy

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, **options: Unpack[SubmitOptions]
    ) -> tuple[int, ...]:
        """Queues params.n sequences and returns their uids."""
        submits = sequences(self.next_uid, prompt, params, **options)
        self.next_uid += params.n
        for message in submits:
            self._put(self.router.route(message), message)
        return tuple(message.uid for message in submits)

    def abort(self, uids: Sequence[int]) -> None:
        for rank, some in self.router.by_rank(uids).items():
            self._put(rank, Abort(some))

    def flush_cache(self) -> None:
        self.router.flush()
        self._put_all(FlushCache(-1))

    def fill_cache(self, prompts: Sequence[Sequence[int]], seed: int) -> None:
        """Random vectors become the KV of these prompts' full pages, each on the data-parallel rank that it will be
        sent to, and of all else in the cache: for benchmarks, with no request under way. Raises InvalidRequest where
        the cache holds too few pages.
        """
        by_rank: list[list[tuple[int, ...]]] = [[] for _ in range(self.config.dp_size)]
        for uid, prompt in enumerate(map(tuple, prompts), self.next_uid):
            by_rank[self.router.route(Submit(uid, prompt, SamplingParams()))].append(prompt)
        for uid in range(self.next_uid, self.next_uid + len(prompts)):
            self.router.forget(uid)
        self._control([FillCache(0, seed, tuple(own)) for own in by_rank])

    def _put(self, rank: int, message: ToEngine) -> None:
        if rank == 0:
            self.channel.inbox.append(message)
        else:
            self.others.send(rank, message)

    def _put_all(self, message: ToEngine) -> None:
        for rank in range(self.config.dp_size):
            self._put(rank, message)

    def step(self) -> list[TokenDelta]:
        """Runs one step of the loop. Returns the deltas of the step that was committed.

        Raises InvalidRequest for a request that the engine refuses, and EngineDead after a step that failed or was
        interrupted.
        """
        self._run(self.loop.step)
        self.channel.outbox += self.others.receive()
        messages, self.channel.outbox = self.channel.outbox, []
        refused = next((message for message in messages if isinstance(message, Rejected)), None)
        if refused is not None:  # the next step returns the others
            self.channel.outbox = [message for message in messages if message is not refused]
            self.router.forget(refused.uid)
            raise InvalidRequest(refused.field, refused.message)
        deltas = [delta for message in messages if isinstance(message, StepUpdate) for delta in message.deltas]
        for delta in deltas:
            self.router.follow(delta)
        return deltas

    def control(self, message: Control) -> str:
        """Carries out a control message between two steps and returns its result. Raises InvalidRequest."""
        return self._control([message] * self.config.dp_size)

    def _control(self, messages: Sequence[Control]) -> str:
        """messages: of each data-parallel rank."""
        self.next_control += 1
        for rank, message in enumerate(messages):
            self._put(rank, msgspec.structs.replace(message, id=self.next_control))
        replies = list[ControlReply]()
        while len(replies) < self.config.dp_size:
            self._run(self.loop.step if self.loop.coordinator.is_shared else self.loop.receive)
            self.channel.outbox += self.others.receive()
            replies = [r for r in self.channel.outbox if isinstance(r, ControlReply) and r.id == self.next_control]
        self.channel.outbox = [other for other in self.channel.outbox if other not in replies]
        reply = merged_reply(replies)
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
            self.others.close(error)
            raise
        self.is_broken = False
