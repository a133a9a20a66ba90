"""The nodes of an engine, as its client sees them: an agent on each runs the processes there.

The client listens at `--dist-init-addr`. Agents connect, and connect again after they were lost; a start of the engine
waits until all nodes are there. The processes of a node that is lost count as killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore  # torch.distributed has it without exporting it

from thalweg import __version__
from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine import node_agent
from thalweg.engine.child import SPAWN
from thalweg.engine.group import Member
from thalweg.engine.node_link import (
    HEARTBEAT_S,
    LOST_S,
    Heartbeat,
    Hello,
    Kill,
    Leave,
    LinkLost,
    NodeLink,
    Processes,
    Signal,
    Start,
    fingerprint,
    split_address,
)

log = logging.getLogger("thalweg.nodes")
REMIND_S = 30.0  # between two log lines about nodes that are missing
KILLED = -9  # exit code of the processes of a lost node
CLOCK_MESSAGES = 32  # the last of a node, which tell its clock: it may have been set since
SILENT_HEARTBEATS = 3  # after so many another agent may take a node's place


class RemoteProcess:
    """A process that an agent runs; what `EngineProcess` and its `child` are on the client's own node."""

    def __init__(self, name: str, kill: Callable[[], None], signal: Callable[[int], None]) -> None:
        self.name, self.kill, self.signal = name, kill, signal
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.is_stopped = self.has_pending_plans = False
        self.how_ended = ""
        self.waits_for: Callable[[], str] = str  # names of nodes, until the processes of all start
        self.sentinel, self._living = os.pipe()  # readable once the process has ended
        self._ended, self._lock = threading.Event(), threading.Lock()

    @property
    def child(self) -> RemoteProcess:
        return self

    def set_ended(self, code: int, how: str = "") -> None:
        with self._lock:
            if self.exitcode is None:
                self.how_ended, self.exitcode = how or f"ended with exit code {code}", code
                os.close(self._living)
                self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def close(self) -> None:
        """Kills the process if it lives."""
        if self.exitcode is None:
            self.kill()
            if not self._ended.wait(LOST_S):
                self.set_ended(KILLED)

    def __del__(self) -> None:
        os.close(self.sentinel)


class NodeClocks:
    """What to add to the times of other nodes. A message comes after it was sent, so the least difference of the last
    ones is that between the clocks and the time of the way.
    """

    def __init__(self) -> None:
        self._differences: dict[int, deque[float]] = {}

    def hear(self, node: int, sent: float, now: float) -> None:
        """A message has come; times by the clocks of its sender and of this node."""
        self._differences.setdefault(node, deque(maxlen=CLOCK_MESSAGES)).append(now - sent)

    def here(self, node: int, at: float) -> float:
        """When a message that the node sent at that time could be here. So what an event causes elsewhere is later
        than the event.
        """
        return at + min(self._differences.get(node, (0.0,)))


class Nodes:
    """All nodes of an engine. The methods are for the client's thread; others watch the connections."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises UnsupportedConfig if the address is taken."""
        self.count, self.per_node, self.address = config.nnodes, config.node_processes, config.dist_init_addr
        self.host, port = split_address(self.address)
        try:
            self._listener = socket.create_server((self.host, port))
        except OSError as error:
            raise UnsupportedConfig(f"dist_init_addr: cannot listen at {self.address}: {error.strerror}") from error
        self._store = TCPStore(self.host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LOST_S))
        self._links, self._relays = dict[int, NodeLink](), dict[int, str]()
        self._agents, self._heard = dict[int, int](), dict[int, float]()  # numbers of agents; when they sent something
        self.clocks = NodeClocks()
        self._model = fingerprint(Path(config.model_path))
        self._changed = threading.Condition()  # holds for all fields
        self._start = random.getrandbits(30)  # agents may have heard of another server's starts
        self._processes = list[RemoteProcess]()  # of the last start
        self._is_started = self._is_closed = False
        self._config = config
        self._start_own_agent()
        for work in self._accept, self._send_heartbeats:
            threading.Thread(target=work, name="nodes", daemon=True).start()

    def _start_own_agent(self) -> None:
        self._own_agent = SPAWN.Process(target=node_agent.main, args=(self._config,), name="thalweg-node")
        self._own_agent.start()
        atexit.register(self._own_agent.kill)  # else multiprocessing would wait for it at exit

    def start(self, config: EngineConfig, members: Sequence[Member], addresses: Sequence[str]) -> list[RemoteProcess]:
        """The processes of a new engine, which start once all nodes are there. addresses: of the client's sockets."""
        if not self._own_agent.is_alive():
            self._start_own_agent()
        with self._changed:
            self._start, self._is_started, number = self._start + 1, False, self._start + 1
            made = self._processes = [
                RemoteProcess(member.name, lambda: self._kill(number), self._signal(i))
                for i, member in enumerate(members)
            ]
            for process in made:
                process.waits_for = self._missing
        threading.Thread(target=self._begin, args=(number, config, tuple(addresses)), daemon=True).start()
        return made

    def close(self) -> None:
        """The agents leave."""
        with self._changed:
            self._is_closed = True
            links = list(self._links.values())
            self._changed.notify_all()
        for link in links:
            try:
                link.send(Leave())
            except LinkLost:
                continue
        self._listener.shutdown(socket.SHUT_RDWR)  # frees the thread that accepts
        self._listener.close()
        self._own_agent.join(LOST_S)
        self._own_agent.kill()
        atexit.unregister(self._own_agent.kill)
        for link in links:
            link.close()

    # ---- starts

    def _begin(self, number: int, config: EngineConfig, addresses: tuple[str, ...]) -> None:
        with self._changed:
            if not self._wait_for_all(number):
                return
            relays = tuple(self._relays[node] for node in range(self.count))
            links, self._is_started = dict(self._links), True
            for process in self._processes:
                process.waits_for = str
        for node, link in links.items():
            own = addresses[node * self.per_node : (node + 1) * self.per_node]
            try:
                link.send(Start(number, config, own, relays, self._store.port))
            except LinkLost as error:
                self._lose(node, link, str(error))

    def _wait_for_all(self, number: int) -> bool:
        """False: this start is over before it began. The caller holds the lock."""
        while self._is_current(number) and len(self._links) < self.count:
            if not self._changed.wait(REMIND_S):
                log.warning("waiting at %s for %s", self.address, self._missing())
        return self._is_current(number)

    def _missing(self) -> str:
        return ", ".join(f"node {node}" for node in range(self.count) if node not in self._links)

    def _is_current(self, number: int) -> bool:
        return not self._is_closed and number == self._start and self._processes[0].exitcode is None

    def _kill(self, number: int) -> None:
        with self._changed:
            if number != self._start:
                return
            if not self._is_started:
                for process in self._processes:
                    process.set_ended(KILLED)
                self._changed.notify_all()
                return
            links = dict(self._links)
        for node, link in links.items():
            try:
                link.send(Kill(number))
            except LinkLost as error:
                self._lose(node, link, str(error))

    def _signal(self, process: int) -> Callable[[int], None]:
        node, own = divmod(process, self.per_node)

        def send(number: int) -> None:
            if (link := self._links.get(node)) is not None:
                try:
                    link.send(Signal(own, number))
                except LinkLost as error:
                    self._lose(node, link, str(error))

        return send

    # ---- connections

    def _accept(self) -> None:
        while True:
            try:
                link = NodeLink(self._listener.accept()[0])
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("a node cannot connect: %s", error)
                time.sleep(HEARTBEAT_S)
                continue
            threading.Thread(target=self._welcome, args=(link,), name="node", daemon=True).start()

    def _welcome(self, link: NodeLink) -> None:
        """Reads what the agent of a node sends until it is lost."""
        node = -1
        try:
            hello = link.receive()
            if not isinstance(hello, Hello):
                raise LinkLost("its first message is no Hello")
            if (error := self._join(hello.node, link, hello)) or self._is_closed:
                log.error("a node is refused: %s", error or "the server ends")
                link.send(Leave(error))
                return
            node = hello.node
            while True:
                message = link.receive()
                self._heard[node] = time.monotonic()
                if isinstance(message, Processes):
                    self.clocks.hear(node, message.at, time.time())
                    self._update(node, message)
        except LinkLost as error:
            self._lose(node, link, str(error))
        finally:
            link.close()

    def _refusal(self, hello: Hello) -> str:
        if hello.version != __version__:
            return f"node_rank {hello.node}: it has Thalweg {hello.version}, and the first node {__version__}"
        if hello.nnodes != self.count:
            return f"nnodes: node {hello.node} has --nnodes {hello.nnodes}, and the first node {self.count}"
        if not 0 <= hello.node < self.count:
            return f"node_rank: {hello.node} is none of --nnodes {self.count}, which count from 0"
        if hello.model != self._model:
            return (
                f"model: node {hello.node} has other files of {Path(self._config.model_path).name} than the first node"
            )
        is_alive = time.monotonic() - self._heard.get(hello.node, 0.0) < SILENT_HEARTBEATS * HEARTBEAT_S
        if hello.node in self._links and is_alive and self._agents[hello.node] != hello.agent:
            return f"node_rank: there is a node {hello.node} already; each node has its own --node-rank"
        return ""

    def _join(self, node: int, link: NodeLink, hello: Hello) -> str:
        """→ why the node is refused; "": it is not."""
        host = link.peer if node else self.host
        with self._changed:
            if error := self._refusal(hello):
                return error
            if (earlier := self._links.get(node)) is not None:
                self._lose(node, earlier, "it has connected again")
            self._links[node], self._agents[node], self._heard[node] = link, hello.agent, time.monotonic()
            self._relays[node] = f"tcp://{host}:{hello.relay_port}"
            self._changed.notify_all()
        if node:
            log.info("node %d (%s) has joined", node, host)
        return ""

    def _update(self, node: int, report: Processes) -> None:
        with self._changed:
            if report.start != self._start or not self._is_started:
                return
            own = self._processes[node * self.per_node : (node + 1) * self.per_node]
            values = zip(own, report.pids, report.exit_codes, report.stopped, report.has_pending_plans, strict=False)
            for process, pid, code, is_stopped, has_pending_plans in values:
                process.pid, process.is_stopped, process.has_pending_plans = pid, is_stopped, has_pending_plans
                if code is not None:
                    process.set_ended(code)

    def _lose(self, node: int, link: NodeLink, why: str) -> None:
        with self._changed:
            if self._links.get(node) is not link:
                return
            del self._links[node]
            if self._is_closed:
                return
            text = f"is lost with node {node} ({self._relays[node]}): {why}"
            if self._is_started:
                for process in self._processes[node * self.per_node : (node + 1) * self.per_node]:
                    process.set_ended(KILLED, text)
        link.close()
        log.error("node %d is lost: %s", node, why)

    def _send_heartbeats(self) -> None:
        while not self._is_closed:
            for node, link in list(self._links.items()):
                try:
                    link.send(Heartbeat())
                except LinkLost as error:
                    self._lose(node, link, str(error))
            time.sleep(HEARTBEAT_S)
