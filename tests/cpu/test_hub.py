"""The model hub, simulated by a small HTTP server: names, revisions, tokens, broken connections, no connection."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

REPO, TOKEN = "river/stone-1b", "hf_secret"
MAIN, OLD = "a" * 40, "b" * 40
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
    SHARDS[0]: b"x" * 12_000_000,  # more than the 10 MB chunks in which the hub library writes
    SHARDS[1]: b"y" * 200_000,
    "consolidated.safetensors": b"not in the index",
    "original/params.json": b"not at the top",
    "README.md": b"# stone",
}


@dataclass
class Hub:
    """What the stand-in serves and has seen. cut: the connection breaks once, after so many bytes of the first shard.
    stalled: the second shard stops half-way, until `go` is set.
    """

    files: dict[str, dict[str, bytes]] = field(
        default_factory=lambda: {MAIN: dict(FILES), OLD: {**FILES, "config.json": b'{"old": 1}'}}
    )
    refs: dict[str, str] = field(default_factory=lambda: {"main": MAIN, "v1": OLD, MAIN: MAIN, OLD: OLD})
    private: bool = False
    cut: int = 0
    stalled: bool = False
    go: threading.Event = field(default_factory=threading.Event)
    seen: list[tuple[str, str, str]] = field(default_factory=list)  # (method, path, Range)
    url: str = ""

    def fetched(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.seen if method == "GET" and "/resolve/" in path]


class Handler(BaseHTTPRequestHandler):
    """The parts of the hub's protocol that a download asks: repository info, its tree, and `resolve` with ETag and
    Range.
    """

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.seen.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repo, rest = "/".join(parts[:2]), parts[2:]
        if repo != REPO or (self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            return self.reply(401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        commit = self.hub.refs.get(rest[1] if len(rest) > 1 else "main")
        if commit is None:
            return self.reply(404, b'{"error": "Invalid rev"}', {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.files[commit]
        if parts[0] == "api" and rest[:1] == ["tree"]:
            return self.reply(200, json.dumps([self.entry(name, data) for name, data in files.items()]).encode())
        if parts[0] == "api":
            siblings = [{"rfilename": name} for name in files]
            return self.reply(200, json.dumps({"id": REPO, "sha": commit, "siblings": siblings}).encode())
        name = "/".join(rest[2:])
        if name not in files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self.file(files[name], name, commit, body)

    def entry(self, name: str, data: bytes) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def file(self, data: bytes, name: str, commit: str, body: bool) -> None:
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, asked = 200, self.headers.get("Range", "")
        if asked:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[start:]
        cut = len(data)
        if body and name == SHARDS[0] and self.hub.cut:
            cut, self.hub.cut = self.hub.cut, 0
        if body and name == SHARDS[1] and self.hub.stalled:
            cut = len(data) // 2
        self.reply(status, data, headers, cut)

    def reply(self, status: int, data: bytes, headers: dict[str, str] | None = None, cut: int = 1 << 30) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:cut])
        if cut < len(data):
            if self.hub.stalled:
                self.hub.go.wait(30)
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    server.server_close()


SCRIPT = """
import sys
from thalweg.core.errors import CheckpointError
from thalweg.launch.hub import fetch_weights, locate
model, revision, token, weights = sys.argv[1:5]
try:
    checkpoint = locate(model, revision or None, token or None)
    if weights:
        fetch_weights(checkpoint, token or None)
except CheckpointError as error:
    sys.exit(str(error))
print(checkpoint.folder)
"""


def start(
    url: str, cache: Path, model: str, revision: str, token: str, weights: bool, **env: str
) -> subprocess.Popen[str]:
    """`locate` in a process of its own, since the hub library reads its variables once."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    settings = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        **env,
    }
    arguments = [sys.executable, "-c", SCRIPT, model, revision, token, "yes" if weights else ""]
    return subprocess.Popen(arguments, env=clean | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fetch(
    url: str, cache: Path, model: str = REPO, revision: str = "", token: str = "", weights: bool = False, **env: str
) -> tuple[int, str]:
    """(exit code, folder or the last line of the error)"""
    process = start(url, cache, model, revision, token, weights, **env)
    out, error = process.communicate(timeout=60)
    return process.returncode, (out if process.returncode == 0 else error).strip().splitlines()[-1]


def test_configuration_first_then_the_weights_of_the_index(hub: Hub, tmp_path: Path) -> None:
    code, folder = fetch(hub.url, tmp_path)
    assert code == 0, folder
    texts = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"}
    assert {path.name for path in Path(folder).iterdir()} == texts
    code, folder = fetch(hub.url, tmp_path, weights=True)
    assert code == 0, folder
    assert {path.name for path in Path(folder).iterdir()} == texts | set(SHARDS)
    assert Path(folder).name == MAIN
    for name in (*texts, *SHARDS):
        assert (Path(folder) / name).read_bytes() == FILES[name]
    assert sorted(hub.fetched()) == sorted([*texts, *SHARDS]), "nothing is fetched twice"


@pytest.mark.parametrize("revision", ["v1", OLD])
def test_revision(hub: Hub, tmp_path: Path, revision: str) -> None:
    code, folder = fetch(hub.url, tmp_path, revision=revision, weights=True)
    assert code == 0, folder
    assert (Path(folder) / "config.json").read_bytes() == b'{"old": 1}'
    assert all("/resolve/" not in path or OLD in path for _, path, _ in hub.seen), (
        "weights come from the commit of the configuration"
    )


def test_a_broken_connection_is_resumed_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 11_000_000
    code, folder = fetch(hub.url, tmp_path, weights=True)
    assert code == 0, folder
    assert all((Path(folder) / name).read_bytes() == FILES[name] for name in SHARDS)
    ranges = [int(asked.removeprefix("bytes=").rstrip("-")) for _, _, asked in hub.seen if asked]
    assert len(ranges) == 1 and 1_000_000 < ranges[0] <= 11_000_000, ranges


def test_an_interrupted_fetch_goes_on_from_the_files_that_are_complete(hub: Hub, tmp_path: Path) -> None:
    hub.stalled = True
    process = start(hub.url, tmp_path, REPO, "", "", True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.rglob(f"snapshots/*/{SHARDS[0]}")) or SHARDS[1] not in hub.fetched():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate()
    hub.stalled = False
    hub.go.set()
    code, folder = fetch(hub.url, tmp_path, weights=True)
    assert code == 0, folder
    assert all((Path(folder) / name).read_bytes() == FILES[name] for name in SHARDS)
    assert [hub.fetched().count(name) for name in SHARDS] == [1, 2]


def test_a_shard_that_the_index_names_but_the_hub_has_not(hub: Hub, tmp_path: Path) -> None:
    del hub.files[MAIN][SHARDS[1]]
    code, error = fetch(hub.url, tmp_path, weights=True)
    assert code != 0 and SHARDS[1] in error


@pytest.mark.parametrize("way", ["flag", "HF_TOKEN"])
def test_token(hub: Hub, tmp_path: Path, way: str) -> None:
    hub.private = True
    code, error = fetch(hub.url, tmp_path)
    assert code != 0 and REPO in error and "--hf-token" in error
    code, error = fetch(hub.url, tmp_path, token="hf_wrong")
    assert code != 0 and "hf_wrong" not in error
    code, folder = fetch(hub.url, tmp_path, token=TOKEN) if way == "flag" else fetch(hub.url, tmp_path, HF_TOKEN=TOKEN)
    assert code == 0, folder


def test_the_cache_serves_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub.url, tmp_path, weights=True)[0] == 0
    before = len(hub.seen)
    code, folder = fetch(hub.url, tmp_path, weights=True, HF_HUB_OFFLINE="1")
    assert code == 0 and (Path(folder) / SHARDS[0]).is_file()
    assert len(hub.seen) == before
    code, folder = fetch("http://127.0.0.1:9", tmp_path, weights=True)  # nobody listens there
    assert code == 0, folder


@pytest.mark.parametrize(
    ("model", "revision", "words"),
    [
        ("river/sand-1b", "", ("river/sand-1b", "name")),
        (REPO, "v9", ("v9", "branch, tag or commit")),
        ("no/such/folder", "", ("no/such/folder", "path")),
        ("nowhere", "", ("nowhere: no such folder",)),
    ],
)
def test_missing_models_are_named(hub: Hub, tmp_path: Path, model: str, revision: str, words: tuple[str, ...]) -> None:
    code, error = fetch(hub.url, tmp_path, model, revision)
    assert code != 0 and all(word in error for word in words), error
    assert "Traceback" not in error


@pytest.mark.parametrize(("offline", "word"), [("1", "HF_HUB_OFFLINE"), ("0", "network")])
def test_no_hub_and_nothing_cached(tmp_path: Path, offline: str, word: str) -> None:
    code, error = fetch("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE=offline)
    assert code != 0 and f"{REPO}: no such folder; the model hub cannot be reached" in error and word in error


def test_a_repository_without_a_model_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files[MAIN]["config.json"]
    code, error = fetch(hub.url, tmp_path)
    assert code != 0 and "no config.json" in error


def test_a_local_folder_needs_no_hub(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    code, folder = fetch("http://127.0.0.1:9", tmp_path, str(tmp_path / "model"), weights=True)
    assert (code, folder) == (0, str(tmp_path / "model"))
    code, error = fetch("http://127.0.0.1:9", tmp_path, str(tmp_path / "model"), revision="v1")
    assert code != 0 and "revision" in error
    (tmp_path / "file").touch()
    code, error = fetch("http://127.0.0.1:9", tmp_path, str(tmp_path / "file"))
    assert code != 0 and "is a file" in error


def test_a_model_from_the_hub_generates(hub: Hub, tmp_path: Path) -> None:
    """The flags reach the hub, and what it sends is a model: the bundled one."""
    tiny = Path(__file__).parents[2] / "models" / "tiny"
    hub.files[OLD] = {path.name: path.read_bytes() for path in tiny.iterdir() if path.is_file()}
    hub.private = True
    command = [
        sys.executable,
        "-m",
        "thalweg",
        "generate",
        REPO,
        "--revision",
        "v1",
        "--hf-token",
        TOKEN,
        "--prompt",
        "Good",
    ]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    command += ["--max-tokens", "4", "--max-total-tokens", "4096"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=tiny.parents[1]
    )
    assert done.returncode == 0 and done.stdout.startswith("Good"), done.stderr


def test_pull_downloads_a_model_with_a_progress_bar_and_prints_its_folder(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 11_000_000  # and goes on from there
    command = [sys.executable, "-m", "thalweg", "pull"]
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([*command, REPO], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "100%" in done.stderr, done.stderr
    assert (Path(done.stdout.strip()) / SHARDS[0]).read_bytes() == FILES[SHARDS[0]]
    script = "import sys; from thalweg.launch.hub import cached_folder as f; print(f(sys.argv[1]), f(sys.argv[2]))"
    run = [sys.executable, "-c", script, REPO, "river/sand"]
    found = subprocess.run(run, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == [done.stdout.strip(), "river/sand"]
    done = subprocess.run([*command, REPO + "b"], env=env, capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line.startswith("thalweg: ") and line.endswith(f"did you mean {REPO}?"), line


def test_a_misspelt_folder_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "river-7b").mkdir()
    (tmp_path / "river-7b" / "config.json").touch()
    code, error = fetch("http://127.0.0.1:9", tmp_path, str(tmp_path / "rivr-7b"))
    assert code != 0 and error.endswith(f"did you mean {tmp_path / 'river-7b'}?")
    for near in ("models/tinyy", "model/tiny", "./models/tinyy", "tiny"):  # the bundled one
        code, error = fetch("http://127.0.0.1:9", tmp_path, near, HF_HUB_OFFLINE="1")
        assert code != 0 and error == f"{near}: no such folder; did you mean models/tiny?"
    for far in ("models/foo", "river/tiny"):
        code, error = fetch("http://127.0.0.1:9", tmp_path, far, HF_HUB_OFFLINE="1")
        assert code != 0 and "the network (HF_ENDPOINT" in error and "did you mean" not in error
