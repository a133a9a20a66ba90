"""The agent of a node: runs the node's part of the processes of an engine, and copies plans from and to other nodes.

The first node's client starts its own; on other nodes it is what `thalweg serve --node-rank N` runs. An agent that
loses the first node ends its processes and connects again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import msgspec

from thalweg import __version__
from thalweg.config.engine import EngineConfig
from thalweg.core import logs
from thalweg.core.errors import EngineDead
from thalweg.engine.child import EngineProcess
from thalweg.engine.group import Member, has_pending_plans, members_of, timeout_of
from thalweg.engine.node_link import (
    HEARTBEAT_S,
    LOST_S,
    Hello,
    Kill,
    Leave,
    LinkLost,
    LinkMessage,
    NodeLink,
    Processes,
    Signal,
    Start,
    fingerprint,
    interface_of,
    split_address,
)
from thalweg.parallel.process_axis import StoreAddress
from thalweg.parallel.relay import Mirrors, Relay, RelayInbox

log = logging.getLogger("thalweg.node")
RETRY_S = 0.5  # between two attempts to connect
DRAIN_MARGIN_S = 10.0
SWITCH_S = 1e-4  # a thread that polls gives way to one that relays after this


class NodeAgent:
    """Runs the processes of one node. paths: fields of a configuration that are this node's own, such as the folder of
    the checkpoint.
    """

    def __init__(self, config: EngineConfig, node: int, paths: Mapping[str, str]) -> None:
        """config: as this node has resolved it; the first node's replaces it at the first start."""
        self.config, self.node, self.paths = config, node, paths
        self.host, self.port = split_address(config.dist_init_addr)
        self.leaves_at = math.inf  # time.monotonic() after which it does not wait for the first node's drain
        self.is_connected = False
        self._id, self._killed = random.getrandbits(32), 0
        self._inbox: RelayInbox | None = None
        self._start, self._processes = 0, list[EngineProcess]()
        self._spare = list[EngineProcess]()  # that import already
        self._members = list[Member]()

    def run(self) -> None:
        """Until the first node says leave. Raises EngineDead if it refuses this node; of the first node's own agent
        also when the client has ended.
        """
        while True:
            link = self._connected()
            try:
                if self._serve(link):
                    return
            except LinkLost as error:
                if not self.node:
                    raise EngineDead(f"the client is lost: {error}") from error
                log.error("the first node is lost: %s; waiting for it", error)
            finally:
                self.is_connected = False
                self._end()
                link.close()

    def _connected(self) -> NodeLink:
        """Raises EngineDead if there is no first node for --restart-timeout."""
        begun, address = time.monotonic(), self.config.dist_init_addr
        is_waiting, limit = False, self.config.restart_timeout or math.inf
        while True:
            try:
                connection = socket.create_connection((self.host, self.port), timeout=LOST_S)
                # the first node calls itself, and its end may have the interface's first address
                own_host = (connection.getsockname() if self.node else connection.getpeername())[0]
                link = NodeLink(connection)
            except OSError as error:
                if time.monotonic() - begun > limit:
                    raise EngineDead(f"no first node at {address} for {limit:g} s (--restart-timeout)") from error
                if not is_waiting:
                    log.info("waiting for the first node at %s: %s", address, error)
                is_waiting = True
                time.sleep(RETRY_S)
                continue
            if name := interface_of(own_host):  # libraries would take the first interface
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            if self._inbox is None:
                self._inbox = RelayInbox(self._fail, own_host)
            self.is_connected = True
            return link

    def _serve(self, link: NodeLink) -> bool:
        """True: this node is not needed any more. Raises LinkLost and EngineDead."""
        assert self._inbox is not None, "it is made with the first connection"
        model = fingerprint(Path(self.config.model_path))
        link.send(Hello(__version__, self.node, self.config.nnodes, self._inbox.port, self._id, model))
        self._prepare()
        last_received, last_sent, sent_codes = time.monotonic(), 0.0, list[int | None]()
        while True:
            living = [process.child.sentinel for process in self._processes if process.child.exitcode is None]
            if link.socket in wait_for([link.socket, *living], HEARTBEAT_S):
                message, last_received = link.receive(), time.monotonic()
                if isinstance(message, Leave):
                    if message.error:
                        raise EngineDead(message.error)
                    return True
                self._carry_out(message)
            elif time.monotonic() - last_received > LOST_S:
                raise LinkLost(f"no word for {LOST_S:g} s")
            codes = [process.child.exitcode for process in self._processes]
            if time.monotonic() > self.leaves_at:
                return True
            if codes != sent_codes or time.monotonic() - last_sent > HEARTBEAT_S:
                sent_codes, last_sent = codes, time.monotonic()
                link.send(self._report())

    def _prepare(self) -> None:
        while len(self._spare) < self.config.node_processes:
            self._spare.append(EngineProcess())

    def _carry_out(self, message: LinkMessage) -> None:
        match message:
            case Start():
                self._end()
                self._begin(message)
            case Kill():
                self._killed = message.start
                if message.start == self._start:
                    self._kill()
            case Signal():
                with contextlib.suppress(ProcessLookupError, IndexError):  # it has just ended
                    os.kill(self._processes[message.process].child.pid or 0, message.number)
            case _:
                pass

    def _begin(self, start: Start) -> None:
        assert self._inbox is not None, "it is made with the first connection"
        config, mirrors = msgspec.structs.replace(start.config, **self.paths), Mirrors()
        self.config = config  # the first node decides
        rendezvous = StoreAddress(self.host, start.store_port, f"start{start.number}")
        self._members = members_of(config, rendezvous, self.node, mirrors)
        self._start = start.number
        self._inbox.relay = Relay(mirrors, start.number, start.relays, timeout_of(config), self._fail)
        self._prepare()
        count = config.node_processes
        self._processes, self._spare = self._spare[:count], self._spare[count:]
        for process, member, address in zip(self._processes, self._members, start.addresses, strict=True):
            process.run(config, member, address)
        log.info("starting %d processes", len(self._processes))
        if start.number == self._killed:  # the order to kill it came first
            self._kill()

    def _report(self) -> Processes:
        own = self._processes
        return Processes(
            self._start,
            tuple(process.child.pid or 0 for process in own),
            tuple(process.child.exitcode for process in own),
            tuple(process.is_stopped for process in own),
            tuple(has_pending_plans(self.config, member) for member, _ in zip(self._members, own, strict=False)),
            time.time(),
        )

    def _fail(self, error: str) -> None:
        """A process takes no plans, so this start is over."""
        log.error("%s", error)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.child.kill()

    def _end(self) -> None:
        self._kill()
        for process in self._processes:
            process.close()
        if self._inbox is not None:
            relay, self._inbox.relay = self._inbox.relay, None
            if relay is not None:
                relay.close()
        self._processes = []

    def close(self) -> None:
        self._end()
        for process in self._spare:
            process.close()


def run_agent(config: EngineConfig, node: int, paths: Mapping[str, str], drain_timeout: float = 0.0) -> None:
    """Runs the agent of this node; see `NodeAgent.run`. drain_timeout: seconds after SIGTERM in which the first node
    may finish requests.
    """
    sys.setswitchinterval(SWITCH_S)
    agent = NodeAgent(config, node, paths)

    def leave(number: int, frame: object) -> None:
        if not agent.is_connected or agent.leaves_at < math.inf:
            sys.exit(0)
        log.info("SIGTERM: waiting for the first node to finish; send the signal again to stop now")
        agent.leaves_at = time.monotonic() + drain_timeout + DRAIN_MARGIN_S

    if node:
        signal.signal(signal.SIGTERM, leave)
    try:
        agent.run()
    finally:
        agent.close()


def main(config: EngineConfig) -> None:
    """Entry of the first node's own agent, a process of the client."""
    for number in signal.SIGINT, signal.SIGTERM:  # the client decides when the engine ends
        signal.signal(number, signal.SIG_IGN)
    logs.configure(config.log_level, config.log_format)
    try:
        run_agent(config, 0, {})
    except EngineDead as error:
        log.debug("%s", error)
