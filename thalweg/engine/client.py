"""The front's side of an engine: spawns its process, sends requests, hands out pieces, and starts a new engine when one
dies.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from thalweg.config.engine import EngineConfig
from thalweg.core import logs
from thalweg.core.errors import EngineDead, InvalidRequest, NumericalError, Overloaded, engine_unavailable
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import (
    Abort,
    Control,
    ControlReply,
    Drain,
    EngineReady,
    FlushCache,
    FromEngine,
    Rejected,
    RequestEvent,
    Stats,
    StepUpdate,
    Submit,
    ToEngine,
    UpdateWeights,
)
from thalweg.core.request import QueueReservation
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.engine import process
from thalweg.engine.ipc import ipc_directory
from thalweg.engine.local import sibling
from thalweg.engine.streams import Assembler, DeltaQueue, Piece
from thalweg.engine.watchdog import SIGNAL, ReplyWatchdog
from thalweg.text.tokenizer import Tokenizer

log = logging.getLogger("thalweg.front")
RESTARTS = 5  # failures in a row, without a Ready between, after which the front gives up
SPAWN = multiprocessing.get_context("spawn")
GRACE = 5.0  # seconds a process may take to end before it is killed


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has sequences in the engine."""

    request_id: str
    assemblers: dict[int, Assembler]
    inbox: DeltaQueue = field(default_factory=DeltaQueue)

    @property
    def names(self) -> dict[str, str | None]:
        """Its id in the log, and the key that it came with, which stands behind an @."""
        id, _, key = self.request_id.partition("@")
        return {"id": id, "key": key or None}

    def mark(self, mark: RequestEvent) -> None:
        assembler = self.assemblers[mark.uid]
        assembler.mark(mark)
        if mark.kind == "preempted":
            known = assembler.prompt_tokens + assembler.completion_tokens
            log.info("preempted", extra=logs.fields(**self.names, choice=assembler.index, tokens=known))


class EngineClient:
    """Requests in, pieces out. All methods belong to one event loop.

    state: "starting", "ready", "wedged" (it makes no step, and may yet), "draining" or "dead"; ready: what the engine
    said of itself, None unless it serves; stats: its latest; weight_version: the name that came with the weights in
    use. config: that of the next engine too, weights that were replaced included.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.ready: EngineReady | None = None
        self.stats = Stats()
        self.state = "starting"
        self.reason = "the engine is starting"
        self.restarts = 0
        self.weight_version = "default"
        self._by_uid: dict[int, _Live] = {}
        self._live: set[_Live] = set()
        self._next_uid = self._next_control = 0
        self._kept = 0  # places of the queue that rooms hold
        self._controls: dict[int, tuple[FlushCache | Control, asyncio.Future[str]]] = {}
        self._serving = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False
        self._socket: zmq.Socket[bytes] | None = None
        self._ended: asyncio.Future[str]
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._watchdog = ReplyWatchdog(config.watchdog_timeout)

    @property
    def running(self) -> int:
        """Requests that are under way."""
        return len(self._live)

    async def start(self) -> None:
        """Starts the engine and waits until it serves. Raises EngineDead with the engine's own words if it cannot
        start.
        """
        self._keeper = asyncio.create_task(self._keep())
        waiter = asyncio.create_task(self._serving.wait())
        await asyncio.wait({waiter, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self.state != "ready":
            raise EngineDead(self.reason)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises InvalidRequest for what the engine would refuse, EngineDead when there is none, Overloaded when its
        queue is full.
        """
        if self.ready is None or self.state != "ready":
            raise engine_unavailable(self.state, self.reason)
        check_prompt(prompt, params, self.ready.context, self.ready.vocab)
        params.check(self.ready.vocab)
        self._check_room(params.n)

    @contextlib.contextmanager
    def reserve(self, sequences: int) -> Iterator[QueueReservation]:
        """Keeps places of the queue for requests that belong together: all of them find one, or Overloaded is raised
        now.
        """
        self._check_room(sequences)
        reservation = QueueReservation(sequences)
        self._kept += sequences
        try:
            yield reservation
        finally:
            self._kept -= reservation.remaining

    def _check_room(self, sequences: int) -> None:
        limit, taken = (
            self.config.max_running_requests + self.config.max_queued_requests,
            len(self._by_uid) + self._kept,
        )
        if self.config.max_queued_requests and sequences > limit:
            raise InvalidRequest("n", f"makes {sequences} sequences; {limit} run and wait at a time, so send fewer")
        if self.config.max_queued_requests and taken + sequences > limit:
            raise Overloaded(f"{taken} sequences run or wait, the limit is {limit}: try again later")

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        salt: int = 0,
        grammar: Grammar = NO_GRAMMAR,
        retention: CacheRetention = RETAIN_ALL,
        reservation: QueueReservation | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Submits params.n sequences and yields their pieces as they come. Closing the iterator aborts what is left.
        keep: what of them the prefix cache keeps. room: it takes its places from there.

        Raises InvalidRequest, Overloaded, NumericalError, and EngineDead when the engine ends meanwhile.
        """
        if reservation is not None:
            reservation.remaining -= params.n
            self._kept -= params.n
        self.check(prompt, params)
        live = self._submit(tuple(prompt), params, request_id, priority, salt, grammar, retention)
        try:
            while live.assemblers:
                for delta, at in await live.inbox.take():
                    assembler = live.assemblers.get(delta.uid)
                    if assembler is None:
                        continue  # beyond a stop string: it does not exist
                    piece = assembler.feed(delta, at)
                    if assembler.ended:
                        self._forget(live, delta.uid)
                        if not delta.finish:
                            self._send(Abort((delta.uid,)))
                    if piece.finish == "error":
                        log.error("failed", extra=logs.fields(**live.names, why="the model computed no numbers"))
                        raise NumericalError
                    yield piece
        finally:
            if live.assemblers and self.ready is not None:
                self._send(Abort(tuple(live.assemblers)))
            for uid in tuple(live.assemblers):
                self._forget(live, uid)
            self._live.discard(live)

    async def abort(self, request_id: str) -> int:
        """Tells the sequences of the requests with this id to end ("" = of all requests); returns how many."""
        uids = [
            uid for live in self._live if live.request_id == request_id or not request_id for uid in live.assemblers
        ]
        if uids:
            id, _, key = request_id.partition("@")
            log.info("aborted", extra=logs.fields(id=id or "all of them", key=key or None, sequences=len(uids)))
            self._send(Abort(tuple(uids)))
        return len(uids)

    async def flush_cache(self) -> None:
        """Empties the prefix cache. Raises EngineDead."""
        await self.control(FlushCache(0))

    async def control(self, message: FlushCache | Control) -> str:
        """Has this done, whatever its id is; what came of it. It is done even if nobody waits for it any more.

        Raises InvalidRequest for what cannot be done, EngineDead.
        """
        if self.ready is None:
            raise engine_unavailable(self.state, self.reason)
        self._next_control += 1
        message = msgspec.structs.replace(message, id=self._next_control)
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._controls[message.id] = message, told
        self._watchdog.owes(-message.id)
        self._send(message)
        return await told

    def record(self) -> None:
        """Has the engine write its last steps down (--crash-dump-folder)."""
        if not self.config.crash_dump_folder:
            log.warning("nothing is recorded: start with --crash-dump-folder DIR")
        elif self.ready is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and wrote what it ended of
                os.kill(self.ready.pid, SIGNAL)

    async def drain(self, timeout: float) -> None:
        """Takes no new work, waits up to `timeout` seconds for what runs, then stops the engine."""
        self.state, self.reason = "draining", "the server is shutting down"
        deadline = time.monotonic() + timeout
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.close()

    async def close(self) -> None:
        """Stops the engine; running requests end with EngineDead."""
        if self.state != "dead":
            self.state, self.reason = "draining", "the server is shutting down"
        if self._keeper is not None:
            if not self._closing:  # else whoever called before has told it, and it must not be told while it cleans up
                self._closing = True
                self._keeper.cancel()
            await asyncio.wait({self._keeper})

    # ---- the engine's life ----

    async def _keep(self) -> None:
        """Runs engines one after the other until one cannot be started or the front closes; whatever still waits then
        ends.
        """
        try:
            await self._run_engines()
        finally:
            self.ready = None
            self._fail_all(EngineDead(self.reason))

    async def _run_engines(self) -> None:
        failures = 0
        while failures < RESTARTS:
            self._serving.clear()
            await self._run_engine()
            served = self._serving.is_set()
            self.ready = None
            if served:
                failures = 0
            self._fail_all(EngineDead(self.reason))
            if not served and self.restarts == 0 or self.state == "draining":
                break  # the first start failed: its reason is the answer; or there is nobody left to serve
            failures += 1
            self.restarts += 1
            self.state = "starting"
            log.error("starting a new engine (%d): %s", self.restarts, self.reason)
            await asyncio.sleep(min(0.1 * 2**failures, 5.0))
        self.state = "dead"

    async def _run_engine(self) -> None:
        """One engine from spawn to exit; sets `reason` to why it ended."""
        loop = asyncio.get_running_loop()
        with ipc_directory() as folder:
            address = f"ipc://{folder}/engine"
            context = zmq.Context(1)
            socket = self._socket = context.socket(zmq.PAIR)
            socket.set_hwm(0)
            socket.bind(address)
            child = SPAWN.Process(target=process.main, args=(self.config, address), name="thalweg-engine")
            child.start()
            # where nobody closes this front, multiprocessing would wait at exit for a process that waits for us
            atexit.register(child.kill)
            arrivals = int(socket.getsockopt(zmq.FD))
            self._ended = loop.create_future()
            loop.add_reader(arrivals, self._pump)
            loop.add_reader(child.sentinel, self._end, "")
            watching = loop.create_task(self._watch())
            try:
                self._pump()
                told = await self._ended
                self._pump()  # its last words
                if not told and self.reason == "":
                    await asyncio.to_thread(child.join, GRACE)
                    self.reason = f"the engine process ended with exit code {child.exitcode}"
            finally:
                watching.cancel()
                loop.remove_reader(child.sentinel)
                self._send(Abort(tuple(self._by_uid)))
                self._send(Drain())
                self._socket = None
                loop.remove_reader(arrivals)
                await asyncio.to_thread(child.join, GRACE)
                if child.is_alive():
                    child.kill()
                    child.join()
                atexit.unregister(child.kill)
                socket.close(linger=0)
                context.term()

    async def _watch(self) -> None:
        """Says when the engine makes no step although it should; `_hear` when it does again."""
        while True:
            await asyncio.sleep(self._watchdog.tick)
            self._pump()  # what lies here unread is no silence
            if self._watchdog.overdue and self.state == "ready":
                self.state = "wedged"
                self.reason = (
                    f"the engine has made no step for {self._watchdog.timeout:g} s while {self._watchdog.owed} sequences"
                    " wait; /health says when it goes on"
                )
                log.error("%s", self.reason)

    def _end(self, reason: str) -> None:
        if reason:
            self.reason = reason
        if not self._ended.done():
            self._ended.set_result(reason)

    def _pump(self) -> None:
        """Hands out everything the engine has sent. ZeroMQ's descriptor signals changes only, so this runs after every
        send too.
        """
        while self._socket is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._hear(self._decode(self._socket.recv(zmq.NOBLOCK)))

    def _hear(self, message: FromEngine) -> None:
        self._watchdog.heard()
        if self.state == "wedged":
            self.state, self.reason = "ready", ""
            log.warning("the engine goes on")
        if isinstance(message, StepUpdate):
            self._news(message)
        elif isinstance(message, Rejected):
            self._watchdog.paid(message.uid)
            if live := self._by_uid.get(message.uid):
                log.warning("refused by the engine", extra=logs.fields(**live.names, field=message.field))
                live.inbox.fail(InvalidRequest(message.field, message.message))
        elif isinstance(message, ControlReply):
            self._done(message)
        elif isinstance(message, EngineReady):
            self.ready, self.state, self.reason = message, "ready", ""
            self._serving.set()
        else:
            self._end(message.message)

    def _done(self, done: ControlReply) -> None:
        self._watchdog.paid(-done.id)
        asked, told = self._controls.pop(done.id)
        if isinstance(asked, UpdateWeights) and not done.error:
            self.weight_version = asked.version or "default"
            # an engine that takes this one's place must not go back to what it began with
            before = () if done.replaced_all else self.config.weight_updates
            self.config = msgspec.structs.replace(
                self.config, weight_updates=(*(one for one in before if one != asked.path), asked.path)
            )
        if told.done():  # cancelled
            return
        if done.error:
            told.set_exception(InvalidRequest(done.field, done.error))
        else:
            told.set_result(done.result)

    def _news(self, news: StepUpdate) -> None:
        if news.stats is not None:
            self.stats = news.stats
        for mark in news.events:
            if live := self._by_uid.get(mark.uid):
                live.mark(mark)
        for delta in news.deltas:
            if delta.finish:
                self._watchdog.paid(delta.uid)
            if live := self._by_uid.get(delta.uid):
                live.inbox.put(delta, news.at)

    # ---- allocator ----

    def _submit(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        request_id: str,
        priority: int,
        salt: int,
        grammar: Grammar,
        retention: CacheRetention,
    ) -> _Live:
        uids = range(self._next_uid, self._next_uid + params.n)
        self._next_uid += params.n
        live = _Live(request_id, {uid: Assembler(i, prompt, params, self.tokenizer) for i, uid in enumerate(uids)})
        self._live.add(live)
        now = time.time()
        for i, uid in enumerate(uids):
            self._by_uid[uid] = live
            self._watchdog.owes(uid)
            first = uids[0] if i else -1
            self._send(Submit(uid, prompt, sibling(params, i), priority, salt, first, now, grammar, retention))
        return live

    def _forget(self, live: _Live, uid: int) -> None:
        live.assemblers.pop(uid, None)
        self._by_uid.pop(uid, None)

    def _send(self, message: ToEngine) -> None:
        if self._socket is not None:
            with contextlib.suppress(
                zmq.Again
            ):  # the engine is gone; whoever waits on it is told when its process is seen to end
                self._socket.send(self._encode(message), zmq.NOBLOCK)
            asyncio.get_running_loop().call_soon(self._pump)

    def _fail_all(self, error: EngineDead) -> None:
        self._watchdog.forget()
        for live in self._live:
            if live.inbox.error is None:
                log.error("failed", extra=logs.fields(**live.names, why=str(error)))
            live.inbox.fail(error)
        for _, told in self._controls.values():
            if not told.done():  # cancelled
                told.set_exception(error)
        self._controls.clear()


def check_prompt(prompt: Sequence[int], params: SamplingParams, context: int, vocab: int) -> None:
    """Raises InvalidRequest for a prompt that is empty, too long, or has ids outside the vocabulary, as the scheduler's
    door does.
    """
    if not prompt:
        raise InvalidRequest("prompt", "is empty: at least one token is needed")
    room = context if params.max_tokens == 0 else context - 1
    if len(prompt) > room:
        raise InvalidRequest("prompt", f"has {len(prompt)} tokens; at most {room} fit the context of {context}")
    if min(prompt) < 0 or max(prompt) >= vocab:
        bad = next(token for token in prompt if not 0 <= token < vocab)
        raise InvalidRequest("prompt", f"token id {bad} is outside the vocabulary of {vocab}")
