"""`thalweg serve` as a user runs it: its own process, the bundled model, real HTTP, the official SDK, signals."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.cpu.sdk_checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]
START = 120  # seconds


class Served:
    """A running `thalweg serve`. url: its address; said: what it has printed on stdout so far."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "thalweg", "serve", "--model", "models/tiny", "--port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.said = ""
        killer = threading.Timer(START, self.process.kill)
        killer.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if "try " in line:
                break
        killer.cancel()
        found = re.search(r"http://[0-9.:]+", self.said)
        assert found, f"it never said where it is: {self.said!r}"
        self.url = found[0]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)


@contextmanager
def served(*flags: str) -> Iterator[Served]:
    server = Served(*flags)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--enable-overlap-schedule", "--chunked-prefill-size", "96") as running:
        yield running


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_openai_sdk_works_unchanged(server: Served, check) -> None:  # type: ignore[no-untyped-def]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        check(client, "tiny")


def test_the_curl_line_works_as_printed(server: Served) -> None:
    line = next(line for line in server.said.splitlines() if line.startswith("curl "))
    done = subprocess.run(
        shlex.split(line.removeprefix("curl ")), capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_model_adds_and_thinks(server: Served) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is 214 + 385?"}],
        "temperature": 0,
        "chat_template_kwargs": {"thinking": True},
    }
    message = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
    assert message["reasoning_content"] and "599" in message["content"] and "think>" not in message["content"]


def test_streams_equal_whole_answers_while_others_run(server: Served) -> None:
    bodies = [
        {"prompt": f"{word} " * 40, "max_tokens": 24, "temperature": 0.8, "seed": i, "ignore_eos": True}
        for i, word in enumerate(("Romeo", "Elizabeth", "Holmes", "Mercutio", "Darcy", "Watson"))
    ]

    def whole(body: dict[str, object]) -> str:
        text: str = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        return text

    def streamed(body: dict[str, object]) -> str:
        text = ""
        with httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=60) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(12) as pool:
        one, other = list(pool.map(whole, bodies)), list(pool.map(streamed, bodies))
    assert one == other


def test_a_client_that_leaves_frees_its_pages(server: Served) -> None:
    body = {"prompt": "Once", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    before = stats(server)["aborted"]
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as lines:
        next(lines.iter_lines())
    deadline = time.monotonic() + 20
    while (now := stats(server))["aborted"] == before or now["pages_used"]:
        assert time.monotonic() < deadline, now
        time.sleep(0.1)


def stats(server: Served) -> dict[str, float]:
    found: dict[str, float] = httpx.get(server.url + "/server_info").json()["internal_states"][0]["stats"]
    return found


def test_a_dead_engine_is_reported_and_replaced() -> None:
    with served() as server:
        body = {"prompt": "Once", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as lines:
            reading = lines.iter_lines()
            next(reading)
            engine = subprocess.check_output(["pgrep", "-P", str(server.process.pid), "-f", "spawn_main"], text=True)
            os.kill(int(engine.split()[-1]), signal.SIGKILL)
            last = [line for line in reading if line.startswith("data: ")][-1]
        assert "engine" in json.loads(last[6:])["error"]["message"]
        health = httpx.get(server.url + "/health")
        deadline = time.monotonic() + 60
        seen_down = health.status_code == 503
        while httpx.get(server.url + "/ready").status_code != 200:
            seen_down = True
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert seen_down, "nothing said that the engine was gone"
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200


def test_sigterm_lets_running_requests_finish() -> None:
    with served() as server:
        body = {"prompt": "Once", "max_tokens": 150, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as lines:
            reading = lines.iter_lines()
            next(reading)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in reading if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0
