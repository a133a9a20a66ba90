"""One process of several fails while they start: the others end, and the error names it. With the bundled model."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose.matrix import MODEL
from tests.ranks.faults import FAULTS, planted, shared_memory
from tests.ranks.test_processes import COPIES, DP2, LIMIT_S, PROMPT, TP2, collect, config, is_running, serving
from thalweg.core.errors import EngineDead
from thalweg.engine.client import EngineClient
from thalweg.engine.local import LocalEngine
from thalweg.llm import AsyncLLM
from thalweg.text.tokenizer import Tokenizer

IMPORTS_S = 30.0  # in which a process of a loaded machine has imported everything
FATAL = [fault for fault in FAULTS if not fault.startswith("weights")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = shared_memory()
    yield
    assert not multiprocessing.active_children(), "no process stays"
    assert shared_memory() <= before, "no shared memory stays"


async def start_error(**fields: Any) -> str:
    front = EngineClient(config(**fields), Tokenizer(Path(MODEL)))
    with pytest.raises(EngineDead) as error:
        await asyncio.wait_for(front.start(), IMPORTS_S + LIMIT_S)
    assert front.state == "dead"
    return str(error.value)


@pytest.mark.parametrize("fault", FATAL)
def test_a_client_names_the_process_that_fails(fault: str) -> None:
    with planted(fault, 1):
        error = asyncio.run(start_error(**TP2))
    assert error.startswith("rank 1 (TP 1)") and FAULTS[fault][-1] in error


@pytest.mark.parametrize("layout", [DP2, COPIES, TP2], ids=["dp2", "copies", "tp2"])
def test_a_client_names_the_first_process(layout: dict[str, Any]) -> None:
    with planted("file", 0):
        error = asyncio.run(start_error(**layout))
    assert "rank 0" in error or "copy " in error
    assert "model.safetensors: read error" in error


@pytest.mark.parametrize("fault", FATAL)
def test_the_callers_thread_is_freed(fault: str) -> None:
    """It waits for the process that fails, in the rendezvous or in a collective."""
    begun = time.monotonic()
    with planted(fault, 1), pytest.raises(EngineDead, match=r"^rank 1 \(TP 1\)") as error:
        LocalEngine(config(**TP2))
    assert FAULTS[fault][-1] in str(error.value)
    assert time.monotonic() - begun < IMPORTS_S + LIMIT_S


@pytest.mark.parametrize("fault", ["no GPU", "memory", "killed"])
@pytest.mark.parametrize("layout", [DP2, COPIES], ids=["dp2", "copies"])
def test_the_callers_thread_is_freed_in_other_layouts(layout: dict[str, Any], fault: str) -> None:
    name = "copy" if layout is COPIES else r"rank 1 \(DP 1"
    with planted(fault, 1 if layout is DP2 else 0), pytest.raises(EngineDead, match=f"^{name}"):
        LocalEngine(config(**layout))


def test_the_callers_own_failure_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.engine import build

    module, name, fails, text = FAULTS["file"]
    assert module is build
    monkeypatch.setattr(module, name, fails)
    with pytest.raises(OSError, match=text):
        LocalEngine(config(**TP2))


def test_an_asynchronous_llm_says_why() -> None:
    async def test() -> None:
        async with AsyncLLM(MODEL, device="cpu", tp_size=2, max_total_tokens=2048):
            pass

    with planted("memory", 1), pytest.raises(EngineDead, match=r"rank 1 \(TP 1\): MemoryError: none left"):
        asyncio.run(asyncio.wait_for(test(), IMPORTS_S + LIMIT_S))


def test_weights_that_one_process_cannot_load_again_are_lost_on_all() -> None:
    async def test() -> None:
        async with serving(**TP2, weight_updates=(MODEL,)) as front:
            assert front.weights_lost
            assert len(await collect(front, PROMPT, 4)) == 4

    with planted("weights", 1):
        asyncio.run(asyncio.wait_for(test(), 2 * IMPORTS_S))


@pytest.mark.parametrize("moment", ["starting", "serving"])
def test_a_killed_server_leaves_no_process(moment: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "thalweg", "serve", MODEL, "--device", "cpu", "--tp-size", "2", "--port", "0"]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + IMPORTS_S + LIMIT_S
        want = "address " if moment == "serving" else ""
        while not (len(pids := session(server.pid)) >= 3 and want in log.read_text()):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        os.kill(server.pid, signal.SIGKILL)
        begun = time.monotonic()
        server.wait()
        while any(map(is_running, pids)):
            assert time.monotonic() - begun < LIMIT_S
            time.sleep(0.05)
    finally:
        for pid in session(server.pid):
            os.kill(pid, signal.SIGKILL)


def session(leader: int) -> list[int]:
    """The processes of a session that run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            found.append(int(folder.name))
    return found
