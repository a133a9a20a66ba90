"""An engine process that hangs, writes a recording on a signal, and dies; and what the server reports meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.cpu.fakes import DEEPSEEK_V32
from tests.cpu.test_client import MODEL, SETTINGS, collect, eventually, run
from thalweg.config.server import ServerOptions
from thalweg.core.errors import EngineDead
from thalweg.core.messages import StartProfile
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.engine.recording import read
from thalweg.server.app import build
from thalweg.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True)
TIMEOUT = 1.0


def test_health_says_when_an_engine_makes_no_step_and_when_it_goes_on(tmp_path: Path) -> None:
    """One engine, four fates: idle for longer than the timeout, stopped, asked for a recording, dead of what it was
    sent.
    """
    folder = tmp_path / "new" / "dumps"
    settings = msgspec.structs.replace(SETTINGS, crash_dump_folder=str(folder), watchdog_timeout=TIMEOUT)

    def dumps() -> list[Path]:
        return sorted(folder.glob("*.json"))

    async def test() -> None:
        front = EngineClient(settings, Tokenizer(MODEL))
        app = build(front, ServerOptions(), DEEPSEEK_V32, path="models/tiny")
        await front.start()
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as api:
                first = await collect(front, [0, 30, 31, 32], GREEDY)
                await front.flush_cache()  # a step is recorded after its tokens are sent, and before this is done
                front.record()
                await eventually(lambda: len(dumps()) == 1)
                await stopped(front, api)
                await eventually(lambda: len(dumps()) == 2)
                front._send(StartProfile(1, "\0"))  # what no front sends
                await eventually(lambda: front.restarts == 1 and front.state == "ready", 60)
        finally:
            await front.close()
        asked, _, died = map(read, dumps())
        out = [token for step in asked.steps for output in step.outputs or () for token in output.tokens]
        assert asked.reason == "asked for by a signal" and out == [t for piece in first for t in piece.ids]
        assert died.reason.startswith("the engine died: ") and "embedded null byte" in died.error

    run(test)


async def stopped(front: EngineClient, api: httpx.AsyncClient) -> None:
    """SIGSTOP while a request runs, SIGCONT once the server has seen it."""
    assert front.ready is not None
    await asyncio.sleep(1.5 * TIMEOUT)
    assert (await api.get("/health")).status_code == 200, "nothing waits for an idle engine"
    running = asyncio.create_task(collect(front, list(range(20, 50)), LONG))
    await eventually(lambda: front.stats.running > 0)
    os.kill(front.ready.pid, signal.SIGSTOP)
    try:
        assert (await api.get("/health")).status_code == 200
        await eventually(lambda: front.state == "hung", 10 * TIMEOUT)
        health = await api.get("/health")
        assert health.status_code == 503 and health.headers["Retry-After"]
        assert health.json()["status"] == "hung" and "no step for 1 s while 1 sequences wait" in health.json()["reason"]
        with pytest.raises(EngineDead, match="no step"):
            await collect(front, [20, 21], GREEDY)
        assert (await api.get("/ready")).status_code == 503
        assert not running.done()
    finally:
        os.kill(front.ready.pid, signal.SIGCONT)
    await eventually(lambda: front.state == "ready")
    assert (await api.get("/health")).json() == {"status": "ready", "reason": ""}
    pieces = await running
    assert pieces[-1].finish == "length" and sum(len(piece.ids) for piece in pieces) == LONG.max_tokens


def test_a_hung_engine_is_replaced_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has output fails, what has none goes to the new engine; the recording of the hang is asked for first."""
    monkeypatch.setattr("thalweg.engine.client.GRACE", 1.0)
    fields = {"crash_dump_folder": str(tmp_path), "watchdog_timeout": TIMEOUT, "watchdog_action": "restart"}

    async def test() -> None:
        front = EngineClient(msgspec.structs.replace(SETTINGS, **fields), Tokenizer(MODEL))
        await front.start()
        try:
            assert front.ready is not None
            stream = front.stream(list(range(20, 50)), LONG)
            await anext(stream)
            os.kill(front.ready.pid, signal.SIGSTOP)
            waiting = asyncio.create_task(collect(front, [20, 21], GREEDY))
            with pytest.raises(EngineDead, match="made no step for 1 s"):
                async for _ in stream:
                    pass
            assert (await waiting)[-1].finish in ("stop", "length") and front.restarts == 1
        finally:
            await front.close()

    run(test)


def test_without_a_folder_the_signal_is_answered_by_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        EngineClient(SETTINGS, Tokenizer(MODEL)).record()

    run(test)
    assert "--crash-dump-folder" in caplog.text


def test_a_hang_is_noticed_when_callers_give_up_sooner_and_while_the_server_drains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = msgspec.structs.replace(SETTINGS, crash_dump_folder=str(tmp_path), watchdog_timeout=TIMEOUT)

    async def give_up(front: EngineClient) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collect(front, [20, 21], GREEDY), TIMEOUT / 3)

    async def test() -> None:
        front = EngineClient(settings, Tokenizer(MODEL))
        await front.start()
        assert front.ready is not None
        engine = front.ready.pid
        try:
            os.kill(engine, signal.SIGSTOP)
            for _ in range(3):
                await give_up(front)
            await eventually(lambda: front.state == "hung", 2)
            os.kill(engine, signal.SIGCONT)
            await eventually(lambda: front.state == "ready")
            running = asyncio.create_task(collect(front, list(range(20, 50)), LONG))
            await eventually(lambda: front.stats.running > 0)
            os.kill(engine, signal.SIGSTOP)
            caplog.clear()
            draining = asyncio.create_task(front.drain(60))
            await eventually(lambda: "the engine has made no step for 1 s" in caplog.text)
            assert front.state == "draining"
        finally:
            os.kill(engine, signal.SIGCONT)
        assert (await running)[-1].finish == "length"
        await draining
        reasons = [read(path).reason for path in sorted(tmp_path.glob("*.json"))]
        assert len(reasons) == 2 and reasons[1] == "no step for 1 s while 1 requests wait"

    run(test)
