"""The connection between the first node of an engine and an agent, which runs the processes of a node."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from thalweg.config.engine import EngineConfig

HEARTBEAT_S = 1.0  # both ends send something at least so often
LOST_S = 10.0  # without a word for so long the other end is lost
LENGTH = struct.Struct("<I")
LONGEST = 1 << 26  # bytes of a message; a longer one is not ours
# RTM_GETADDR of IPv4 with NLM_F_REQUEST | NLM_F_DUMP, and parts of what answers it; see netlink(7) and rtnetlink(7)
ADDRESS_DUMP = struct.pack("=IHHIIBxxxI", 24, 22, 0x301, 1, 0, socket.AF_INET, 0)
MESSAGE, INTERFACE, ATTRIBUTE = struct.Struct("=IH"), struct.Struct("=I"), struct.Struct("=HH")
MESSAGE_BYTES, ADDRESS_BYTES, ERROR, DONE, LOCAL = 16, 24, 2, 3, 2


class Hello(msgspec.Struct, tag=True, frozen=True):
    """An agent's first message."""

    version: str  # of Thalweg
    node: int
    nnodes: int
    relay_port: int
    agent: int  # a number of its own: it may connect again before its lost connection is noticed
    model: str  # `fingerprint` of its checkpoint


class Processes(msgspec.Struct, tag=True, frozen=True):
    """The processes of a node, in order, and what an agent sends when nothing is new."""

    start: int
    pids: tuple[int, ...] = ()
    exit_codes: tuple[int | None, ...] = ()
    stopped: tuple[bool, ...] = ()  # by a signal
    has_pending_plans: tuple[bool, ...] = ()
    at: float = 0.0  # time.time() of the node


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Nothing is new."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start the processes of an engine on this node."""

    number: int
    config: EngineConfig
    addresses: tuple[str, ...]  # of the client's sockets, in the order of the node's processes
    relays: tuple[str, ...]  # of all nodes
    store_port: int  # of the first node's TCPStore


class Kill(msgspec.Struct, tag=True, frozen=True):
    """End the processes of this start."""

    start: int


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to a process, by its number on the node."""

    process: int
    number: int


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The agent is not needed any more. error: why it cannot take part; "": the engine has ended."""

    error: str = ""


LinkMessage = Hello | Processes | Heartbeat | Start | Kill | Signal | Leave


class LinkLost(ConnectionError):
    """The other end is gone; says why."""


class NodeLink:
    """One end of the connection. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(LOST_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._lock = connection, threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(LinkMessage).decode

    @property
    def peer(self) -> str:
        """The address of the other end."""
        return str(self.socket.getpeername()[0])

    def send(self, message: LinkMessage) -> None:
        """Raises LinkLost."""
        data = self._encode(message)
        try:
            with self._lock:
                self.socket.sendall(LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise LinkLost(_why(error)) from error

    def receive(self) -> LinkMessage:
        """Waits for a message. Raises LinkLost."""
        length = LENGTH.unpack(self._take(LENGTH.size))[0]
        if length > LONGEST:
            raise LinkLost(f"it sent a message of {length} bytes, which is none of Thalweg's")
        try:
            message: LinkMessage = self._decode(self._take(length))
        except msgspec.MsgspecError as error:
            raise LinkLost(f"it sent a message that cannot be read: {error}") from error
        return message

    def _take(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self.socket.recv(count - len(data))
            except OSError as error:
                raise LinkLost(_why(error)) from error
            if not part:
                raise LinkLost("it has closed the connection")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Frees another thread from `receive`, too."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed
            pass
        self.socket.close()


def _why(error: OSError) -> str:
    return f"no word for {LOST_S:g} s" if isinstance(error, TimeoutError) else str(error)


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, _, port = address.partition(":")
    return host, int(port)


def fingerprint(folder: Path) -> str:
    """Of a checkpoint: its configuration and the sizes of its weights."""
    files = sorted(folder.glob("*.safetensors"))
    sizes = " ".join(f"{file.name} {file.stat().st_size}" for file in files)
    config = folder / "config.json"
    return f"{zlib.crc32(sizes.encode() + (config.read_bytes() if config.is_file() else b'')):08x}"


def interface_of(host: str) -> str:
    """The network interface of this machine that has an IPv4 address, be it its first or another; "" if none has."""
    if sys.platform != "linux":
        return ""
    wanted = socket.inet_aton(host)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
        kernel.bind((0, 0))
        kernel.send(ADDRESS_DUMP)
        while data := kernel.recv(1 << 16):
            while data:
                length, kind = MESSAGE.unpack_from(data)
                if kind in (ERROR, DONE):
                    return ""
                (number,) = INTERFACE.unpack_from(data, MESSAGE_BYTES + 4)
                if any(of == LOCAL and value == wanted for of, value in _attributes(data[ADDRESS_BYTES:length])):
                    return socket.if_indextoname(number)
                data = data[_aligned(length) :]
    return ""


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, of = ATTRIBUTE.unpack_from(data)
        yield of, data[ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
