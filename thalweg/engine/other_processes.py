"""The processes beside the caller's own, of an engine whose first process is the caller's."""

from __future__ import annotations

import gc
import select
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import wait as wait_for

import zmq

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import EngineDead
from thalweg.core.messages import EngineReady, Fatal, FromEngine, Rejected, StepUpdate, Submit, ToEngine
from thalweg.engine.group import RankContext, join, place_of
from thalweg.engine.processes import STOPPED_S, EngineProcesses, socket_folder
from thalweg.parallel.process_axis import abort, disconnect, leave
from thalweg.runner.runner import Runner

LOSS_S = 2.0  # in which the loss of another process is noticed and explained


class OtherProcesses:
    """Starts the processes at once; `join` connects this one with them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._folder = ExitStack()
        self._processes = EngineProcesses(config, self._folder.enter_context(socket_folder()), with_own=True)
        self._processes.start()
        self._alive: set[int] = set()  # uids of sequences there that have not ended
        self._is_closed = False
        self._has_lost = False  # another process has ended
        self._killed = self._ended = ""  # which one, and how; killed: by a signal
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    @property
    def running(self) -> int:
        return len(self._alive)

    def join(self) -> RankContext:
        """Raises RankLost if another process ends meanwhile."""
        return join(self.config, self._processes.first, lambda: "another process has ended" if self._has_lost else "")

    def wait_ready(self) -> None:
        """Until the other processes serve. Raises EngineDead."""
        missing = len(self._processes.children)
        while missing:
            missing -= sum(isinstance(message, EngineReady) for message in self.receive())
            if missing:
                self._processes.wait(1.0)
        self._folder.close()

    def wait(self, timeout: float) -> None:
        """Until another process sends a message, or a rank wakes this one, or so many seconds have passed."""
        wake_pipe = self._processes.first.wake_pipe
        if wake_pipe is None:
            return self._processes.wait(timeout)
        sockets = [int(socket.getsockopt(zmq.FD)) for socket in self._processes.sockets]
        select.select([wake_pipe.receives, *sockets], [], [], timeout)
        wake_pipe.clear()

    def send(self, rank: int, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._alive.add(message.uid)
        try:
            self._processes.send(rank, message)
        except zmq.Again as error:
            raise EngineDead(self._processes.why_ended()) from error

    def receive(self) -> list[FromEngine]:
        """What the other leaders have sent. Raises EngineDead if a process has ended."""
        messages = [message for _, message in self._processes.receive()]
        for message in messages:
            match message:
                case StepUpdate():
                    self._alive -= {delta.uid for delta in message.deltas if delta.finish}
                case Rejected():
                    self._alive.discard(message.uid)
                case Fatal():
                    raise EngineDead(self._cause())
        if self._has_lost:
            raise EngineDead(self._cause())
        return messages

    def _cause(self) -> str:
        """Why another process has ended; "" if none has."""
        self._watcher.join(LOSS_S)
        for _ in self._processes.receive():  # its last message
            pass
        return self._killed or self._processes.failed() or self._ended

    def _watch(self) -> None:
        """Frees the caller's thread from what it waits for, once a process has ended, or a signal has stopped it for
        `STOPPED_S`: ends all others, because a collective of Gloo fails with the connection to any of them.
        """
        children, checks, why, lost = self._processes.children, 0, "", list[bool]()
        while not (ended := wait_for([child.sentinel for child in children], 1.0)) and checks < STOPPED_S:
            why, lost = self._processes.stopped(), [one.is_stopped for one in self._processes.spawned]
            checks = checks + 1 if why and any(lost) else 0
        if ended:
            lost = [child.sentinel in ended for child in children]
        if self._is_closed:
            return
        self._has_lost = True
        step_records = self._processes.first.step_records
        if step_records is not None:
            step_records.mark_lost(place_of(self.config, 1 + lost.index(True)).dp)
        self._killed = self._processes.killed() if ended else why
        self._ended = self._processes.why_ended() if ended else why
        if not self._is_closed:
            for child in children:
                child.kill()
            abort()

    def close(self, error: Exception | None = None) -> None:
        """Ends the processes. error: of a step; if another process has caused it, raises EngineDead that names that."""
        if self._is_closed:
            return
        why = "" if error is None else self._cause()
        self._is_closed = True
        self._processes.kill()
        self._processes.close()
        self._folder.close()
        if self.config.device == "cpu":
            disconnect()
        if why:
            raise EngineDead(why) from error


def end(close: Callable[[], None], runners: list[Runner]) -> None:
    """close: ends the other processes. runners: this process's, whose graphs hold collectives of NCCL, if any."""
    try:
        close()
        for runner in runners:
            runner.disable_graphs()
            gc.collect()
    finally:
        if runners:
            leave()
