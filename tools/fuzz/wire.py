"""Messages between front and engine, in both directions, over real sockets.

An input is {"to": "engine" or "front", "messages": [...]}; a message is a JSON value, as msgpack holds it, or the text
of its bytes (characters 0 to 255). To the engine: it goes on, answers a valid request, and loses no page. To the front:
it goes on, or gives the engine up with a reason; a running request ends, with its tokens or with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from thalweg.config.tree import options_of
from thalweg.core.errors import ThalwegError
from thalweg.core.messages import (
    UNREADABLE,
    Abort,
    Drain,
    EngineReady,
    FromEngine,
    StepUpdate,
    StopProfile,
    Submit,
    ToEngine,
    TokenDelta,
)
from thalweg.core.report import Report
from thalweg.core.sampling import SamplingParams
from thalweg.engine import processes
from thalweg.engine.build import build
from thalweg.engine.child import EngineProcess
from thalweg.engine.client import EngineClient
from thalweg.engine.process import ZmqChannel
from thalweg.launch.resolve import resolve
from tools.fuzz.http import MODEL
from tools.fuzz.mutate import mutate_bytes, mutate_value
from tools.fuzz.target import Target

LIMIT = 60.0  # seconds for an answer
UID = 1 << 40  # of valid requests: mutated ones have others
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


class Wire(Target):
    packages = ("engine/client.py", "engine/process.py", "engine/loop.py", "engine/admin.py", "engine/streams.py",
                "scheduler", "core", "cache", "text/grammar.py")  # fmt: skip

    def __enter__(self) -> Wire:
        self.home, self.folder = Path.cwd(), tempfile.TemporaryDirectory(prefix="thalweg-fuzz-")
        os.chdir(self.folder.name)  # relative paths of messages lead here
        Path("weights").symlink_to(MODEL)
        options = options_of(model=str(MODEL), context_length=192, max_running_requests=8, max_total_tokens=4096)
        resolved = resolve(options, progress=False)
        self.config, self.tokenizer = resolved.engine, resolved.reader()
        self.context = zmq.Context(1)
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.bind(f"ipc://{self.folder.name}/engine")
        self.error: Exception | None = None
        self.uid = UID
        self.thread = threading.Thread(target=self._engine, daemon=True)
        self.thread.start()
        self._to_engine([])  # it is ready
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(zmq.Again):  # it has ended
            for message in (StopProfile(0), Drain()):  # a profile would record this process to its end
                self.socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        self.thread.join(LIMIT)
        self.socket.close(linger=0)
        self.context.term()
        os.chdir(self.home)
        self.folder.cleanup()

    def _engine(self) -> None:
        channel = ZmqChannel(f"ipc://{self.folder.name}/engine")
        try:
            self.loop = build(self.config, channel)[0]
            self.loop.run()
        except Exception as error:  # noqa: BLE001  `_check` raises it
            self.error = error
        finally:
            channel.close()

    def run(self, entry: Any) -> str:
        messages = [_encoded(message) for message in entry["messages"]]
        if entry["to"] == "front":
            return asyncio.run(self._to_front(messages))
        return self._to_engine([message for message in messages if not _is_drain(message)])

    # ---- to the engine

    def _to_engine(self, messages: list[bytes]) -> str:
        for message in messages:
            self.socket.send(message)
        self.uid += 1
        self.socket.send(msgspec.msgpack.encode(Submit(self.uid, (5, 6), PARAMS)))
        kinds = self._kinds_until_answered(self.uid)
        scheduler, deadline = self.loop.scheduler, time.monotonic() + LIMIT
        uids = tuple(uid for uid in list(scheduler.requests) if abs(uid) < 1 << 63)
        self.socket.send(msgspec.msgpack.encode(Abort(uids)))
        while not scheduler.is_idle or self.loop.inflight:
            self._check(deadline, "requests stay in the engine")
        while any(scheduler.allocator.ref_counts[1:]):
            self._check(deadline, "pages stay acquired")
        return "engine: " + " ".join(sorted(kinds))

    def _kinds_until_answered(self, uid: int) -> set[str]:
        """What the engine answers until the valid request `uid` has ended."""
        kinds, deadline = set[str](), time.monotonic() + LIMIT
        while True:
            self._check(deadline, "a valid request has no answer")
            if not self.socket.poll(20):
                continue
            message = msgspec.msgpack.decode(self.socket.recv(), type=FromEngine)
            kinds.add(type(message).__name__ + (" " + getattr(message, "field", "")).rstrip())
            if isinstance(message, StepUpdate) and any(d.uid == uid and d.finish for d in message.deltas):
                return kinds

    def _check(self, deadline: float, why: str) -> None:
        if self.error is not None:
            raise self.error
        assert time.monotonic() < deadline, why
        time.sleep(0.001)

    # ---- to the front

    async def _to_front(self, messages: list[bytes]) -> str:
        errors: list[str] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: errors.append(repr(context.get("exception") or context["message"]))
        )
        vars(processes)["EngineProcess"] = partial(_FakeProcess, messages)
        front = EngineClient(self.config, self.tokenizer)
        try:
            async with asyncio.timeout(LIMIT):
                await front.start()
                outcome = "an end"
                try:
                    async for _ in front.stream([5, 6], PARAMS):
                        pass
                except ThalwegError as error:
                    outcome = type(error).__name__
                    assert str(error), "an error without a reason"
                assert front.running == 0, "a request stays counted as running"
                state = front.state
                await front.close()
        finally:
            vars(processes)["EngineProcess"] = EngineProcess
        assert not errors, errors
        return f"front: {outcome} {state}"

    def mutate(self, entry: Any, draw: random.Random, donor: Any) -> Any:
        messages, others = list(entry["messages"]), donor["messages"]
        at = draw.randrange(len(messages))
        kind, message = draw.random(), messages[at]
        if kind < 0.1:
            messages[at:at] = [draw.choice(others)] if donor["to"] == entry["to"] else [message]
        elif kind < 0.2 or isinstance(message, str):
            messages[at] = mutate_bytes(_encoded(message).decode("latin-1"), draw)
        else:
            messages[at] = mutate_value(message, draw, draw.choice(others))
        return {"to": entry["to"], "messages": messages[:8]}


class _FakeProcess:
    """See `engine.child.EngineProcess`."""

    is_stopped, how_ended = False, "ended with exit code 0"

    def __init__(self, messages: list[bytes], name: str = "") -> None:
        self.child = _FakeEngine(messages)

    def run(self, config: Any, member: Any, address: str) -> None:
        self.child.run(address)

    def close(self) -> None:
        """Threads cannot be killed; it ends when the front has sent `Drain`."""


class _FakeEngine:
    """A process that is a thread. It says it is ready, sends the messages of an input when a request has come, and ends
    the request.
    """

    exitcode, pid = 0, 0

    def __init__(self, messages: list[bytes]) -> None:
        self.messages = messages
        self.sentinel, self._end = os.pipe()

    def run(self, address: str) -> None:
        self.thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self.thread.start()

    def join(self, timeout: float) -> None:
        self.thread.join(timeout)

    def _run(self, address: str) -> None:
        context = zmq.Context(1)
        socket = context.socket(zmq.PAIR)
        socket.connect(address)
        try:
            ready = EngineReady(os.getpid(), 192, 2048, 64, 8, Report())
            socket.send(msgspec.msgpack.encode(ready))
            while True:
                message = msgspec.msgpack.decode(socket.recv(), type=ToEngine)
                if isinstance(message, Submit):
                    for data in self.messages:
                        socket.send(data)
                    delta = TokenDelta(message.uid, (7, 8), "length")
                    socket.send(msgspec.msgpack.encode(StepUpdate((delta,), time.time())))
                elif not isinstance(message, Abort):
                    return
        finally:
            socket.close(linger=1000)
            context.term()
            os.close(self._end)


def _encoded(message: Any) -> bytes:
    """The message in msgpack; integers that it cannot hold become text."""
    if isinstance(message, str):
        return message.encode("latin-1", "replace")
    return msgspec.msgpack.encode(_fitting(message))


def _fitting(value: Any) -> Any:
    if isinstance(value, dict):
        return {_fitting(key): _fitting(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_fitting(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


def _is_drain(message: bytes) -> bool:
    try:
        return isinstance(msgspec.msgpack.decode(message, type=ToEngine), Drain)
    except UNREADABLE:
        return False
