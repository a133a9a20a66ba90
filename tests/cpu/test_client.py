"""`EngineClient` with a real engine process on the bundled model: streaming, aborts, refusals, crash and restart,
draining.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.configs import config
from tests.cpu.fakes import DEEPSEEK_V32
from thalweg.config.server import ServerOptions
from thalweg.core.errors import EngineDead, InvalidRequest, Overloaded
from thalweg.core.sampling import SamplingParams
from thalweg.engine import client
from thalweg.engine.child import EngineProcess
from thalweg.engine.client import EngineClient
from thalweg.engine.local import LocalEngine
from thalweg.engine.processes import socket_folder
from thalweg.engine.streams import Piece
from thalweg.server.app import build
from thalweg.text.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
SETTINGS = config(
    model_path=str(MODEL),
    context_length=512,
    num_pages=64,
    max_running_requests=8,
    eos_ids=(1,),
    show_progress=False,
    max_steps_in_flight=2,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@asynccontextmanager
async def serving(**fields: object) -> AsyncIterator[EngineClient]:
    front = EngineClient(msgspec.structs.replace(SETTINGS, **fields), Tokenizer(MODEL))
    await front.start()
    try:
        yield front
    finally:
        await front.close()


async def collect(front: EngineClient, prompt: list[int], params: SamplingParams) -> list[Piece]:
    return [piece async for piece in front.stream(prompt, params)]


async def eventually(true: Callable[[], bool], seconds: float = 20.0) -> None:
    for _ in range(int(seconds * 50)):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen in time")


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 240))  # type: ignore[arg-type]


def test_a_process_without_a_configuration_ends_with_its_server_or_is_closed() -> None:
    left, closed = EngineProcess(), EngineProcess()
    closed.close()
    assert closed.child.exitcode == -signal.SIGKILL
    left.sender.close()
    left.child.join(60)
    assert left.child.exitcode == 0
    left.close()


def test_streams_equal_the_local_engine_beside_refused_requests() -> None:
    local = LocalEngine(SETTINGS)
    local.submit(list(range(20, 120)), GREEDY)
    want: list[int] = []
    while not local.idle:
        want += [token for delta in local.step() for token in delta.tokens]

    async def test() -> None:
        async with serving() as front:
            prompt = list(range(20, 120))
            running = asyncio.create_task(collect(front, prompt, GREEDY))
            for bad in ([], [10**6], [-1], [5] * 512):
                with pytest.raises(InvalidRequest, match="prompt"):
                    await collect(front, bad, GREEDY)
            with pytest.raises(InvalidRequest, match="temperature"):
                await collect(front, prompt, msgspec.structs.replace(GREEDY, temperature=float("nan")))
            pieces = await running
            assert [token for piece in pieces for token in piece.ids] == want
            assert pieces[-1].finish == "length" and pieces[-1].completion_tokens == 24
            again = await collect(front, prompt, GREEDY)
            assert [token for piece in again for token in piece.ids] == want and again[-1].cached_tokens == 64
            await front.flush_cache()
            fresh = await collect(front, prompt, GREEDY)
            assert [token for piece in fresh for token in piece.ids] == want and fresh[-1].cached_tokens == 0
            text = Tokenizer(MODEL).decode(want)
            assert "".join(piece.text for piece in pieces) == text
            three = await collect(front, prompt, msgspec.structs.replace(GREEDY, n=3))
            for index in range(3):
                assert [token for piece in three if piece.index == index for token in piece.ids] == want

    run(test)


def test_a_stop_string_ends_the_sequence_at_the_match() -> None:
    async def test() -> None:
        async with serving() as front:
            whole = "".join(p.text for p in await collect(front, list(range(30, 60)), GREEDY))
            stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
            pieces = await collect(front, list(range(30, 60)), msgspec.structs.replace(GREEDY, stop=(stop,)))
            assert "".join(p.text for p in pieces) == whole[: whole.index(stop)]
            assert pieces[-1].finish == "stop" and pieces[-1].stop == stop
            await eventually(lambda: front.stats.running == 0 and front.stats.pages_used == 0)

    run(test)


def test_leaving_a_stream_and_abort_free_the_pages() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

    async def test() -> None:
        async with serving() as front:
            stream = front.stream(list(range(20, 90)), long)
            await anext(stream)
            await stream.aclose()
            assert front.running == 0
            await eventually(lambda: front.stats.aborted == 1 and front.stats.pages_used == 0)
            task = asyncio.create_task(collect_by_id(front, long))
            await eventually(lambda: front.running == 1 and front.stats.running == 1)
            assert await front.abort("mine") == 1
            assert (await task)[-1].finish == "abort"
            await eventually(lambda: front.stats.pages_used == 0)

    async def collect_by_id(front: EngineClient, params: SamplingParams) -> list[Piece]:
        return [piece async for piece in front.stream(list(range(20, 90)), params, request_id="mine")]

    run(test)


def test_a_dead_engine_fails_its_requests_and_is_replaced() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

    async def test() -> None:
        async with serving() as front:
            assert front.ready is not None
            stream = front.stream(list(range(20, 90)), long)
            await anext(stream)
            os.kill(front.ready.pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="exit code -9"):
                async for _ in stream:
                    pass
            assert front.ready is None and front.state == "restarting"
            with pytest.raises(EngineDead):
                await collect(front, [20, 21], GREEDY)
            await eventually(lambda: front.state == "ready", 60)
            assert (await collect(front, [20, 21], GREEDY))[-1].finish == "length"

    run(test)


def test_a_request_without_output_goes_to_one_more_engine() -> None:
    """The next engine computes it, or it is aborted while none serves; a second engine that dies of it is the last."""

    async def test() -> None:
        async with serving() as front:
            assert front.ready is not None
            want = [token for piece in await collect(front, [20, 21], GREEDY) for token in piece.ids]
            os.kill(front.ready.pid, signal.SIGSTOP)
            waiting = asyncio.create_task(collect(front, [20, 21], GREEDY))
            aborted = asyncio.create_task(aborted_request(front))
            await eventually(lambda: front.running == 2)
            os.kill(front.ready.pid, signal.SIGKILL)
            await eventually(lambda: front.state == "restarting")
            assert await front.abort("mine") == 1 and (await aborted)[-1].finish == "abort"
            pieces = await waiting
            assert [token for piece in pieces for token in piece.ids] == want and front.restarts == 1
            send_all = front._send_all

            def poisoned(request: client._LiveRequest) -> None:
                assert front.ready is not None
                os.kill(front.ready.pid, signal.SIGKILL)
                send_all(request)

            front._send_all = poisoned  # type: ignore[method-assign]
            with pytest.raises(EngineDead, match="exit code -9"):
                await collect(front, [20, 21], GREEDY)
            assert front.restarts == 3
            front._send_all = send_all  # type: ignore[method-assign]
            await eventually(lambda: front.state == "ready", 60)
            assert (await collect(front, [20, 21], GREEDY))[-1].finish == "length"

    async def aborted_request(front: EngineClient) -> list[Piece]:
        return [piece async for piece in front.stream([20, 21], GREEDY, request_id="mine")]

    run(test)


def test_a_new_engine_that_does_not_serve_in_time_is_the_end() -> None:
    async def test() -> None:
        async with serving(restart_timeout=3.0) as front:
            assert front.ready is not None
            engine = front.ready.pid
            waiting = asyncio.create_task(collect(front, [20, 21], GREEDY))
            os.kill(engine, signal.SIGKILL)

            def new() -> list[int]:
                pids = [child.pid for child in multiprocessing.active_children() if child.name == "thalweg-engine"]
                return [pid for pid in pids if pid not in (None, engine)]

            await eventually(lambda: bool(new()))
            os.kill(new()[0], signal.SIGSTOP)
            app = build(front, ServerOptions(), DEEPSEEK_V32, path="models/tiny")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as api:
                health, ready = await api.get("/health"), await api.get("/ready")
                assert (health.status_code, ready.status_code) == (200, 503)
                assert health.json() == {"status": "restarting", "reason": "the engine process ended with exit code -9"}
                with pytest.raises(EngineDead, match="could not be started again: no new engine served within 3 s"):
                    await front.ended()
                assert (await api.get("/health")).status_code == 503 and front.state == "dead"
            with pytest.raises(EngineDead, match="no new engine"):
                await waiting

    run(test)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def test() -> None:
        front = EngineClient(msgspec.structs.replace(SETTINGS, model_path=str(tmp_path / "nothing")), Tokenizer(MODEL))
        with pytest.raises(EngineDead, match="nothing"):
            await front.start()
        assert front.state == "dead"

    run(test)


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def test() -> None:
        async with serving() as front:
            running = asyncio.create_task(collect(front, list(range(20, 90)), GREEDY))
            await eventually(lambda: front.running == 1)
            draining = asyncio.create_task(front.drain(30))
            await asyncio.sleep(0)
            with pytest.raises(EngineDead, match="shutting down"):
                await collect(front, [20, 21], GREEDY)
            assert (await running)[-1].finish == "length"
            await draining

    run(test)


def test_closing_ends_what_runs() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

    async def test() -> None:
        async with serving() as front:
            running = asyncio.create_task(collect(front, list(range(20, 90)), long))
            await eventually(lambda: front.running == 1)
            await front.drain(0)
            with pytest.raises(EngineDead, match="shutting down"):
                await asyncio.wait_for(running, 10)
            assert front.running == 0

    run(test)


def test_closing_twice_waits_until_a_stuck_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thalweg.engine.client.GRACE", 1.0)

    async def test() -> None:
        async with serving() as front:
            assert front.ready is not None
            engine = front.ready.pid
            os.kill(engine, signal.SIGSTOP)
            first = asyncio.create_task(front.close())
            await asyncio.sleep(0.2)
            await front.close()
            with pytest.raises(ProcessLookupError):
                os.kill(engine, 0)
            await first

    run(test)


def test_closing_while_a_dead_engine_is_cleaned_up_ends_its_requests() -> None:
    async def test() -> None:
        async with serving() as front:
            assert front.ready is not None
            engine = front.ready.pid
            os.kill(engine, signal.SIGSTOP)
            running = asyncio.create_task(collect(front, [20, 21], GREEDY))
            await eventually(lambda: front.running == 1)
            front._end("it is broken")
            await asyncio.sleep(0.2)
            await front.close()
            with pytest.raises(EngineDead, match="shutting down"):
                await asyncio.wait_for(running, 10)
            with pytest.raises(ProcessLookupError):
                os.kill(engine, 0)
            assert front.ready is None

    run(test)


def test_a_start_removes_the_socket_folders_of_killed_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket_folder() as used:
        left, foreign = tmp_path / "thalweg-engine-left", tmp_path / "thalweg-plan-left"
        left.mkdir()
        foreign.mkdir()
        for folder in left, foreign, used:
            os.utime(folder, (0, 0))
        with socket_folder() as new:
            assert set(tmp_path.iterdir()) == {foreign, used, new}
    assert list(tmp_path.iterdir()) == [foreign]


UNCLOSED = """
import asyncio
from tests.cpu.test_client import MODEL, SETTINGS, EngineClient, Tokenizer

if __name__ == "__main__":
    loop, front = asyncio.new_event_loop(), EngineClient(SETTINGS, Tokenizer(MODEL))
    loop.run_until_complete(front.start())
    print(front.ready.pid, flush=True)
    raise SystemExit("nobody closes it")
"""


def test_an_unclosed_engine_leaves_no_process(tmp_path: Path) -> None:
    script, root = tmp_path / "unclosed.py", MODEL.parents[1]
    script.write_text(UNCLOSED)
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(script)]
    left = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    assert left.returncode == 1 and "nobody closes it" in left.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.stdout), 0)


def test_a_full_queue_refuses() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, n=2)

    async def test() -> None:
        async with serving(max_running_requests=1, max_queued_requests=1) as front:
            stream = front.stream(list(range(20, 90)), long)
            await anext(stream)
            with pytest.raises(Overloaded, match="limit is 2"):
                await collect(front, [20, 21], GREEDY)
            await stream.aclose()

    run(test)
