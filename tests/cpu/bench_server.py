"""A small server of the OpenAI and native streams with known delays and planned failures, for tests of clients."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools

Send = Callable[[bytes], None]


@dataclass
class Fake:
    """A server of the OpenAI and native streams. first and gap: seconds before the first token and between tokens.

    plan: how to treat the i-th generation request: "ok", "429", "400", "drop" (closes half-way), "error" (an error
    event), "cut" (no [DONE]), "noise".
    """

    first: float = 0.02
    gap: float = 0.01
    per_event: int = 1
    plan: list[str] = field(default_factory=list)
    tokenizer: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    posts: list[str] = field(default_factory=list)
    connections: int = 0
    lost: int = 0
    under_way: int = 0
    most: int = 0

    async def handle(self, method: str, path: str, body: bytes, send: Send) -> bool:
        """Answers one request; False closes the connection."""
        if method == "GET":
            pages = {"/v1/models": {"data": [{"id": "fake"}]}, "/server_info": {"tokenizer_path": self.tokenizer}}
            status, page = (200, pages[path]) if path in pages else (404, {"error": "no such route"})
            return _whole(send, status, page)
        self.posts.append(path)
        if path in ("/flush_cache", "/start_profile", "/stop_profile"):
            return _whole(send, 200, {})
        what = self.plan[len(self.bodies)] if len(self.bodies) < len(self.plan) else "ok"
        self.bodies.append(json.loads(body))
        if what == "429":
            return _whole(send, 429, {"error": {"message": "the queue is full"}})
        if what == "400":
            return _whole(send, 400, {"error": {"message": "the prompt is too long"}})
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await self._generate(path, self.bodies[-1], what, send)
        finally:
            self.under_way -= 1

    async def _generate(self, path: str, body: dict[str, Any], what: str, send: Send) -> bool:
        native = path == "/generate"
        count = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        if not body["stream"]:
            await asyncio.sleep(self.first + self.gap * (count - 1))
            usage = {"prompt_tokens": 11, "completion_tokens": count}
            return _whole(send, 200, {"choices": [{"text": "x" * count, "finish_reason": "length"}], "usage": usage})
        send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(self.first)
        for at in range(0, count, self.per_event):
            now = min(self.per_event, count - at)
            if at and what == "drop":
                return False
            if at and what == "noise":
                _chunk(send, b"data: {{{\n\n")
            if at and what == "error":
                _event(send, {"error": {"message": "the engine ended"}})
                break
            _event(send, _piece(path, body, at, now, last=at + now >= count and what != "cut"))
            if at + now < count:
                await asyncio.sleep(self.gap * now)
        if what == "ok" and not native:
            cached = {"cached_tokens": 3}
            _event(
                send,
                {
                    "choices": [],
                    "usage": {"prompt_tokens": 11, "completion_tokens": count, "prompt_tokens_details": cached},
                },
            )
        if what == "ok":
            _chunk(send, b"data: [DONE]\n\n")
        send(b"0\r\n\r\n")
        return True


def _piece(path: str, body: dict[str, Any], at: int, count: int, last: bool) -> dict[str, Any]:
    if path == "/generate":
        meta = {"prompt_tokens": 11, "completion_tokens": at + count, "cached_tokens": 3}
        return {"text": "é" * (at + count), "meta_info": meta}
    choice: dict[str, Any] = {"finish_reason": "length" if last else None}
    if "messages" in body:
        choice["delta"] = {"content": "é" * count}
    else:
        choice["text"] = "é" * count
    if body.get("return_token_ids"):
        choice["token_ids"] = [5] * count
    return {"choices": [choice]}


def _whole(send: Send, status: int, page: object) -> bool:
    body = json.dumps(page).encode()
    send(f"HTTP/1.1 {status} Somehow\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return True


def _chunk(send: Send, data: bytes) -> None:
    send(b"%x\r\n%s\r\n" % (len(data), data))


def _event(send: Send, value: object) -> None:
    data = b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
    _chunk(send, data[:9])  # an event, and a letter, may be cut anywhere
    _chunk(send, data[9:])


class _Reader:
    def __init__(self) -> None:
        self.path, self.body, self.complete = b"", b"", False

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


@asynccontextmanager
async def serving(fake: Fake) -> AsyncIterator[str]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fake.connections += 1
        try:
            while await _serve_one(fake, reader, writer.write):
                pass
        except (ConnectionError, asyncio.CancelledError):
            fake.lost += 1
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield "http://127.0.0.1:%d" % server.sockets[0].getsockname()[1]


@contextmanager
def serving_in_a_thread(fake: Fake) -> Iterator[str]:
    """For what wants the main thread and its signals."""
    loop, address = asyncio.new_event_loop(), queue.Queue[str]()

    async def body() -> None:
        async with serving(fake) as url:
            address.put(url)
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(body(),), daemon=True)
    thread.start()
    try:
        yield address.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def _serve_one(fake: Fake, reader: asyncio.StreamReader, send: Send) -> bool:
    message = _Reader()
    parser = httptools.HttpRequestParser(message)
    while not message.complete:
        if not (data := await reader.read(65536)):
            return False
        parser.feed_data(data)
    return await fake.handle(parser.get_method().decode(), message.path.decode(), message.body, send)
