"""A server that does nothing: it answers every completion with one token at once and remembers when each request came.

A process of its own (`python -m tests.cpu.null_sink`), so that a client's timing is the client's: it prints its URL and
serves until its stdin closes. GET /arrivals tells the times, of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httptools

STREAM = b'data: {"choices":[{"text":"a","token_ids":[5],"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(STREAM), STREAM)
ARRIVALS: list[float] = []


class Sink(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.url, self.at = transport, b"", 0.0
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.at = self.at or time.perf_counter()
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_message_complete(self) -> None:
        if self.parser.get_method() == b"POST":
            ARRIVALS.append(self.at)
            self.transport.write(ANSWER)
        else:
            page = json.dumps(ARRIVALS if self.url == b"/arrivals" else {"data": [{"id": "sink"}]}).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))
        self.at = 0.0
        self.parser = httptools.HttpRequestParser(self)


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Sink, "127.0.0.1", 0)
    print("http://127.0.0.1:%d" % server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def null_sink() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its URL and its process, while it runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cpu.null_sink"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(main())
