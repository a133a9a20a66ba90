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
from collections import deque
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


class ReceivedPlans:
    """The plans of a leader on another node. Those for which the ring has no room wait in a thread for the followers,
    so that what comes for other processes does not wait behind them.
    """

    def __init__(self, writer: PlanWriter, failed: Callable[[str], None]) -> None:
        """failed: is called with the error if a follower makes no room in time."""
        self._writer, self._failed, self._count = writer, failed, 0
        self._waiting, self._lock = deque[bytes](), threading.Lock()
        self._thread: threading.Thread | None = None  # while plans wait

    def write(self, message: bytes, count: int) -> None:
        """count: of the plans that the leader sent before. Raises RankLost."""
        if count != self._count:
            raise RankLost(f"plans {self._count} to {count} were lost between nodes")
        self._count += 1
        with self._lock:
            if self._thread is None and self._writer.has_room(len(message)):
                return self._writer.write(message)
            self._waiting.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_waiting, daemon=True)
                self._thread.start()

    def _write_waiting(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._waiting:
                        self._thread = None
                        return
                    message = self._waiting.popleft()
                self._writer.write(message)
        except RankLost as error:
            if not self._writer.is_closed():
                self._failed(str(error))

    def join(self) -> None:
        """Waits for the thread, which ends once the writer is closed."""
        if (thread := self._thread) is not None:
            thread.join()


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
        self._received = {
            number: ReceivedPlans(PlanWriter(channel, timeout, lambda: self._is_closed), failed)
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
        """Raises RankLost if plans are missing."""
        start, number, place, count = HEAD.unpack_from(message)
        if start != self.start:  # of an engine that has ended
            return
        if place == PLAN:
            return self._received[number].write(message[HEAD.size :], count)
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
        for plans in self._received.values():
            plans.join()

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
