"""The client of an engine: spawns its processes, sends requests, streams pieces, and restarts it if it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
import signal
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import msgspec
import zmq

from thalweg.config.engine import EngineConfig
from thalweg.core import logs
from thalweg.core.errors import EngineDead, InvalidRequest, NumericalError, Overloaded, engine_unavailable
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import (
    UNREADABLE,
    Abort,
    Control,
    ControlReply,
    Drain,
    EngineReady,
    FlushCache,
    FromEngine,
    Rejected,
    Stats,
    StepUpdate,
    Submit,
    ToEngine,
    TokenDelta,
    UpdateWeights,
    merged_reply,
    merged_stats,
)
from thalweg.core.request import check_request
from thalweg.core.sampling import SamplingParams
from thalweg.engine.child import HANG, RECORD, EngineProcess
from thalweg.engine.local import SubmitOptions, sequences
from thalweg.engine.nodes import Nodes
from thalweg.engine.owed import OwedReplies
from thalweg.engine.processes import STOPPED_S, EngineProcesses, socket_folder
from thalweg.engine.routing import RequestRouter
from thalweg.engine.streams import Assembler, Piece
from thalweg.text.tokenizer import Tokenizer

log = logging.getLogger("thalweg.client")
RESTARTS = 5  # failed starts in a row after which the client gives up
GRACE = 5.0  # seconds that a process may take to end before it is killed
# hung: it makes no step, and may yet; restarting: a new engine must serve before a deadline; dead: none will
EngineState = Literal["starting", "ready", "hung", "restarting", "draining", "dead"]


class PromptRequest(NamedTuple):
    """One prompt of a request, with params.n choices."""

    prompt: Sequence[int]
    params: SamplingParams
    request_id: str = ""
    options: SubmitOptions = {}


@dataclass(slots=True, eq=False)
class _LiveRequest:
    """A request with sequences in the engine.

    Deltas that its stream has not taken yet are merged to one for each sequence. So a slow reader gets more tokens at
    once, and a reader that never reads costs one delta for each sequence.
    """

    assemblers: dict[int, Assembler]  # by uid
    # for the next engine, if this one ends before its first output was taken; []: the request fails then
    submits: list[Submit] = field(default_factory=list)
    deltas: dict[int, tuple[TokenDelta, float]] = field(default_factory=dict)  # by uid, with the time of the first
    error: Exception | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)  # deltas or an error wait to be taken

    def put(self, delta: TokenDelta, at: float) -> None:
        earlier = self.deltas.get(delta.uid)
        self.deltas[delta.uid] = (delta, at) if earlier is None else (earlier[0].merge(delta), earlier[1])
        self.news.set()

    def fail(self, error: Exception) -> None:
        """`take` raises `error` once all deltas are taken."""
        self.error = error
        self.news.set()

    async def take(self) -> list[tuple[TokenDelta, float]]:
        """All deltas in order of arrival. Waits for the first."""
        await self.news.wait()
        if self.error is not None and not self.deltas:
            raise self.error
        deltas, self.deltas, self.submits = list(self.deltas.values()), {}, []
        if self.error is None:
            self.news.clear()
        return deltas


def _log_fields(request_id: str, **values: Any) -> dict[str, Any]:
    id, _, key = request_id.partition("@")
    return logs.fields(id=id, key=key or None, **values)


class EngineClient:
    """Requests in, pieces out. All methods belong to one event loop."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, first: EngineProcess | None = None) -> None:
        """first: a process that has been started for the first engine."""
        self.config = config  # of the next engine too, so weight updates are added to it
        self.tokenizer = tokenizer
        self.ready: EngineReady | None = None  # None unless the engine serves
        self.stats = Stats()  # the latest
        self.state: EngineState = "starting"
        self.reason = "the engine is starting"  # why `state` is not "ready"
        self.restarts = 0
        self.weight_version = "default"  # name of the weights in use
        self.weights_lost = ""  # why the engine serves its starting weights again, not the replaced ones
        self._by_uid: dict[int, _LiveRequest] = {}  # of sequences that the engine has not ended
        self._live: set[_LiveRequest] = set()
        self._next_uid = self._next_control = 0
        self._controls: dict[int, tuple[FlushCache | Control, asyncio.Future[str]]] = {}
        self._serving = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._processes: EngineProcesses | None = None
        self._router = RequestRouter(config.dp_size, config.num_pages, config.page_size)
        self._stats: dict[int, Stats] = {}  # the latest, by data-parallel rank
        self._ready: list[EngineReady] = []  # of the processes that serve, those with a scheduler first
        self._replies: dict[int, list[ControlReply]] = {}  # that some data-parallel ranks have not answered, by id
        self._folder: Path  # with the sockets
        self._nodes = Nodes(config) if config.nnodes > 1 else None
        self._first = first
        self._ended: asyncio.Future[str]
        # uids, and control ids below 0, that the engine has not finished: those that nobody waits for any more too
        self._owed = OwedReplies()
        self._silence = ""  # what the watchdog said of a rank that has sent nothing for `watchdog_timeout`

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def of_ranks(self) -> dict[int, Stats]:
        """The latest gauges and counters of each data-parallel rank, if there are several."""
        return self._stats if self.config.dp_size > 1 else {}

    @property
    def pids(self) -> list[int]:
        """Of the processes on this machine: of several nodes only the leader's is known."""
        own = [] if self._processes is None else [child.pid for child in self._processes.children if child.pid]
        return own or ([] if self.ready is None else [self.ready.pid])

    @property
    def rank_states(self) -> dict[str, str]:
        """The state of each process, if there are several."""
        return self._processes.states() if self._processes is not None and self.config.processes > 1 else {}

    async def start(self) -> None:
        """Starts the engine and waits until it serves. Raises EngineDead with the engine's error if it cannot start."""
        self._runner = asyncio.create_task(self._run())
        waiter = asyncio.create_task(self._serving.wait())
        await asyncio.wait({waiter, self._runner}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self.state != "ready":
            raise EngineDead(self.reason)

    async def ended(self) -> None:
        """Waits until no engine will serve any more. Raises EngineDead unless the client was closed."""
        assert self._runner is not None, "it was started"
        await asyncio.wait({self._runner})
        if self.state == "dead":
            raise EngineDead(f"the engine could not be started again: {self.reason}")

    # ---- requests

    def check(self, prompt: Sequence[int], params: SamplingParams, grammar: Grammar = NO_GRAMMAR) -> None:
        """Raises InvalidRequest, and EngineDead while no engine serves."""
        if self.ready is None or self.state != "ready":
            raise engine_unavailable(self.state, self.reason)
        check_request(prompt, params, self.ready.context, self.ready.vocab, grammar)

    def check_queue(self, sequences: int) -> None:
        """Raises Overloaded if the queue has no room for so many sequences, InvalidRequest if it never has."""
        if not self.config.max_queued_requests:
            return
        limit = self.config.max_running_requests * self.config.dp_size + self.config.max_queued_requests
        if sequences > limit:
            raise InvalidRequest("n", f"makes {sequences} sequences; {limit} run and wait at a time, so send fewer")
        if (used := len(self._by_uid)) + sequences > limit:
            raise Overloaded(f"{used} sequences run or wait, the limit is {limit}: try again later")

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str = "", **options: Unpack[SubmitOptions]
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of one prompt, see `stream_all`."""
        return self.stream_all([PromptRequest(prompt, params, request_id, options)])

    async def stream_all(self, prompts: Sequence[PromptRequest]) -> AsyncGenerator[Piece, None]:
        """Submits the sequences of all prompts, or none, and yields their pieces. Closing the iterator aborts what is
        left.

        If the engine ends before the first piece, the next engine computes the prompts, once. Raises InvalidRequest,
        Overloaded, NumericalError, and EngineDead if the engine ends later, or the next one too.
        """
        for prompt in prompts:
            self.check(prompt.prompt, prompt.params)
        self.check_queue(sum(prompt.params.n for prompt in prompts))
        request = self._submit(prompts)
        try:
            while request.assemblers:
                for delta, at in await request.take():
                    assembler = request.assemblers.get(delta.uid)
                    if assembler is None:
                        continue  # beyond a stop string
                    piece = assembler.feed(delta, at)
                    if assembler.ended:
                        del request.assemblers[delta.uid]
                        self._by_uid.pop(delta.uid, None)
                        if not delta.finish:
                            self._send(Abort((delta.uid,)))
                    if piece.finish == "error":
                        why = "the model computed no numbers"
                        log.error("failed", extra=_log_fields(assembler.request_id, why=why))
                        raise NumericalError
                    yield piece
        finally:
            if request.assemblers and self.ready is not None:
                self._send(Abort(tuple(request.assemblers)))
            for uid in request.assemblers:
                self._by_uid.pop(uid, None)
            self._live.discard(request)

    def _submit(self, prompts: Sequence[PromptRequest]) -> _LiveRequest:
        request = _LiveRequest({})
        self._live.add(request)
        for prompt, params, request_id, options in prompts:
            for message in sequences(self._next_uid, prompt, params, **options):
                place, is_sibling = len(request.assemblers), message.sibling >= 0
                assembler = Assembler(place, message.prompt, params, self.tokenizer, request_id, is_sibling)
                request.assemblers[message.uid] = assembler
                request.submits.append(message)
                self._by_uid[message.uid] = request
            self._next_uid += params.n
        self._send_all(request)
        return request

    def _send_all(self, request: _LiveRequest) -> None:
        for message in request.submits:
            self._send(message, message.uid)

    async def abort(self, request_id: str) -> int:
        """Aborts the sequences of the requests with this id ("": of all requests). Returns how many."""
        uids: list[int] = []
        for request in self._live:
            ids = {uid: assembler.request_id for uid, assembler in request.assemblers.items()}
            if request_id and request_id not in ids.values():
                continue
            request.submits = []
            if self.ready is None:  # all its sequences wait for an engine
                for uid in ids:
                    request.put(TokenDelta(uid, (), "abort"), time.time())
                    self._by_uid.pop(uid, None)
            uids += [uid for uid, id in ids.items() if request_id in ("", id)]
        if uids:
            log.info("aborted", extra=_log_fields(request_id or "all of them", sequences=len(uids)))
            self._send(Abort(tuple(uids)))
        return len(uids)

    # ---- control

    async def flush_cache(self) -> None:
        """Empties the prefix cache. Raises EngineDead."""
        await self.control(FlushCache(0))

    async def control(self, message: FlushCache | Control) -> str:
        """Has the engine carry out a control message, even if the caller stops waiting. Returns its result.

        Raises InvalidRequest and EngineDead.
        """
        if self.ready is None:
            raise engine_unavailable(self.state, self.reason)
        self._next_control += 1
        message = msgspec.structs.replace(message, id=self._next_control)
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._send(message, -message.id)
        self._controls[message.id] = message, result
        return await result

    def record(self, number: signal.Signals = RECORD) -> None:
        """Has the engine write its last steps (--crash-dump-folder). number: RECORD or HANG."""
        if not self.config.crash_dump_folder:
            log.warning("nothing is recorded: start with --crash-dump-folder DIR")
        elif self.ready is not None and self._processes:
            self._processes.signal_leaders(number)  # one that has just ended has written its steps

    async def drain(self, timeout: float) -> None:
        """Refuses new requests, waits up to `timeout` seconds for running ones, then stops the engine."""
        self.state, self.reason = "draining", "it is shutting down"
        deadline = time.monotonic() + timeout
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.close()

    async def close(self) -> None:
        """Stops the engine. Running requests end with EngineDead."""
        if self.state != "dead":
            self.state, self.reason = "draining", "it is shutting down"
        if self._runner is not None:
            if not self._runner.cancelling():  # a second cancel would interrupt the clean-up
                self._runner.cancel()
            await asyncio.wait({self._runner})

    # ---- the engine process

    async def _run(self) -> None:
        """Runs engines until one cannot be started, or none serves in time, or the client closes."""
        failures, deadline = 0, math.inf  # time.monotonic() by which the next engine must serve
        try:
            while failures < RESTARTS and time.monotonic() < deadline:
                self._serving.clear()
                await self._run_engine(deadline)
                has_served = self._serving.is_set()
                if not has_served and self.restarts == 0 or self.state == "draining":
                    break  # the first start failed, so its error is the answer; or the client closes
                self._fail_all(EngineDead(self.reason), will_restart=True)
                if has_served:
                    failures, deadline = 0, time.monotonic() + (self.config.restart_timeout or math.inf)
                failures += 1
                self.restarts += 1
                log.error("starting a new engine (%d): %s", self.restarts, self.reason)
                await asyncio.sleep(min(0.1 * 2**failures, 5.0))
            self.state = "dead"
        finally:
            self.ready = None
            self._fail_all(EngineDead(self.reason))
            if self._nodes is not None:
                self._nodes.close()

    async def _run_engine(self, deadline: float) -> None:
        """Runs one engine and sets `reason` to why it ended. It ends with any of its processes, or if it does not serve
        by the deadline.
        """
        loop = asyncio.get_running_loop()
        with socket_folder() as self._folder:
            processes = self._processes = EngineProcesses(
                self.config, self._folder, first=self._first, nodes=self._nodes
            )
            self._first = None
            processes.start()
            self._router = RequestRouter(self.config.dp_size, self.config.num_pages, self.config.page_size)
            self._ready, self._replies, self._stats = [], {}, {}
            arrivals = [int(socket.getsockopt(zmq.FD)) for socket in processes.sockets]
            self._ended = loop.create_future()
            for descriptor in arrivals:
                loop.add_reader(descriptor, self._receive)
            for child in processes.children:
                loop.add_reader(child.sentinel, self._end, "")
            watching = loop.create_task(self._watch())
            late = None if deadline == math.inf else loop.call_at(deadline, self._end_unready)
            try:
                self._receive()
                error = await self._ended
                reason = self.reason
                self._receive()  # messages sent before it ended
                if error:
                    self.reason = error
                if len(processes.children) > 1:  # one that was killed is the cause, or failed first
                    is_named = bool(error) and error == self._silence  # the watchdog names those that are stopped
                    killed = await asyncio.to_thread(processes.killed, or_stopped=not is_named)
                    self._receive()
                    self.reason = killed or ("" if is_named else processes.failed()) or self.reason
                if not error and self.reason == reason:
                    self.reason = await asyncio.to_thread(processes.why_ended)
                if self.ready is not None and self.state != "draining":
                    self.state = "restarting"
            finally:
                self.ready = None
                if late is not None:
                    late.cancel()
                watching.cancel()
                for child in processes.children:
                    loop.remove_reader(child.sentinel)
                self._send(Abort(tuple(self._by_uid)))
                self._send(Drain())
                self._processes = None
                for descriptor in arrivals:
                    loop.remove_reader(descriptor)
                try:
                    await asyncio.to_thread(processes.join, GRACE)
                finally:  # close() may cancel the wait
                    processes.kill()
                    processes.close()

    async def _watch(self) -> None:
        """Logs and records when a data-parallel rank is silent although it owes replies, and changes the state "ready"
        to "hung"; `_handle` changes it back. A rank that has work sends at least every 0.25 s.
        """
        timeout, soon = self.config.watchdog_timeout, min(self.config.watchdog_timeout, STOPPED_S)
        while timeout:
            await asyncio.sleep(min(1.0, timeout / 4))
            self._receive()  # unread messages are no silence
            stopped = self._processes.stopped() if self._processes and self._owed.silent(soon) else ""
            limit = soon if stopped else timeout
            if self._silence or not (silent := self._owed.silent(limit)):
                continue
            stuck = self._processes.stuck() if self._processes else ""
            reason = self._silence = (
                f"the engine has made no step for {limit:g} s while {self._owed.of(silent)} sequences wait"
                f"{f' ({stuck})' if stuck else ''}; /health says when it goes on"
            )
            log.error("%s", reason)
            self.record(HANG)
            if self.state == "ready":
                self.state, self.reason = "hung", reason
            if self.config.watchdog_action == "restart" or (stopped and self.config.copy_processes > 1):
                self._end(reason)  # it has GRACE to write the recording, and is killed then

    def _end_unready(self) -> None:
        if self.ready is None:
            self._end(f"no new engine served within {self.config.restart_timeout:g} s (--restart-timeout)")

    def _end(self, error: str) -> None:
        if error:
            self.reason = error
        if not self._ended.done():
            self._ended.set_result(error)

    def _send(self, message: ToEngine, *owed: int) -> None:
        """owed: keys of the replies that the engine owes from now on."""
        if self._processes is not None:
            for rank, part in self._parts(message):
                for key in owed:
                    self._owed.add(rank, key)
                with contextlib.suppress(zmq.Again):  # the engine is gone; its sentinel will fail all requests
                    self._processes.send(rank, part)
            asyncio.get_running_loop().call_soon(self._receive)

    def _parts(self, message: ToEngine) -> Iterator[tuple[int, ToEngine]]:
        """The data-parallel ranks that a message is for, and what of it each gets."""
        match message:
            case Submit():
                yield self._router.route(message), message
            case Abort():
                for rank, uids in self._router.by_rank(message.uids).items():
                    yield rank, Abort(uids)
            case _:
                if isinstance(message, FlushCache):
                    self._router.flush()
                for rank in range(self.config.dp_size):
                    yield rank, message

    def _receive(self) -> None:
        """Handles all messages of the engine. ZeroMQ's descriptor signals changes only, so this runs after every send
        too.
        """
        if self._processes is None:
            return
        try:
            for rank, message in self._processes.receive():
                self._handle(message, rank)
        except UNREADABLE as error:  # tokens may be lost
            self._end(f"the engine sent a message that cannot be read: {error}")

    def _handle(self, message: FromEngine, rank: int) -> None:
        """rank: the data-parallel rank that sends it; -1: another process."""
        self._owed.hear(rank)
        if self._silence and not self._owed.silent(min(self.config.watchdog_timeout, STOPPED_S)):
            self._silence = ""
            log.warning("the engine goes on")
            if self.state == "hung":
                self.state, self.reason = "ready", ""
        match message:
            case StepUpdate():
                self._handle_update(message, rank)
            case Rejected():
                self._router.forget(message.uid)
                self._owed.discard(message.uid)
                if request := self._by_uid.pop(message.uid, None):
                    id = request.assemblers[message.uid].request_id
                    log.warning("refused by the engine", extra=_log_fields(id, field=message.field))
                    request.fail(InvalidRequest(message.field, message.message))
            case ControlReply():
                replies = self._replies.setdefault(message.id, [])
                replies.append(message)
                if len(replies) == self.config.dp_size:
                    self._handle_reply(merged_reply(self._replies.pop(message.id)))
            case EngineReady():
                self._ready.insert(0 if rank >= 0 else len(self._ready), message)
                if self._processes and len(self._ready) == len(self._processes.children):
                    self._handle_ready(self._ready[0])
            case _:
                self._end(message.message)

    def _handle_ready(self, ready: EngineReady) -> None:
        """All processes serve. ready: of a process with a scheduler; all of those are alike."""
        ranks = self.config.dp_size
        self.ready = msgspec.structs.replace(ready, pages=ranks * ready.pages, slots=ranks * ready.slots)
        self._router.pages = ready.pages
        if self.state != "draining":
            self.state, self.reason = "ready", ""
        self._serving.set()
        if ready.weights_lost:
            self.weights_lost, self.weight_version = ready.weights_lost, "default"
            self.config = msgspec.structs.replace(self.config, weight_updates=())
        for request in self._live:  # those that the engine before has not answered
            self._send_all(request)
            request.submits = []
        # both ends are connected; a client that is killed leaves no files
        shutil.rmtree(self._folder, ignore_errors=True)

    def _handle_reply(self, reply: ControlReply) -> None:
        self._owed.discard(-reply.id)
        if reply.id not in self._controls:
            return log.error("the engine answers control message %d, which was not sent", reply.id)
        message, result = self._controls.pop(reply.id)
        if isinstance(message, UpdateWeights) and not reply.error:
            self.weight_version, self.weights_lost = message.version or "default", ""
            # a new engine must load these weights too
            earlier = () if reply.replaced_all else self.config.weight_updates
            updates = (*(path for path in earlier if path != message.path), message.path)
            self.config = msgspec.structs.replace(self.config, weight_updates=updates)
        if result.done():  # cancelled
            return
        if reply.error:
            result.set_exception(InvalidRequest(reply.field, reply.error))
        else:
            result.set_result(reply.result)

    def _handle_update(self, update: StepUpdate, rank: int) -> None:
        if update.stats is not None:
            self._stats[rank] = update.stats
            self.stats = merged_stats(list(self._stats.values()))
        for event in update.events:
            if request := self._by_uid.get(event.uid):
                assembler = request.assemblers[event.uid]
                assembler.add_event(event)
                if event.kind == "preempted":
                    tokens = assembler.prompt_tokens + assembler.completion_tokens
                    values = _log_fields(assembler.request_id, choice=assembler.index, tokens=tokens)
                    log.info("preempted", extra=values)
        for delta in update.deltas:
            self._router.follow(delta)
            if delta.finish:
                self._owed.discard(delta.uid)
            if request := self._by_uid.get(delta.uid):
                request.put(delta, update.at)
                if delta.finish:
                    del self._by_uid[delta.uid]

    def _fail_all(self, error: EngineDead, will_restart: bool = False) -> None:
        """will_restart: requests without any output wait for the next engine instead."""
        waiting = {request for request in self._live if request.submits and will_restart}
        for request in self._live:
            ids = {assembler.request_id for assembler in request.assemblers.values()}
            if request in waiting:
                request.deltas.clear()
                request.news.clear()
                for id in ids:
                    log.warning("waits for the next engine", extra=_log_fields(id, why=str(error)))
                continue
            if request.error is None:
                for id in ids:
                    log.error("failed", extra=_log_fields(id, why=str(error)))
            request.fail(error)
        for _, result in self._controls.values():
            if not result.done():  # cancelled
                result.set_exception(error)
        self._by_uid = {uid: request for request in waiting for uid in request.assemblers}
        self._controls.clear()
        self._owed.clear()
        self._silence = ""
