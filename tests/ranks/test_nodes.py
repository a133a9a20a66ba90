"""Two nodes of two ranks over Gloo: this machine and a network namespace of it, joined by a pair of virtual devices. A
slow link, a partition and a killed node; the engine names the node, and serves again once it is back.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.compose.matrix import MODEL
from thalweg.engine.node_link import interface_of

NAMESPACE, DEVICES, HOSTS = "thalweg-node1", ("thalweg0", "thalweg1"), ("10.87.65.1", "10.87.65.2")
OTHER_HOST = "10.87.65.9"
LAYOUT = "--tp-size 4 --dp-size 2 --enable-dp-attention --ep-size 4 --threads 1 --no-warmup".split()
START_S, NAMED_S = 120.0, 30.0
INSIDE = ["ip", "netns", "exec", NAMESPACE]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def link() -> Iterator[None]:
    """The namespace and the way to it; skips where this user may not make them."""
    with contextlib.ExitStack() as undo:
        try:
            ip("netns", "add", NAMESPACE)
            undo.callback(ip, "netns", "del", NAMESPACE)
            ip("link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1], "netns", NAMESPACE)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        for host in (OTHER_HOST, HOSTS[0]):  # the second is a secondary address
            ip("addr", "add", f"{host}/24", "dev", DEVICES[0])
        ip("link", "set", DEVICES[0], "up")
        for words in ("link set lo up", f"addr add {HOSTS[1]}/24 dev {DEVICES[1]}", f"link set {DEVICES[1]} up"):
            subprocess.run([*INSIDE, "ip", *words.split()], check=True)
        yield


class Nodes:
    """The two commands. host: of the first; before: what runs the second one's command. log: what they print."""

    def __init__(
        self,
        folder: Path,
        host: str,
        flags: Sequence[str],
        before: Sequence[str],
        environments: Sequence[dict[str, str]],
    ) -> None:
        self.log, self.agent = folder / "log.txt", subprocess.Popen[bytes](["true"])
        self.flags, self.before, self.environments = flags, before, environments
        with socket.create_server((host, 0)) as free, socket.create_server(("127.0.0.1", 0)) as web:
            self.address, self.port = f"{host}:{free.getsockname()[1]}", web.getsockname()[1]
        self.first = self._run(0, "--port", str(self.port))
        self.start_agent()

    def _run(self, node: int, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "thalweg", "serve", MODEL, *self.flags, "--nnodes", "2"]
        command += ["--node-rank", str(node), "--dist-init-addr", self.address, *flags]
        environment = os.environ | self.environments[node]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*(self.before if node else ()), *command], stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def start_agent(self) -> None:
        self.agent = self._run(1)

    def health(self) -> dict[str, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))
        except OSError:
            return {"status": "no server"}

    def wait(self, *states: str, seconds: float = START_S) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while (health := self.health())["status"] not in states:
            assert time.monotonic() < deadline and self.first.poll() is None, (
                f"{health}\n{self.log.read_text()[-3000:]}"
            )
            time.sleep(0.1)
        return health

    def answer(self, question: str) -> str:
        message = {"role": "user", "content": question}
        body = json.dumps({"model": "tiny", "messages": [message], "temperature": 0, "max_tokens": 24}).encode()
        url, head = f"http://127.0.0.1:{self.port}/v1/chat/completions", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, head), timeout=60) as reply:
            return str(json.load(reply)["choices"][0]["message"]["content"])

    def check(self) -> None:
        """Sums, some of which each data-parallel rank gets."""
        for a, b in ((27, 58), (45, 23), (12, 34), (61, 17)):
            assert str(a + b) in self.answer(f"What is {a} + {b}?")

    def kill_agent(self) -> None:
        os.killpg(self.agent.pid, signal.SIGKILL)
        self.agent.wait()

    def close(self) -> None:
        for process in self.first, self.agent:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def nodes(link: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("nodes"), HOSTS[0], LAYOUT, INSIDE, ({}, {}))
    with contextlib.closing(made):
        made.wait("ready")
        yield made


def test_two_nodes_serve_also_over_a_slow_link(nodes: Nodes) -> None:
    assert interface_of(HOSTS[0]) == interface_of(OTHER_HOST) == DEVICES[0] and not interface_of(HOSTS[1])
    ranks = nodes.health()["ranks"]
    assert [name for name in ranks if "node 1" in name] == [
        "rank 2 (node 1, DP 1, TP 0)",
        "rank 3 (node 1, DP 1, TP 1)",
    ]
    nodes.check()
    slow = "rate 2mbit burst 16kb latency 400ms".split()
    subprocess.run(["tc", "qdisc", "add", "dev", DEVICES[0], "root", "tbf", *slow], check=True)
    nodes.check()
    shown = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", DEVICES[0]], check=True, capture_output=True)
    assert json.loads(shown.stdout)[0]["overlimits"] > 100, "packets have waited"
    subprocess.run(["tc", "qdisc", "del", "dev", DEVICES[0], "root"], check=True)


def test_a_partition_is_named_and_mended(nodes: Nodes) -> None:
    ip("link", "set", DEVICES[0], "down")
    health = nodes.wait("restarting", seconds=NAMED_S)
    assert "lost with node 1" in health["reason"]
    ip("link", "set", DEVICES[0], "up")
    nodes.wait("ready")
    nodes.check()


def test_a_killed_node_is_named_and_may_come_back(nodes: Nodes) -> None:
    nodes.kill_agent()
    health = nodes.wait("restarting", seconds=NAMED_S)
    assert "lost with node 1" in health["reason"]
    nodes.start_agent()
    nodes.wait("ready")
    nodes.check()


@pytest.mark.soak
def test_torchrun_starts_both_nodes(tmp_path: Path) -> None:
    """Two torchruns on this machine, as on two."""
    with socket.create_server(("127.0.0.1", 0)) as meet, socket.create_server(("127.0.0.1", 0)) as web:
        address, port = f"127.0.0.1:{meet.getsockname()[1]}", web.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--no-python"]
    serve = [sys.executable, "-m", "thalweg", "serve", MODEL, "--tp-size", "2", "--launcher", "torchrun"]
    log = tmp_path / "log.txt"
    with log.open("wb") as file:
        both = [
            subprocess.Popen([*torchrun, *serve, "--port", str(port)], stdout=file, stderr=file, start_new_session=True)
            for _ in range(2)
        ]
    try:
        deadline, url = time.monotonic() + START_S, f"http://127.0.0.1:{port}/ready"
        while True:
            assert time.monotonic() < deadline and all(one.poll() is None for one in both), log.read_text()[-3000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                break
            time.sleep(0.2)
    finally:
        for one in both:
            one.kill()
            one.wait()
    assert "node 1 (" in log.read_text()
    deadline = time.monotonic() + NAMED_S
    while subprocess.run(["pgrep", "-f", f"thalweg serve .*--port {port}"], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < deadline, "the servers end with torchrun"
        time.sleep(0.1)


def test_a_node_that_does_not_fit_is_refused(nodes: Nodes) -> None:
    command = [sys.executable, "-m", "thalweg", "serve", MODEL, *LAYOUT, "--nnodes", "2", "--node-rank", "1"]
    done = subprocess.run([*command, "--dist-init-addr", nodes.address], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is a node 1 already" in done.stderr


def test_the_agent_ends_with_the_server(nodes: Nodes) -> None:
    nodes.first.send_signal(signal.SIGTERM)
    assert nodes.first.wait(30) == 0 and nodes.agent.wait(30) == 0
