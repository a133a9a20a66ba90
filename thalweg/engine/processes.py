"""The processes of an engine, as their client starts, reaches and watches them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import zmq

from thalweg.config.engine import EngineConfig
from thalweg.core.messages import EngineReady, Fatal, FromEngine, ToEngine
from thalweg.engine.child import EngineProcess
from thalweg.engine.group import Member, has_pending_plans, leaders_of, members_of, named_members
from thalweg.engine.node_link import split_address
from thalweg.engine.nodes import Nodes, RemoteProcess

FOLDER = "thalweg-engine-"  # prefix of the folders with sockets
STOPPED_S = 5.0  # after which a process that a signal has stopped is missed, while sequences wait
BLAME_S = 0.5  # after a process is killed, another may report a broken connection first


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder, locked while it is in use. Removes this user's folders that a killed start has left."""
    for folder in Path(tempfile.gettempdir()).glob(FOLDER + "*"):
        with contextlib.suppress(OSError):  # another user's, or locked
            # a folder is not locked at once
            if folder.stat().st_mtime < time.time() - 60 and folder.stat().st_uid == os.getuid():
                with _locked(folder):
                    shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True) as name, _locked(folder := Path(name)):
        yield folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


class EngineProcesses:
    """All processes of an engine, or those beside the caller's own. Each has a PAIR socket of msgpack messages."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        with_own: bool = False,
        first: EngineProcess | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """folder: for sockets and the start's files. with_own: the caller is the first process itself. first: a process
        that imports already. nodes: run the processes, if there are several.
        """
        self.members = members_of(config, folder) if nodes is None else named_members(config)
        self.config, self.own, self.nodes = config, int(with_own), nodes
        self.context = zmq.Context(1)
        self.sockets: list[zmq.Socket[bytes]] = []  # of the spawned processes
        self.spawned: list[EngineProcess | RemoteProcess] = [] if first is None else [first]
        self.addresses = list[str]()
        host = "" if nodes is None else split_address(config.dist_init_addr)[0]
        for i in range(len(self.members) - self.own):
            socket = self.context.socket(zmq.PAIR)
            socket.set_hwm(0)
            socket.bind(f"ipc://{folder}/engine{i}" if nodes is None else f"tcp://{host}:*")
            self.addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            self.sockets.append(socket)
        self.leaders = [self.members.index(member) for member in leaders_of(config, self.members)]
        self.fatals: list[tuple[float, str]] = []  # errors that have come; when they were, by the client's clock
        self.serving: set[int] = set()  # sockets whose process serves
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode

    def start(self) -> None:
        members = self.members[self.own :]
        if self.nodes is not None:
            self.spawned += self.nodes.start(self.config, members, self.addresses)
            return
        own = [spawned for spawned in self.spawned if not isinstance(spawned, RemoteProcess)]
        own += [EngineProcess(member.name) for member in members[len(own) :]]
        self.spawned = [*own]
        for spawned, member, address in zip(own, members, self.addresses, strict=True):
            spawned.run(self.config, member, address)

    @property
    def children(self) -> list[BaseProcess | RemoteProcess]:
        """The spawned processes."""
        return [spawned.child for spawned in self.spawned]

    @property
    def first(self) -> Member:
        return self.members[0]

    def signal_leaders(self, number: int) -> None:
        """Sends a signal to the processes with a scheduler."""
        for leader in self.leaders:
            if leader >= self.own:
                self.spawned[leader - self.own].signal(number)

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
                    self.fatals.append((self._here(i, message.at), message.message))
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
        return min(self.fatals)[1] if self.fatals else ""

    def _here(self, process: int, at: float) -> float:
        """A time by the clock of a process's node, by the client's."""
        return at if self.nodes is None else self.nodes.clocks.here(process // self.nodes.per_node, at)

    def killed(self, or_stopped: bool = False) -> str:
        """As `why_ended`, of a process that a signal has ended. or_stopped: or stopped, which others may report first,
        too.
        """
        deadline = time.monotonic() + BLAME_S
        while time.monotonic() < deadline:
            if killed := self._ended(lambda code: code < 0) or (or_stopped and self.stopped()):
                return killed
            if len(self.members) == 1 and self._ended(lambda code: True):
                break
            time.sleep(0.01)
        return ""

    def _ended(self, is_it: Callable[[int], bool]) -> str:
        for member, spawned in self._others():
            code = spawned.child.exitcode
            if code is not None and is_it(code):
                return f"{member.name or 'the engine process'} {spawned.how_ended}"
        return ""

    def stuck(self) -> str:
        """The processes that are behind their leader, or stopped; "" if none is."""
        if stopped := self.stopped():
            return stopped
        behind = [member.name for member in self.members if has_pending_plans(self.config, member)]
        behind += [one.name for one in self.spawned if isinstance(one, RemoteProcess) and one.has_pending_plans]
        return f"behind its leader: {' and '.join(behind)}" if behind else ""

    def stopped(self) -> str:
        """The processes that a signal has stopped; "" if none is."""
        names = [member.name for member, spawned in self._others() if spawned.is_stopped]
        return f"{' and '.join(names)}: stopped by a signal" if names else ""

    def states(self) -> dict[str, str]:
        """Of each spawned process, by name: starting, ready, stopped or ended."""
        return {member.name: self._state(i, spawned) for i, (member, spawned) in enumerate(self._others())}

    def _state(self, number: int, spawned: EngineProcess | RemoteProcess) -> str:
        if spawned.child.exitcode is not None:
            return "ended"
        if spawned.is_stopped:
            return "stopped"
        if isinstance(spawned, RemoteProcess) and (node := spawned.waits_for()):
            return f"waits for {node}"
        return "ready" if number in self.serving else "starting"

    def _others(self) -> Iterator[tuple[Member, EngineProcess | RemoteProcess]]:
        return zip(self.members[self.own :], self.spawned, strict=True)

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
