"""The processes of an engine, as their client starts, reaches and watches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import zmq

from thalweg.config.engine import EngineConfig
from thalweg.core.messages import EngineReady, Fatal, FromEngine, ToEngine
from thalweg.engine.child import EngineProcess
from thalweg.engine.group import Member, leaders_of, members_of, place_of

BLAME_S = 0.5  # after a process is killed, another may report a broken connection first


class EngineProcesses:
    """All processes of an engine, or those beside the caller's own. Each has a PAIR socket of msgpack messages."""

    def __init__(
        self, config: EngineConfig, folder: Path, with_own: bool = False, first: EngineProcess | None = None
    ) -> None:
        """folder: for sockets and the start's files. with_own: the caller is the first process itself. first: a process
        that imports already.
        """
        self.members = members_of(config, folder)
        self.config, self.own = config, int(with_own)
        self.context = zmq.Context(1)
        self.sockets: list[zmq.Socket[bytes]] = []  # of the spawned processes
        self.spawned = [] if first is None else [first]
        self.addresses = [f"ipc://{folder}/engine{i}" for i in range(len(self.members) - self.own)]
        for address in self.addresses:
            socket = self.context.socket(zmq.PAIR)
            socket.set_hwm(0)
            socket.bind(address)
            self.sockets.append(socket)
        self.leaders = [self.members.index(member) for member in leaders_of(config, self.members)]
        self.fatals: list[Fatal] = []  # that have come
        self.serving: set[int] = set()  # sockets whose process serves
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode

    def start(self) -> None:
        members = self.members[self.own :]
        self.spawned += [EngineProcess(member.name) for member in members[len(self.spawned) :]]
        for spawned, member, address in zip(self.spawned, members, self.addresses, strict=True):
            spawned.run(self.config, member, address)

    @property
    def children(self) -> list[BaseProcess]:
        """The spawned processes."""
        return [spawned.child for spawned in self.spawned]

    @property
    def first(self) -> Member:
        return self.members[0]

    @property
    def leader_pids(self) -> list[int]:
        return [self._child(leader).pid or 0 for leader in self.leaders if leader >= self.own]

    def _child(self, member: int) -> BaseProcess:
        return self.children[member - self.own]

    # ---- messages

    def send(self, leader: int, message: ToEngine) -> None:
        """leader: its number among the leaders. Raises zmq.Again if it is gone."""
        self.sockets[self.leaders[leader] - self.own].send(self._encode(message), zmq.NOBLOCK)

    def receive(self) -> Iterator[tuple[int, FromEngine]]:
        """What has come, each with the number of its leader, or -1 for a follower's. Raises as decoding does."""
        numbers = {member: number for number, member in enumerate(self.leaders)}
        for i, socket in enumerate(self.sockets):
            while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                message = self._decode(socket.recv(zmq.NOBLOCK))
                if isinstance(message, Fatal):
                    self.fatals.append(message)
                if isinstance(message, EngineReady):
                    self.serving.add(i)
                yield numbers.get(i + self.own, -1), message

    def wait(self, timeout: float) -> None:
        """Until a message has come, or a process has ended, or so many seconds have passed."""
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        for child in self.children:
            poller.register(child.sentinel, zmq.POLLIN)
        poller.poll(int(timeout * 1000))

    # ---- their end

    def why_ended(self) -> str:
        """Which process has ended and how; "" if none has. One that was killed is named before those that miss it."""
        return self.killed() or self._ended(lambda code: code > 0) or self._ended(lambda code: True)

    def failed(self) -> str:
        """The error of the process that failed first; "" if none has sent one. Others may miss it and fail, too."""
        return min(self.fatals, key=lambda fatal: fatal.at).message if self.fatals else ""

    def killed(self, or_stopped: bool = False) -> str:
        """As `why_ended`, of a process that a signal has ended. or_stopped: or stopped, which others may report first,
        too.
        """
        deadline = time.monotonic() + BLAME_S
        while time.monotonic() < deadline:
            if killed := self._ended(lambda code: code < 0) or (or_stopped and self._stopped()):
                return killed
            if len(self.members) == 1 and self._ended(lambda code: True):
                break
            time.sleep(0.01)
        return ""

    def _ended(self, is_it: Callable[[int], bool]) -> str:
        for member, child in self._others():
            if child.exitcode is not None and is_it(child.exitcode):
                return f"{member.name or 'the engine process'} ended with exit code {child.exitcode}"
        return ""

    def stuck(self) -> str:
        """The processes that are behind their leader, or stopped; "" if none is."""
        if stopped := self._stopped():
            return stopped
        behind = []
        for member in self.members:
            plans, number = member.plans, place_of(self.config, member.rank).number
            if plans is not None and number and plans.carried_out(number - 1) < plans.sent:
                behind.append(member.name)
        return f"behind its leader: {' and '.join(behind)}" if behind else ""

    def _stopped(self) -> str:
        names = [member.name for member, child in self._others() if _is_stopped(child.pid)]
        return f"{' and '.join(names)}: stopped by a signal" if names else ""

    def states(self) -> dict[str, str]:
        """Of each spawned process, by name: starting, ready, stopped or ended."""
        return {member.name: self._state(i, child) for i, (member, child) in enumerate(self._others())}

    def _state(self, number: int, child: BaseProcess) -> str:
        if child.exitcode is not None:
            return "ended"
        if _is_stopped(child.pid):
            return "stopped"
        return "ready" if number in self.serving else "starting"

    def _others(self) -> Iterator[tuple[Member, BaseProcess]]:
        return zip(self.members[self.own :], self.children, strict=True)

    def join(self, timeout: float) -> None:
        """Waits so many seconds for all to end, and kills those that have not."""
        deadline = time.monotonic() + timeout
        try:
            for child in self.children:
                child.join(max(deadline - time.monotonic(), 0))
        finally:  # the wait may be interrupted
            self.kill()

    def kill(self) -> None:
        for spawned in self.spawned:
            spawned.close()

    def close(self) -> None:
        """After all have ended."""
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()


def _is_stopped(pid: int | None) -> bool:
    """Whether a signal has stopped a process, where the system says so."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
