"""`--launcher ray`: two nodes of one rank, the second a task of a Ray cluster of two nodes on this machine. Needs Ray,
which is no test dependency: pip install 'thalweg[ray]'.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.matrix import MODEL
from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.launch_ray import on_cluster, words_of

COMMAND = [sys.executable, "-m", "thalweg", "serve", MODEL, "--tp-size", "2", "--nnodes", "2", "--launcher", "ray"]


def test_an_agent_gets_what_its_node_needs() -> None:
    options = options_of(
        model=MODEL, tp_size=4, nnodes=2, launcher="ray", dist_init_addr="10.0.0.1:29500", port=8000, hf_token="secret"
    )
    words = words_of(options, 1)
    assert words[:2] == ["serve", MODEL] and "secret" not in words and "--port" not in words
    pairs = dict(zip(words[2::2], words[3::2], strict=True))
    assert pairs == {"--nnodes": "2", "--node-rank": "1", "--dist-init-addr": "10.0.0.1:29500", "--tp-size": "4"}


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedConfig, match=r"pip install 'thalweg\[ray\]'"):
        on_cluster(options_of(model=MODEL, tp_size=2, nnodes=2, launcher="ray"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Its address."""
    utils = pytest.importorskip("ray.cluster_utils", exc_type=ImportError)
    nodes = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


def ask(port: int) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 27 + 58?"}], "temperature": 0}
    head = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def test_ray_runs_the_other_node(cluster: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with log.open("wb") as file, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        env = os.environ | {"RAY_ADDRESS": cluster}
        server = subprocess.Popen([*COMMAND, "--port", str(port)], env=env, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline and server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2).close()
                break
            except OSError:
                time.sleep(0.3)
        assert "85" in ask(port)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()[-3000:]
    finally:
        server.kill()
    agents = subprocess.run(["pgrep", "-f", "thalweg serve .*--node-rank 1"], capture_output=True, text=True)
    assert not agents.stdout, "the agent has ended with the server"
