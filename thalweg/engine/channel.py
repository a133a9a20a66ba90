"""The line between an engine and its front: msgpack over ZeroMQ between processes, plain lists within one."""

from __future__ import annotations

import time

import msgspec
import zmq

from thalweg.core.messages import FromEngine, ToEngine


class ZmqChannel:
    """The engine's end: one PAIR socket. Raises zmq.ZMQError when the address cannot be reached."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context(1)
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.connect(address)
        self.decode = msgspec.msgpack.Decoder(ToEngine).decode
        self.encode = msgspec.msgpack.Encoder().encode

    def receive(self, timeout: float | None) -> list[ToEngine]:
        if timeout != 0.0 and not self.socket.poll(None if timeout is None else int(timeout * 1000)):
            return []
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(self.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        self.socket.send(self.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Lets what was sent leave, at most a second."""
        self.socket.close(linger=1000)
        self.context.term()


class LocalChannel:
    """Both ends in one thread: what is put into `inbox` is received next, what the engine sends lies in `outbox`."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.outbox: list[FromEngine] = []

    def receive(self, timeout: float | None) -> list[ToEngine]:
        if timeout and not self.inbox:
            time.sleep(timeout)  # only a ticket can bring news
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        self.outbox.append(message)
