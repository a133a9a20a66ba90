"""One TCP connection: uvicorn's HTTP/1.1, with deadlines for slow clients and bounds on what they send.

Reading: a whole request, body included, must come within `client_timeout` of the connection or of its first byte.
Writing: in every `client_timeout` the client must take LEAST bytes of the response, or all that waits; else it loses
the connection and the request.

Header, trailers and chunk framing are bounded in bytes, a header in fields, a connection in waiting requests.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from thalweg.config.server import ServerOptions
from thalweg.server.errors import ApiError

MAX_HEAD = 1 << 16  # bytes of a request line and its header fields
MAX_FIELDS = 100
UNSENT = 1 << 17  # bytes that wait in the kernel for a client's window to open
LEAST = 1 << 16  # bytes that a client must take in `client_timeout` while so many wait
MAX_PIPELINED = 8  # requests that wait for the one that is answered
FRAMING = 8  # bytes of chunk framing for each byte of a body: a chunk of one byte takes six


class BoundedConnection(HttpToolsProtocol):
    """uvicorn makes one for every accepted socket."""

    def __init__(self, bounds: ServerOptions, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._bounds = bounds
        self._overhead = 0  # bytes of this message outside its body
        self._body = 0
        self._fields = 0
        self._in_head = self._refused = False
        self._reading = _Deadline(self.loop, bounds.client_timeout, self._too_slow)
        self._writing = _Deadline(self.loop, bounds.client_timeout, self._not_read)
        self._unread = 0  # bytes that waited when the writing deadline began

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if (raw := transport.get_extra_info("socket")) is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a peer that lost its power
            # asyncio sets it only if the listening socket names its protocol, and ours does not. Without it the first
            # token of a further request on a connection waits 40 ms for the acknowledgement of the header.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":  # else the kernel buffers 4 MiB that nobody reads
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        if len(self.connections) > self._bounds.max_connections:
            return self._refuse(503, "too many connections are open: try again later", "too_many_connections")
        self._reading.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.stop()
        self._writing.stop()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._overhead += len(data)
        if self._idle:  # also for bytes that begin no request, such as line ends
            self._reading.start()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # to an unsupported protocol: the request is answered in this one
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(400, "this is not a valid HTTP/1.1 request", "bad_request")
            return
        if self._overhead > MAX_HEAD + FRAMING * self._body:
            self._refuse(431, f"the header is longer than {MAX_HEAD} bytes", "header_too_large")

    # ---- called by the parser ----

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(429, f"more than {MAX_PIPELINED} requests wait on one connection", "too_many_requests")
            raise RuntimeError("refused")  # stops the parser
        if not self.flow.write_paused:
            self._writing.stop()
        self._body = self._fields = 0
        self._in_head = True
        self._reading.start()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            self._refuse(431, f"the header has more than {MAX_FIELDS} fields", "header_too_large")
            raise RuntimeError("refused")
        if self._in_head:  # else a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body)
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._overhead = 0
        self._reading.stop()
        super().on_message_complete()

    # ---- response ----

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._write_within()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_within()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.stop()
        if self._idle:
            self._write_within()  # the rest must leave in time too

    # ---- deadlines ----

    @property
    def _idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _too_slow(self) -> None:
        part = "header" if self._in_head or self._idle else "body"
        self._refuse(408, f"the {part} was not there after {self._bounds.client_timeout:g} seconds", "request_timeout")

    def _write_within(self) -> None:
        if self._writing.start():
            self._unread = self.transport.get_write_buffer_size()

    def _not_read(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left and self._unread - left < LEAST:
            self.transport.abort()
        elif left:
            self._write_within()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answers and closes. If the response has begun, only closes."""
        self._refused = True
        self._reading.stop()
        if self.pipeline or not (self._in_head and self._idle or self.cycle is None or not self.cycle.response_started):
            return self.transport.abort()
        if not self._idle:
            self.cycle.disconnected = True  # ends the wait for the rest of the body
            self.cycle.message_event.set()
        body = ApiError(status, message, code=code).body
        fields = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + fields + body)
        self.transport.close()
        self._write_within()


class _Deadline:
    """A timer that can be stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, expired: Callable[[], None]) -> None:
        self._loop, self._seconds, self._expired = loop, seconds, expired
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> bool:
        """False if it runs already."""
        if self._timer is not None:
            return False
        self._timer = self._loop.call_later(self._seconds, self._expire)
        return True

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self._expired()


def bounded(options: ServerOptions) -> Callable[..., BoundedConnection]:
    """The value of uvicorn's `http` setting."""
    return partial(BoundedConnection, options)
