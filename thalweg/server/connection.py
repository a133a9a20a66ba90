"""One TCP connection: uvicorn's HTTP/1.1, with a deadline for everything that a client may be slow at and a bound for
all that it may send.

    opened, or the first byte of a further request  → the whole request, its body too, must be there within
    `client_timeout` answering  → what was written must leave: LEAST bytes, or all that waits, in every
    `client_timeout`. Who takes less loses the connection, and with it the request, so that a client which never reads
    costs what it has been given for that long

A header, its trailers and the framing of a chunked body are bounded in bytes, a header in fields, a connection in
requests that wait.
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
from thalweg.server.errors import ErrorInfo

MAX_HEAD = 1 << 16  # bytes of a request line and its header fields
MAX_FIELDS = 100
UNSENT = 1 << 17  # bytes that wait in the kernel for a client's window to open
LEAST = 1 << 16  # bytes of an answer that a client must take in `client_timeout` while so many wait
MAX_PIPELINED = 8  # requests that wait behind the one that is being answered
FRAMING = 8  # bytes of chunk framing that a byte of a body may cost: a chunk of one byte takes six


class BoundedConnection(HttpToolsProtocol):
    """What uvicorn makes of every accepted socket."""

    def __init__(self, bounds: ServerOptions, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._bounds = bounds
        self._overhead = 0  # bytes of this message that are no body
        self._body = 0
        self._fields = 0
        self._in_head = self._refused = False
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes that waited when its time began

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if (raw := transport.get_extra_info("socket")) is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a peer that lost its power never says so
            # asyncio sets it only where the listening socket names its protocol, and ours does not: without it the
            # first token of every further request on a connection waits 40 ms for the client's delayed acknowledgement
            # of the header
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":  # else the kernel would take in 4 MiB that nobody reads
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        if len(self.connections) > self._bounds.max_connections:
            return self._refuse(503, "too many connections are open: try again later", "too_many_connections")
        self._start_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._stop_writing()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._overhead += len(data)
        if self._reading is None and self._idle:  # even what begins no request, as line ends do, keeps nothing open
            self._start_reading()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # to a protocol that is not spoken here: the request is answered in this one
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(400, "this is not a valid HTTP/1.1 request", "bad_request")
            return
        if self._overhead > MAX_HEAD + FRAMING * self._body:
            self._refuse(431, f"the header is longer than {MAX_HEAD} bytes", "header_too_large")

    # ---- one message: what the parser calls ----

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(429, f"more than {MAX_PIPELINED} requests wait on one connection", "too_many_requests")
            raise RuntimeError("refused")  # stops the parser
        if not self.flow.write_paused:
            self._stop_writing()
        self._body = self._fields = 0
        self._in_head = True
        self._start_reading()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            self._refuse(431, f"the header has more than {MAX_FIELDS} fields", "header_too_large")
            raise RuntimeError("refused")
        if self._in_head:  # else a trailer, which must not pass for a header
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
        self._stop_reading()
        super().on_message_complete()

    # ---- the answer ----

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._write_within()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_within()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing()
        if self._idle:
            self._write_within()  # nothing more is written, and the rest must leave too

    # ---- deadlines ----

    @property
    def _idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_reading(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._bounds.client_timeout, self._too_slow)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _too_slow(self) -> None:
        self._reading = None
        what = "header" if self._in_head or self._idle else "body"
        self._refuse(408, f"the {what} was not there after {self._bounds.client_timeout:g} seconds", "request_timeout")

    def _write_within(self) -> None:
        if self._writing is None:
            self._unread = self.transport.get_write_buffer_size()
            self._writing = self.loop.call_later(self._bounds.client_timeout, self._not_read)

    def _not_read(self) -> None:
        self._writing = None
        left = self.transport.get_write_buffer_size()
        if left and self._unread - left < LEAST:
            self.transport.abort()
        elif left:
            self._write_within()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answers and closes; where this request has its answer already, or part of it, just ends the connection."""
        self._refused = True
        self._stop_reading()
        if self.pipeline or not (self._in_head and self._idle or self.cycle is None or not self.cycle.response_started):
            return self.transport.abort()
        if not self._idle:
            self.cycle.disconnected = True  # whoever waits for the rest of its body waits in vain
            self.cycle.message_event.set()
        body = ErrorInfo(status, message, code=code).body
        fields = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + fields + body)
        self.transport.close()
        self._write_within()


def bounded(options: ServerOptions) -> Callable[..., BoundedConnection]:
    """What uvicorn's `http` setting takes."""
    return partial(BoundedConnection, options)
