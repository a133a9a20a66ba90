"""64 streams that get a token at each engine step: the cost of a chunk and its latency to the socket."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from tests.cpu.fakes import FakeFront, Piece, fake_app, serving
from thalweg.config.server import ServerOptions
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.server.connection import bounded

STREAMS, STEPS, GAP = 64, 100, 0.03


class Stepping(FakeFront):
    """Its engine steps every GAP seconds once all streams are there."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: list[asyncio.Queue[float]] = []

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        salt: int = 0,
        grammar: Grammar = NO_GRAMMAR,
        retention: CacheRetention = RETAIN_ALL,
    ) -> AsyncGenerator[Piece, None]:
        queue: asyncio.Queue[float] = asyncio.Queue()
        self.queues.append(queue)
        for i in range(STEPS):
            at = await queue.get()
            yield Piece(0, " token", (5,), (), "length" if i == STEPS - 1 else None, None, 5, 0, i + 1, (), at)

    async def steps(self) -> None:
        while len(self.queues) < STREAMS:
            await asyncio.sleep(0.01)
        for _ in range(STEPS):
            await asyncio.sleep(GAP)
            now = time.time()
            for queue in self.queues:
                queue.put_nowait(now)


async def read_all(port: int, path: str) -> None:
    body = json.dumps({"prompt": "x", "text": "x", "messages": [{"role": "user", "content": "x"}], "stream": True})
    if path == "/generate":
        body = json.dumps({"text": "x", "stream": True})
    request = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer = (answer + await reader.read(65536))[-64:]
        writer.close()

    await asyncio.gather(*(one() for _ in range(STREAMS)))


def client(port: int, path: str) -> None:
    asyncio.run(read_all(port, path))


async def measure(path: str) -> tuple[float, float, float]:
    """CPU seconds a chunk of this process, and what `thalweg_emit_seconds` says: the shares of tokens within 3 ms and
    within 8 ms.
    """
    front = Stepping()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(fake_app(front), log_level="warning", access_log=False))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        process = multiprocessing.get_context("spawn").Process(target=client, args=(port, path), daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while len(front.queues) < STREAMS:
            assert process.is_alive() and time.monotonic() < deadline, "the streams did not all begin"
            await asyncio.sleep(0.01)
        before = resource.getrusage(resource.RUSAGE_SELF)
        await front.steps()
        while process.is_alive():
            await asyncio.sleep(0.01)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert process.exitcode == 0
        async with httpx.AsyncClient() as api:
            text = (await api.get(f"http://127.0.0.1:{port}/metrics")).text
        server.should_exit = True
        await serving
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    emits = {
        sample.labels.get("le", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "thalweg_emit_seconds_bucket"
    }
    assert emits["+Inf"] == STREAMS * STEPS
    return spent / emits["+Inf"], emits["0.003"] / emits["+Inf"], emits["0.008"] / emits["+Inf"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_64_streams(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's CPU time is asserted, the better of two runs: three times what 64 chunks in 8 ms of
    one core need, since a busy machine slows that too. The delays are
    printed only, since whatever else runs on the machine is in them.
    """
    best = 1.0
    for _ in range(2):
        cpu, soon, late = asyncio.run(measure(path))
        with capsys.disabled():
            delays = f"{soon:.1%} within 3 ms of the step, {late:.1%} within 8 ms"
            print(f"\n{path}: {cpu * 1e6:.0f} us of CPU a chunk; {delays}", end="")
        best = min(best, cpu)
        if best < 360e-6:
            return
    pytest.fail(f"{best * 1e6:.0f} us of CPU a chunk, wanted under 360")


def test_no_chunk_waits_for_an_acknowledgement() -> None:
    """On a connection that has been used, a client acknowledges late: the chunk behind the header would wait 40 ms for
    that.
    """
    options, made = ServerOptions(), []

    def noted(**uvicorn: Any) -> Any:
        made.append(bounded(options)(**uvicorn))
        return made[-1]

    with serving(fake_app(FakeFront(), options), noted) as url, httpx.Client() as client:
        assert client.get(url + "/health").status_code == 200
        accepted = made[0].transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
