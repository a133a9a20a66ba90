"""A small HTTP/1.1 client for load: raw asyncio, httptools' parser, connections kept alive.

General clients spend more time on a streamed token than the server does. Here a chunk from the socket goes through a C
parser straight into a callback, with the time at which the kernel handed it over.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from thalweg.bench.errors import HttpError
from thalweg.bench.pacer import Pacer

OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # what keeps a client from connecting to a server that is well
OnBody = Callable[[bytes, float], None]
OnSent = Callable[[float], None]


class CannotConnect(HttpError):
    """Nobody listens there, or nobody answers."""


@dataclass(frozen=True, slots=True)
class Sending:
    """When a request leaves, and who hears of it. due: time.perf_counter(); one that has passed means at once. on_sent:
    gets the moment at which the request was given to the kernel, just before its first byte; again where it had to be
    sent again.
    """

    due: float = 0.0
    on_sent: OnSent | None = None


NOW = Sending()


@dataclass(slots=True)
class Reply:
    """A response: status, reason phrase, header names in lower case. `body` stays empty where a callback took it."""

    status: int = 0
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time. `start` sends at its time; what it returns is done with the last byte of
    the response.
    """

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.transport: asyncio.Transport | None = None
        self.result: asyncio.Future[Reply] | None = None
        self.reusable, self.now = False, 0.0

    def start(self, request: bytes, on_body: OnBody | None, sending: Sending) -> asyncio.Future[Reply]:
        assert self.transport is not None, "start() before the connection was made"
        self.parser = httptools.HttpResponseParser(self)
        self.result = asyncio.get_running_loop().create_future()
        self.reply, self.on_piece = Reply(), on_body
        self.streams, self.bounded, self.reusable, self.now = False, False, False, 0.0
        result = self.result

        def send(now: float) -> None:
            if self.transport is None or result.done():  # closed, or called off, before its time came
                return
            if sending.on_sent is not None:
                sending.on_sent(now)
            self.transport.write(request)

        self.pacer.at(sending.due, send)
        return result

    # asyncio's side
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        if self.now >= self.pacer.next:
            self.pacer.poll(self.now)
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

    # the parser's side
    def on_status(self, status: bytes) -> None:
        self.reply.reason += status.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        reply = self.reply
        reply.status = self.parser.get_status_code()
        self.bounded = "content-length" in reply.headers or "chunked" in reply.headers.get("transfer-encoding", "")
        self.streams = self.on_piece is not None and reply.status == 200

    def on_body(self, body: bytes) -> None:
        if self.streams and self.on_piece is not None:
            self.on_piece(body, self.now)
        else:
            self.reply.body += body

    def on_message_complete(self) -> None:
        self.reusable = self.bounded and self.parser.should_keep_alive()
        if self.result is not None and not self.result.done():
            self.result.set_result(self.reply)

    def _fail(self, why: str) -> None:
        if self.result is not None and not self.result.done():
            self.result.set_exception(HttpError(why))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Client:
    """Connections to one server. `base_url` may have a path, which goes before every request's."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise HttpError(f"cannot use {base_url!r} as a base URL: write it as http://host:port")
        self.base_url = f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}"
        self.host, self.tls = url.hostname, ssl.create_default_context() if url.scheme == "https" else None
        self.port = url.port or (443 if self.tls else 80)
        self.prefix = url.path.rstrip("/")
        lines = {"Host": url.netloc, "Accept": "*/*", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[Connection] = []
        self._pacer = Pacer()

    async def request(
        self, method: str, path: str, body: bytes = b"", on_body: OnBody | None = None, sending: Sending = NOW
    ) -> Reply:
        """One exchange. With `on_body`, the body of a 200 goes there piece by piece with the time of its arrival; any
        other is in the reply. The connection is made at once, and the request leaves when `sending` says.

        Raises: HttpError: no connection, a connection lost, or nonsense. A kept-alive connection that the server had
            closed is not an error.
        """
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n"
        if body:
            head += "Content-Type: application/json\r\n"
        request = head.encode("latin-1") + b"\r\n" + body
        while self._idle:
            reply = await self._exchange(self._idle.pop(), request, on_body, sending, stale_is_none=True)
            if reply is not None:
                return reply
        reply = await self._exchange(await self.connect(), request, on_body, sending)
        assert reply is not None
        return reply

    async def connect(self) -> Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._pacer), self.host, self.port, ssl=self.tls
            )
        except OSError as error:
            if error.errno in OURS:
                raise HttpError(
                    f"this machine cannot open another connection ({error.strerror}): lower --max-concurrency, or raise"
                    " `ulimit -n`"
                ) from error
            raise CannotConnect(f"cannot connect to {self.base_url}: {error.strerror or error}") from error
        return connection

    async def _exchange(
        self,
        connection: Connection,
        request: bytes,
        on_body: OnBody | None,
        sending: Sending,
        stale_is_none: bool = False,
    ) -> Reply | None:
        if connection.transport is None or connection.transport.is_closing():
            return None
        try:
            reply = await connection.start(request, on_body, sending)
        except HttpError:
            if stale_is_none and connection.now == 0.0:  # closed by the server while idle: nothing was answered
                return None
            raise
        except asyncio.CancelledError:
            connection.close()  # tells the server that nobody listens any more
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
