"""An engine in this thread: offline generation and benchmarks turn its loop themselves."""

from __future__ import annotations

from typing import Callable, Sequence

import msgspec

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import EngineDead, InvalidRequest
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import Abort, Control, ControlReply, FlushCache, Rejected, StepUpdate, Submit, TokenDelta
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.engine import caches
from thalweg.engine.build import build
from thalweg.engine.calibration_checks import proven
from thalweg.engine.channel import LocalChannel


class LocalEngine:
    """submit() requests, then step() until `idle`."""

    def __init__(self, config: EngineConfig) -> None:
        caches.use(config.cache_dir)
        self.channel = LocalChannel()
        self.loop, self.runner, facts, self.config = build(proven(config), self.channel)
        self.vocab, self.context = facts.vocab, self.loop.scheduler.context
        self.next_uid = 0
        self.torn = False  # a step began and did not end

    @property
    def idle(self) -> bool:
        return not self.channel.inbox and self.loop.scheduler.is_idle and not self.loop.inflight

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        salt: int = 0,
        grammar: Grammar = NO_GRAMMAR,
        retention: CacheRetention = RETAIN_ALL,
    ) -> tuple[int, ...]:
        """Queues params.n sequences; returns their uids."""
        uids = tuple(range(self.next_uid, self.next_uid + params.n))
        self.next_uid += params.n
        for uid in uids:
            first = uids[0] if uid != uids[0] else -1
            own = sibling(params, uid - uids[0])
            self.channel.inbox.append(Submit(uid, tuple(prompt), own, priority, salt, first, 0.0, grammar, retention))
        return uids

    def abort(self, uids: Sequence[int]) -> None:
        self.channel.inbox.append(Abort(tuple(uids)))

    def flush_cache(self) -> None:
        self.channel.inbox.append(FlushCache(-1))

    def step(self) -> list[TokenDelta]:
        """One turn of the loop; the news of the step that retired. Raises InvalidRequest for a request the engine
        refuses, EngineDead after a step that failed or was interrupted: its requests would never end.
        """
        self._run(self.loop.turn)
        sent, self.channel.outbox = self.channel.outbox, []
        deltas: list[TokenDelta] = []
        for message in sent:
            if isinstance(message, Rejected):
                raise InvalidRequest(message.field, message.message)
            if isinstance(message, StepUpdate):
                deltas += message.deltas
        return deltas

    def control(self, message: Control) -> str:
        """Has this done between two steps; what came of it. Requests that run go on at the next `step`. Raises
        InvalidRequest.
        """
        self.channel.inbox.append(message)
        self._run(self.loop.take)
        done = next(one for one in self.channel.outbox if isinstance(one, ControlReply) and one.id == message.id)
        self.channel.outbox.remove(done)
        if done.error:
            raise InvalidRequest(done.field, done.error)
        return done.result

    def _run(self, work: Callable[[], None]) -> None:
        if self.torn:
            raise EngineDead("a step failed or was interrupted, so what it computed is unknown: make a new engine")
        self.torn = True
        try:
            work()
        except Exception as error:
            self.loop.recorder.died(error)
            raise
        self.torn = False


def sibling(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index` of n: a given seed is moved on, so that the choices differ and each can be
    repeated.
    """
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, n=1, seed=seed)
