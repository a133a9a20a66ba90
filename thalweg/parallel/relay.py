"""Copies plans and step records between nodes, so that the processes of each node find them in their own shared memory.

On the node of a leader the relay is one more follower: it reads each plan and sends it to the nodes that have
followers of that leader, where a relay writes it as the leader would. Each relay also sends the step records of its own
leaders to the nodes with other ones. Nodes are connected by ZeroMQ over TCP: one PULL socket of each, and PUSH sockets
to it.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import zmq

from thalweg.core.errors import RankLost
from thalweg.parallel.plan_channel import PlanChannel, PlanReader, PlanWriter
from thalweg.parallel.shared_memory import WakePipe
from thalweg.parallel.step_records import StepRecords

Context = zmq.Context[zmq.Socket[bytes]]
# number of the start; of the channel or the copy; place of a record, or PLAN; of plans how many were sent before
HEAD = struct.Struct("<IIHQ")
HEARTBEAT_MS = 2000  # keeps idle connections known to firewalls
PLAN = 0xFFFF


class SentPlans(NamedTuple):
    """The plans of a leader on this node. follower: the relay's number among its followers."""

    channel: PlanChannel
    follower: int
    nodes: Sequence[int]  # those that have others


class SharedRecords(NamedTuple):
    """The step records of a copy with leaders on several nodes."""

    records: StepRecords
    own: Sequence[int]  # data-parallel ranks whose leaders are on this node
    nodes: Sequence[int]  # those of the others
    wake_pipe: WakePipe  # in place of the leaders on other nodes


@dataclass
class Mirrors:
    """What a node shares with others. Channels are numbered by their leader's process, records by their copy."""

    sent: dict[int, SentPlans] = field(default_factory=dict)
    received: dict[int, PlanChannel] = field(default_factory=dict)
    records: dict[int, SharedRecords] = field(default_factory=dict)


class RelayInbox:
    """A node's PULL socket, and a thread that hands what comes to the relay of the current start."""

    def __init__(self, failed: Callable[[str], None], host: str) -> None:
        """failed: is called with the error of a relay. host: of this node, where other nodes reach it."""
        self._context: Context = zmq.Context(1)
        self._socket, self._failed = self._context.socket(zmq.PULL), failed
        self._socket.set_hwm(0)
        self.port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.relay: Relay | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            message, relay = self._socket.recv(), self.relay
            try:
                if relay is not None:
                    relay.receive(message)
            except Exception as error:  # noqa: BLE001 - anything may come from the network
                if relay is self.relay:  # else its start is over already
                    self._failed(f"a message between nodes: {error!r}")


class Relay:
    """Of one node and one start of the engine. `receive` gets what other nodes send."""

    def __init__(
        self, mirrors: Mirrors, start: int, addresses: Sequence[str], timeout: float, failed: Callable[[str], None]
    ) -> None:
        """addresses: of every node's PULL socket. timeout: seconds that a follower may take to make room for a plan.
        failed: is called with the error of a thread.
        """
        self.start, self.addresses, self.failed = start, addresses, failed
        self.records, self._is_closed = mirrors.records, False
        self._writers = {
            number: PlanWriter(channel, timeout, lambda: self._is_closed)
            for number, channel in mirrors.received.items()
        }
        works: list[tuple[WakePipe, Callable[[Context], None]]] = []
        for number, plans in mirrors.sent.items():
            wake_pipe = plans.channel.wake_pipes[1 + plans.follower]
            works.append((wake_pipe, partial(self._send_plans, number=number, plans=plans)))
        for number, shared in mirrors.records.items():
            works.append((shared.wake_pipe, partial(self._send_records, number=number, shared=shared)))
        self._wake_pipes = [wake_pipe for wake_pipe, _ in works]
        self._wake_pipes += [channel.wake_pipes[0] for channel in mirrors.received.values()]
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for _, work in works]
        for thread in self._threads:
            thread.start()

    def receive(self, message: bytes) -> None:
        """Raises RankLost if a follower takes no plan in time, or the relay is closed."""
        start, number, place, count = HEAD.unpack_from(message)
        if start != self.start:  # of an engine that has ended
            return
        if place == PLAN:
            if count != (sent := self._writers[number].channel.sent):
                raise RankLost(f"plans {sent} to {count} were lost between nodes")
            return self._writers[number].write(message[HEAD.size :])
        shared = self.records[number]
        shared.records.put(place, message[HEAD.size :])
        for rank in shared.own:
            shared.records.wake_pipes[rank].wake()

    def close(self) -> None:
        self._is_closed = True
        for wake_pipe in self._wake_pipes:
            wake_pipe.wake()
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[Context], None]) -> None:
        context: Context = zmq.Context(1)  # sockets belong to one thread
        try:
            work(context)
        except RankLost as error:
            self.failed(str(error))
        finally:
            context.destroy()

    def _sockets(self, context: Context, nodes: Sequence[int]) -> list[zmq.Socket[bytes]]:
        sockets = [context.socket(zmq.PUSH) for _ in nodes]
        for socket, node in zip(sockets, nodes, strict=True):
            socket.set_hwm(0)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.LINGER, 0)  # else it would wait at its end for a node that is lost
            socket.connect(self.addresses[node])
        return sockets

    def _send_plans(self, context: Context, number: int, plans: SentPlans) -> None:
        sockets, count = self._sockets(context, plans.nodes), 0
        reader = PlanReader(plans.channel, plans.follower, lambda: self._is_closed)
        while (message := reader.read()) is not None:
            for socket in sockets:
                socket.send(HEAD.pack(self.start, number, PLAN, count) + message)
            reader.done()
            count += 1

    def _send_records(self, context: Context, number: int, shared: SharedRecords) -> None:
        sockets, places = self._sockets(context, shared.nodes), shared.records.places(shared.own)
        sent, news = dict[int, bytes](), dict[int, bytes]()

        def look() -> bool:
            for place in places:
                if (record := shared.records.get(place)) is not None and sent.get(place) != record:
                    news[place] = record
            return bool(news) or self._is_closed

        while not self._is_closed:
            shared.wake_pipe.wait(look, time.monotonic() + 3600)
            for place, record in news.items():
                for socket in sockets:
                    socket.send(HEAD.pack(self.start, number, place, 0) + record)
            sent |= news
            news.clear()
