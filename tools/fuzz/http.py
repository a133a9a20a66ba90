"""Bodies of all POST routes: the real application over a real engine process with the bundled model.

An input is {"path", "headers", "body" (characters 0 to 255), "chunks" (parts in which it arrives), "leaves" (messages
after which the client goes away; -1: never)}. An answer is a 2xx or a 4xx in the route's form and in time. After it, a
valid request is served although the server runs only one at a time, so nothing stays counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import thalweg
from thalweg.config.server import ServerOptions
from thalweg.config.tree import options_of
from thalweg.engine.client import EngineClient
from thalweg.launch.resolve import resolve
from thalweg.server.app import ROUTES, build
from thalweg.server.errors import ANTHROPIC
from tools.fuzz.mutate import ODD, dump, mutate_bytes, mutate_value
from tools.fuzz.target import Target

MODEL = Path(thalweg.__file__).parents[1] / "models" / "tiny"
BODIES = {route.path: route.body for route in ROUTES if route.method == "POST"}
MAX_BODY = 1 << 16  # bytes, so that few are enough for a 413
PATIENCE, LIMIT = 3.0, 60.0  # seconds after which the client leaves; in which the server must have noticed
VALID = {
    "path": "/v1/completions",
    "headers": {},
    "body": '{"prompt": "Once", "max_tokens": 1}',
    "chunks": 1,
    "leaves": -1,
}
STOP = VALID | {"path": "/stop_profile", "headers": {"authorization": "Bearer admin"}, "body": ""}
HEADERS = ("content-type", "content-length", "content-encoding", "authorization", "x-api-key", "x-request-id", "origin",
           "sec-fetch-site", "host", "traceparent", "anthropic-version", "transfer-encoding")  # fmt: skip


class HttpBodies(Target):
    packages = ("server", "text", "core", "engine/client.py", "engine/streams.py")

    def __enter__(self) -> HttpBodies:
        self.runner = asyncio.Runner()
        self.profiles = tempfile.mkdtemp(prefix="thalweg-fuzz-")
        self.runner.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self._stop())
        self.runner.close()
        shutil.rmtree(self.profiles)

    async def _start(self) -> None:
        options = options_of(model=str(MODEL), context_length=192, max_running_requests=8, max_total_tokens=4096)
        resolved = resolve(options, progress=False)
        self.front = EngineClient(resolved.engine, resolved.reader())
        limits = ServerOptions(
            max_concurrent_requests=1,
            max_body_bytes=MAX_BODY,
            max_stored_responses=50,
            admin_api_key="admin",
            profile_folder=self.profiles,
        )
        self.app = build(self.front, limits, resolved.chat, path=str(MODEL), defaults=resolved.sampling)
        self.pid = 0
        await self.front.start()
        assert self.front.ready is not None
        self.pid = self.front.ready.pid

    async def _stop(self) -> None:
        await self.front.close()

    def run(self, entry: Any) -> str:
        return self.runner.run(self._run(entry))

    async def _run(self, entry: Any) -> str:
        outcome = await self._ask(entry)
        if outcome == "/start_profile 200":  # profiled steps are slow
            await self._ask(STOP)
        valid = await self._ask(VALID)
        assert valid.endswith(" 200"), f"afterwards a valid request gets {valid}"
        assert self.front.ready is not None and self.front.ready.pid == self.pid, "another engine serves"
        assert self.front.running == 0, "a request stays counted as running"
        for folder in Path(self.profiles).iterdir():
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        return outcome

    async def _ask(self, entry: Any) -> str:
        """The path and the status of the answer, with the error's code. Raises AssertionError."""
        path, body = entry["path"], entry["body"].encode("latin-1", "replace")
        size = max(1, -(-len(body) // max(1, entry["chunks"])))
        parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        messages = [
            {"type": "http.request", "body": part, "more_body": i < len(parts) - 1} for i, part in enumerate(parts)
        ]
        has_left, sent = asyncio.Event(), list[Any]()
        counter = itertools.count()

        async def receive() -> Any:
            number = next(counter)
            if 0 <= entry["leaves"] <= number:
                has_left.set()
            if number < len(messages) and not has_left.is_set():
                return messages[number]
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        raw = {"host": "localhost", "content-type": "application/json", **entry["headers"]}
        headers = [
            (name.lower().encode("latin-1", "replace"), str(value).encode("latin-1", "replace"))
            for name, value in raw.items()
        ]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
                 "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": headers,
                 "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}  # fmt: skip
        task = asyncio.create_task(self.app(scope, receive, send))  # type: ignore[arg-type]
        await asyncio.wait({task}, timeout=PATIENCE)
        is_slow = not task.done()
        has_left.set()
        await asyncio.wait({task}, timeout=LIMIT)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise AssertionError("the server goes on although the client has left")
        await task
        return f"{path} " + _check(path, sent, is_slow or entry["leaves"] >= 0)

    def mutate(self, entry: Any, draw: random.Random, donor: Any) -> Any:
        entry, kind = dict(entry), draw.random()
        if kind < 0.05:
            entry["chunks"] = draw.choice((1, 2, 7, 1000))
            entry["leaves"] = draw.choice((-1, 0, 1, 1, 2, 3))
        elif kind < 0.1:
            odd = draw.choice(
                ("", "0", "-1", "1e9", "99999999", "gzip", "a" * 300, "admin", "Bearer admin", "\xff", "é")
            )
            entry["headers"] = {**entry["headers"], draw.choice(HEADERS): odd}
        elif kind < 0.11:
            entry["body"] = (entry["body"] + " ") * draw.choice((2, MAX_BODY))
            entry["body"] = entry["body"][: 2 * MAX_BODY]
        elif kind < 0.13:
            entry["path"] = draw.choice(list(BODIES))
        elif kind < 0.2:
            entry["body"] = mutate_bytes(entry["body"], draw)
        else:
            entry["body"] = dump(self._mutated(entry, draw, donor), draw)
        return entry

    @staticmethod
    def _mutated(entry: Any, draw: random.Random, donor: Any) -> Any:
        value, other = _value(entry["body"]), _value(donor["body"])
        fields = getattr(BODIES[entry["path"]], "__struct_fields__", ())
        if isinstance(value, dict) and fields and draw.random() < 0.3:
            names = list(other) if isinstance(other, dict) else []
            name = draw.choice(fields)
            return value | {name: other[name] if name in names else draw.choice(ODD)}
        return mutate_value(value, draw, other)


def _value(body: str) -> Any:
    try:
        return json.loads(body.encode("latin-1").decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return {}


def _check(path: str, sent: list[Any], may_have_left: bool) -> str:
    """The status, and an error's code. Raises AssertionError for an answer that is not well formed."""
    if not sent or sent[0].get("status") == 499:
        assert may_have_left, "no answer"
        return "left"
    status, content = sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
    assert 200 <= status < 500, f"{status}: {content[:1000]!r}"
    kind = dict(sent[0]["headers"]).get(b"content-type", b"")
    if kind.startswith(b"text/event-stream"):
        lines = re.findall(rb"^data: (.*)$", content, re.M)
        values = [_json(line) for line in lines if line != b"[DONE]"]
        errors = [value["error"] for value in values if isinstance(value, dict) and value.get("error")]
        assert not any(error.get("type") in ("server_error", "api_error") for error in errors), errors
        return f"{status} stream" + " with an error" * bool(errors)
    value = _json(content)
    if status < 300:
        return str(status)
    error = value["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str), value
    if path.startswith(ANTHROPIC):
        assert value["type"] == "error", value
        return f"{status} {error['type']}"
    assert isinstance(error["param"], str | None) and isinstance(error["code"], str | None), value
    return f"{status} {error['code']} {re.sub('[^a-z_.]+', '*', error['param'] or '')[:40]}"


def _json(text: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text.decode("utf-8"), parse_constant=refuse)
