"""Commands with a real engine: plan, generate, chat, and a server that is started, queried and stopped."""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from thalweg.cli import main
from thalweg.launch import serve

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
TINY = "models/tiny"
SMALL = ("--max-total-tokens", "8192", "--threads", "1")


class Done(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def thalweg(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process, with `text` on its standard input."""
    monkeypatch.chdir(ROOT)

    def run(*argv: str, text: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        capfd.readouterr()
        status = main(argv)
        return Done(status, *capfd.readouterr())

    return run


class Server:
    """`thalweg serve` on a free port. lines: what it printed until it was ready."""

    def __init__(self, *argv: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "thalweg", "serve", "--port", "0", *SMALL, *argv]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (env or {})
        )
        self.log: list[str] = []
        self._out: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()
        self.lines: list[str] = []
        deadline = time.monotonic() + 90
        while not any(line.startswith("try ") for line in self.lines):
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.log)
            with contextlib.suppress(queue.Empty):
                self.lines.append(self._out.get(timeout=0.1))
        self.url = next(line for line in self.lines if line.startswith("address ")).split()[-1]

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._out.put(line)

    def get(self, path: str, context: ssl.SSLContext | None = None) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30, context=context) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


@contextlib.contextmanager
def serving(*argv: str, **env: str) -> Iterator[Server]:
    server = Server(*argv, env=env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(10)


def curl_line(server: Server) -> tuple[str, dict[str, str], bytes]:
    """(address, headers, body) of the printed curl command."""
    words = shlex.split(next(line for line in server.lines if line.startswith("curl ")).partition("curl ")[2])
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    return next(word for word in words if word.startswith("http")), headers, words[words.index("-d") + 1].encode()


# ---- plan ----


def test_plan_says_sizes_and_choices(thalweg: Run) -> None:
    done = thalweg("plan", TINY, "--json", "--max-running-requests", "7", "--tool-call-parser", "hermes")
    assert done.status == 0, done.err
    plan = json.loads(done.out)
    config = json.loads((ROOT / TINY / "config.json").read_text())
    assert plan["kv_bytes_per_token"] == sum(plane["bytes_per_token"] for plane in plan["planes"])
    latent = next(plane for plane in plan["planes"] if plane["name"] == "latent")
    assert (
        latent["bytes_per_token"]
        == config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 4
    )
    assert (
        plan["kv_bytes"] == plan["pages"] * 64 * plan["kv_bytes_per_token"] and plan["kv_tokens"] == plan["pages"] * 64
    )
    assert plan["decisions"]["max_running_requests"] == {
        "name": "max_running_requests",
        "value": 7,
        "source": "user",
        "reason": "",
    }
    assert plan["architecture"] == config["architectures"][0] and plan["eos_ids"]
    parser = plan["decisions"]["tool_call_parser"]
    assert (parser["value"], parser["reason"]) == ("qwen25", "hermes is called qwen25 here")
    text = thalweg("plan", TINY).out
    assert f"{plan['parameters']:,} parameters" in text and "random_seed" in text and "of each process" not in text


@pytest.mark.parametrize("drafter", [(), ("--speculative-algorithm", "NEXTN")])
def test_parameters_are_those_of_all_processes(drafter: tuple[str, ...], thalweg: Run) -> None:
    alone = json.loads(thalweg("plan", TINY, "--json", *drafter).out)
    divided = json.loads(thalweg("plan", TINY, "--json", "--tp-size", "2", *drafter).out)
    assert divided["parameters"] == alone["parameters"] and divided["weight_bytes"] < alone["weight_bytes"]
    line = rf"{alone['parameters']:,} parameters, [\d.]+ MB in memory of each process"
    assert re.search(line, thalweg("plan", TINY, "--tp-size", "2", *drafter).out)


def test_plan_needs_no_weights_and_no_tokenizer(tmp_path: Path, thalweg: Run) -> None:
    (tmp_path / "config.json").write_bytes((ROOT / TINY / "config.json").read_bytes())
    done = thalweg("plan", str(tmp_path), "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["parameters"] == json.loads(thalweg("plan", TINY, "--json").out)["parameters"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plan", TINY, "--quantization", "none"], ("quantization: none was asked for", "says fp8", "leave")),
        (["plan", "/nowhere/at/all"], ("/nowhere/at/all", "check the path")),
        (["plan", TINY, "--tp-size", "3"], ("tp_size", "use --tp-size 1, 2, 4 or 8")),
        (["plan", TINY, "--attention-backend", "fa3"], ("attention_backend", "fa3", "reference")),
        (["plan", TINY, "--max-model-len", "999999"], ("context_length", "999999")),
        (["plan", TINY, "--tool-call-parser", "x"], ("tool_call_parser", "'x'", "deepseekv32")),
        (["serve", TINY, "--ssl-certfile", "/nowhere.pem", "--port", "0"], ("/nowhere.pem",)),
    ],
)
def test_mistakes_are_told_without_a_traceback(argv: list[str], words: tuple[str, ...], thalweg: Run) -> None:
    done = thalweg(*argv)
    assert done.status in (1, 2) and "Traceback" not in done.err
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("thalweg: ") and all(word in last for word in words), done.err


def test_a_broken_generation_config_is_named(tmp_path: Path, thalweg: Run) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((ROOT / TINY / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"top_p": 3}')
    done = thalweg("plan", str(tmp_path))
    assert done.status == 1 and "generation_config.json" in done.err and "top_p" in done.err
    assert thalweg("plan", str(tmp_path), "--sampling-defaults", "openai").status == 0
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95}')
    plan = json.loads(thalweg("plan", str(tmp_path), "--json").out)
    assert plan["sampling_defaults"]["temperature"] == 0.6 and plan["sampling_defaults"]["top_p"] == 0.95


def test_a_taken_port_is_told_before_anything_is_loaded(thalweg: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = thalweg("serve", "no/such/model/here", "--port", port)
    assert done.status == 2 and f"port {port}" in done.err and "no/such" not in done.err, done.err


# ---- generate and chat ----


def test_generate_prints_completions_and_repeats_with_a_seed(thalweg: Run) -> None:
    flags = ("generate", TINY, *SMALL, "--max-tokens", "8", "--random-seed", "5", "--json", "--n", "2")
    done = thalweg(*flags, "--prompt", "Good morrow", "--prompt", "To be")
    assert done.status == 0, done.err
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["Good morrow", "To be"]
    assert all(
        len(answer["outputs"]) == 2 and 0 < one["tokens"] <= 8 for answer in answers for one in answer["outputs"]
    )
    assert thalweg(*flags, "--prompt", "Good morrow", "--prompt", "To be").out == done.out


def test_generate_reads_standard_input(thalweg: Run) -> None:
    done = thalweg("generate", TINY, *SMALL, "--max-tokens", "4", "--temperature", "0", text="Good morrow")
    assert done.status == 0 and done.out.startswith("Good morrow"), done.err


def test_a_command_without_a_model_takes_the_bundled_one(
    thalweg: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = thalweg("plan", "--json", "--quantization", "fp8")
    assert plan.status == 0 and "models/tiny is used, which comes with Thalweg" in plan.err, plan.err
    assert json.loads(plan.out)["decisions"]["quantization"]["source"] == "user"
    monkeypatch.chdir(tmp_path)  # where no folder has that name
    for argv in ((), (TINY,)):
        assert main(["plan", "--json", *argv]) == 0


def test_run_answers_its_prompt_or_standard_input(thalweg: Run) -> None:
    flags = ("run", TINY, *SMALL, "--max-tokens", "8", "--temperature", "0")
    done = thalweg(*flags, "Good", "morrow")
    assert done.status == 0 and done.out.strip() and "> " not in done.out, done.err
    assert thalweg(*flags, text="Good morrow\n").out == done.out
    assert thalweg("run", "Good morrow", *flags[2:]).out == done.out, "of the bundled model"
    done = thalweg(*flags)
    assert done.status == 2 and "no prompt: 'models/tiny' was taken as MODEL" in done.err
    assert "no prompt: 'hi' was taken as MODEL; write the prompt after it" in thalweg("run", "hi").err
    assert "no prompt: write it after MODEL" in thalweg("run").err


def test_chat_answers_each_line_until_the_input_ends(thalweg: Run) -> None:
    done = thalweg("chat", TINY, *SMALL, "--max-tokens", "8", text="Hello\n/new\nHello\n")
    assert done.status == 0, done.err
    assert done.out.count("> ") >= 3 and len(done.out) > 20
    assert done.out.endswith("> \n"), "the shell's prompt begins a line of its own"


def test_chat_commands_are_answered_without_the_model(thalweg: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flags = ("chat", TINY, *SMALL, "--max-tokens", "8", "--temperature", "0")
    done = thalweg(*flags, text="/help\n/?\n/foo\n/bye\n")
    first, *answers, last = done.out.splitlines()
    text = "/new forgets the conversation, /bye or Ctrl-D leaves, Ctrl-C stops an answer"
    assert done.status == 0 and first == f"tiny: {text}", done.err
    assert answers == [f"> {text}"] * 2 + ["> unknown command /foo; there is /new, /bye, /help"] and last == "> "
    done = thalweg(*flags, text="/usr/bin is what?\n/usr/bin\n")
    assert done.status == 0 and "unknown command" not in done.out and len(done.out.splitlines()) >= 4, done.out


# ---- serve ----


def test_a_server_from_start_to_drain() -> None:
    with serving(TINY, "--drain-timeout", "60", "--device", "cpu") as server:
        names = [line.split("  ")[0].split(" curl")[0] for line in server.lines]
        assert names == ["model", "runs on", "address", "curl", "docs", "try"] and server.log == []
        assert server.lines[1].startswith("runs on  cpu, KV cache of "), "a device that the user chose has no reason"
        assert f" {server.url}/ in a browser" in server.lines[-1] and "/resolved" in server.lines[-1]
        assert server.get("/ready")[0] == server.get("/health")[0] == 200
        status, page = server.get("/")
        assert status == 200 and b"<html" in page.lower()
        address, headers, body = curl_line(server)
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=60) as reply:
            assert json.load(reply)["choices"][0]["message"]["role"] == "assistant"
        assert json.loads(server.get("/server_info")[1])["model_path"] == str(ROOT / TINY), "from any folder"
        decisions = json.loads(server.get("/resolved")[1])
        assert "chunked_prefill_size" in json.dumps(decisions)
        body = json.dumps(
            {"model": "tiny", "prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
        ).encode()
        request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as stream:
            first = stream.readline()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert server.get("/ready")[0] == 503, "no new work"
            refused = server.get("/v1/models")[0]
            rest = stream.read().decode()
        assert first.startswith(b"data: ") and rest.rstrip().endswith("data: [DONE]"), "what ran has finished"
        assert '"finish_reason":"length"' in rest and refused == 200
        assert server.process.wait(30) == 0
        assert "Traceback" not in "".join(server.log)


def test_the_lines_of_a_server_of_two_processes() -> None:
    alone = json.loads(subprocess.check_output([sys.executable, "-m", "thalweg", "plan", TINY, "--json"], cwd=ROOT))
    with serving(TINY, "--tp-size", "2") as server:
        assert f" {alone['parameters']:,} parameters" in server.lines[0]
        assert ", 2 processes, KV cache of " in server.lines[1]
        assert server.stop() == 0


def test_the_documentation_is_named_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert serve.documentation() == "docs/README.md; "
    monkeypatch.chdir(tmp_path)
    assert serve.documentation() == f"{ROOT}/docs/README.md; "
    monkeypatch.setattr(serve, "DOCS", tmp_path / "docs" / "README.md")  # as where it was not installed
    assert serve.documentation() == ""


def test_a_server_whose_engine_cannot_come_back_ends(tmp_path: Path) -> None:
    """With an exit status that says so, and the port is free again."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / TINY, folder)
    with serving(str(folder), "--restart-timeout", "2") as server:
        (folder / "config.json").unlink()
        engine = subprocess.check_output(["pgrep", "-P", str(server.process.pid), "-f", "spawn_main"], text=True)
        os.kill(int(engine.split()[-1]), signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert server.log[-1].startswith("thalweg: the engine could not be started again: "), server.log
        with socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))):
            pass


def test_https_keys_names_and_a_yaml_file(tmp_path: Path) -> None:
    file, keys = tmp_path / "serve.yaml", tmp_path / "keys.yaml"
    keys.write_text("- {name: alice, key: sk-alice}")
    file.write_text(
        f"model: {TINY}\nload_format: dummy\nserved_model_name: [river, stone]\nserver:\n  api_key: s3cret\n"
        f"  api_keys_file: {keys}\n  log_requests_level: 1\n"
        f"ssl_certfile: {DATA / 'tls-cert.pem'}\nssl_keyfile: {DATA / 'tls-key.pem'}\n"
    )
    with serving("--config", str(file), "--log-level", "warning") as server:
        context = ssl.create_default_context(cafile=str(DATA / "tls-cert.pem"))
        assert server.url.startswith("https://127.0.0.1:")
        assert server.get("/ready", context)[0] == 200 and server.get("/v1/models", context)[0] == 401
        server.process.send_signal(signal.SIGHUP)  # as whoever rotates keys does: it goes on
        address, headers, body = curl_line(server)
        assert headers["Authorization"] == "Bearer $API_KEY" and "s3cret" not in "".join(server.lines + server.log)
        headers["Authorization"] = "Bearer s3cret"
        with urllib.request.urlopen(
            urllib.request.Request(address, body, headers), timeout=60, context=context
        ) as reply:
            answer: dict[str, Any] = json.load(reply)
        assert answer["model"] == "river" and "--cacert" in "".join(server.lines)
        assert "--log-requests-level 1 says nothing without --log-requests" in "".join(server.log)
        assert server.stop(signal.SIGINT) == 0


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, thalweg: Run) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((ROOT / TINY / name).read_bytes())
    done = thalweg("serve", str(tmp_path), "--port", "0", *SMALL)
    assert done.status == 1
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("thalweg: ") and "safetensors" in last, done.err
