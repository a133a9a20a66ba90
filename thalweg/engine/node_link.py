"""The connection between the first node of an engine and an agent, which runs the processes of a node."""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
import zlib
from pathlib import Path

import msgspec

from thalweg.config.engine import EngineConfig

HEARTBEAT_S = 1.0  # both ends send something at least so often
LOST_S = 10.0  # without a word for so long the other end is lost
LENGTH = struct.Struct("<I")
LONGEST = 1 << 26  # bytes of a message; a longer one is not ours
INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR, see netdevice(7)


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
    """The network interface of this machine that has an IPv4 address; "" if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(any_socket.fileno(), INTERFACE_ADDRESS, request)[20:24]
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found) == host:
                return name
    return ""
