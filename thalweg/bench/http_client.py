"""A small HTTP/1.1 client for load: raw asyncio, httptools' parser, connections kept alive, requests sent on schedule.

General clients spend more time on a streamed token than the server does. Here a chunk from the socket goes through a C
parser into a callback, with the time at which the kernel delivered it.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import math
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from thalweg.bench.errors import HttpError

LOCAL_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # of this machine; the server may be well
SWITCH_SECONDS = 0.0005  # after which a progress bar's thread gives way; Python's default is ten times as long
EARLY_SECONDS = 0.001  # the kernel's timer is exact to a millisecond: the last one is polled
NICE = -10  # of the client where allowed: beside a server on all cores, nice 0 is woken several milliseconds late
OnBody = Callable[[bytes, float], None]
OnSent = Callable[[float], None]


class CannotConnect(HttpError):
    """Nothing listens at the address, or nothing answers."""


class ArrivalSchedule:
    """Makes calls at their times, from the event loop's thread. Times are time.perf_counter().

    A turn of the event loop handles all sockets that are ready, and with many streams that takes longer than a request
    may be late. So each chunk that arrives first calls `poll`, which is one comparison unless something is due.
    """

    def __init__(self) -> None:
        self.next = math.inf
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None

    def at(self, due: float, call: Callable[[float], None]) -> None:
        """Runs `call(now)` at `due`; at once where that has passed."""
        now = time.perf_counter()
        if due <= now:
            call(now)
            return
        heapq.heappush(self._heap, (due, next(self._numbers), call))
        if due < self.next:
            self._arm()

    def poll(self, now: float) -> None:
        """Makes the calls that are due."""
        while self.next <= now:
            _, _, call = heapq.heappop(self._heap)
            self.next = self._heap[0][0] if self._heap else math.inf
            call(now)
            now = time.perf_counter()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self.next = self._heap[0][0]
            wait = self.next - time.perf_counter() - EARLY_SECONDS
            self._timer = asyncio.get_running_loop().call_later(max(wait, 0.0), self._wake)

    def _wake(self) -> None:
        self.poll(time.perf_counter())
        self._arm()


@contextmanager
def high_priority() -> Iterator[None]:
    """In here, threads of this process (progress bars) delay this one by half a millisecond at most, and other
    processes less than usual where the user may raise a priority. A process under `nice` keeps its own.
    """
    interval, nice = sys.getswitchinterval(), os.getpriority(os.PRIO_PROCESS, 0)
    sys.setswitchinterval(SWITCH_SECONDS)
    if nice <= 0:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, min(nice, NICE))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if nice <= 0:
            os.setpriority(os.PRIO_PROCESS, 0, nice)


class SendTime(NamedTuple):
    """When a request is sent."""

    due: float = 0.0  # time.perf_counter(); a time in the past is at once
    on_sent: OnSent | None = None  # called with the time just before the first byte; again where it is sent again


NOW = SendTime()


@dataclass(slots=True)
class HttpReply:
    """A response; header names in lower case. `body` stays empty where a callback took it."""

    status: int = 0
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")


class ClientConnection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, schedule: ArrivalSchedule) -> None:
        self.schedule = schedule
        self.transport: asyncio.Transport | None = None
        self.result: asyncio.Future[HttpReply] | None = None
        self.reusable, self.now = False, 0.0

    def start(self, request: bytes, on_body: OnBody | None, send_time: SendTime) -> asyncio.Future[HttpReply]:
        """Sends at its time; the future is done with the last byte of the response."""
        self.parser = httptools.HttpResponseParser(self)
        self.result = result = asyncio.get_running_loop().create_future()
        self.reply, self.on_chunk = HttpReply(), on_body
        self.streams = self.bounded = self.reusable = False
        self.now = 0.0

        def send(now: float) -> None:
            if self.transport is None or result.done():  # closed or cancelled before its time
                return
            if send_time.on_sent is not None:
                send_time.on_sent(now)
            self.transport.write(request)

        self.schedule.at(send_time.due, send)
        return result

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        if self.now >= self.schedule.next:
            self.schedule.poll(self.now)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP ({error})")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.result is None or self.result.done():
            return
        if self.reply.status and not self.bounded and exc is None:
            self.result.set_result(self.reply)  # a body without a length ends with the connection
        else:
            self._fail("the server closed the connection before its answer was complete")

    # callbacks of the parser
    def on_status(self, status: bytes) -> None:
        self.reply.reason += status.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        headers, self.reply.status = self.reply.headers, self.parser.get_status_code()
        self.bounded = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "")
        self.streams = self.on_chunk is not None and self.reply.status == 200

    def on_body(self, body: bytes) -> None:
        if self.streams and self.on_chunk is not None:
            self.on_chunk(body, self.now)
        else:
            self.reply.body += body

    def on_message_complete(self) -> None:
        self.reusable = self.bounded and self.parser.should_keep_alive()
        if self.result is not None and not self.result.done():
            self.result.set_result(self.reply)

    def _fail(self, reason: str) -> None:
        if self.result is not None and not self.result.done():
            self.result.set_exception(HttpError(reason))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class HttpClient:
    """Connections to one server. `base_url` may have a path, which goes before every request's."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise HttpError(f"cannot use {base_url!r} as a base URL: write it as http://host:port")
        self.host, self.prefix = url.hostname, url.path.rstrip("/")
        self.base_url = f"{url.scheme}://{url.netloc}{self.prefix}"
        self.tls = ssl.create_default_context() if url.scheme == "https" else None
        self.port = url.port or (443 if self.tls else 80)
        lines = {"Host": url.netloc, "Accept": "*/*", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[ClientConnection] = []
        self._schedule = ArrivalSchedule()

    async def request(
        self, method: str, path: str, body: bytes = b"", on_body: OnBody | None = None, send_time: SendTime = NOW
    ) -> HttpReply:
        """One exchange. With `on_body`, the body of a 200 goes there chunk by chunk with the time of its arrival. The
        connection is made at once; the request is sent when `send_time` says.

        Raises HttpError, but not for a kept-alive connection that the server had closed.
        """
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n"
        kind = "Content-Type: application/json\r\n" if body else ""
        request = f"{head}{kind}\r\n".encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                continue
            try:
                return await self._exchange(connection, request, on_body, send_time)
            except HttpError:
                if connection.now:  # else the server had closed it while it was idle
                    raise
        return await self._exchange(await self.connect(), request, on_body, send_time)

    async def connect(self) -> ClientConnection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: ClientConnection(self._schedule), self.host, self.port, ssl=self.tls
            )
        except OSError as error:
            reason = error.strerror or error
            if error.errno in LOCAL_LIMITS:
                raise HttpError(
                    f"this machine cannot open another connection ({reason}): lower --max-concurrency, or raise"
                    " `ulimit -n`"
                ) from error
            raise CannotConnect(f"cannot connect to {self.base_url}: {reason}") from error
        return connection

    async def _exchange(
        self, connection: ClientConnection, request: bytes, on_body: OnBody | None, send_time: SendTime
    ) -> HttpReply:
        try:
            reply = await connection.start(request, on_body, send_time)
        except asyncio.CancelledError:
            connection.close()  # so that the server stops
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
