"""What vLLM's tests import, replaced: the server by `thalweg serve`, the models by one small one, `vllm` by stand-ins.

A pytest plugin, loaded before any test. A name of `vllm` that is not replaced can be imported, and raises when a test
uses it: a test of vLLM's own classes fails and never passes by accident.
"""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

MODEL = os.environ.get("PEER_TESTS_MODEL", "models/tiny")
NAMES = os.environ.get("PEER_TESTS_NAMES", "").split()  # of models in the tests: one server answers to all
LONGEST = 2048  # tokens of the context: the small model knows no end, and talks up to it
_FLAGS = {  # vLLM's flag → ours, of those that change answers
    "--api-key": "--api-key",
    "--uds": "--uds",
    "--root-path": "--root-path",
}
_SWITCHES = {"--enable-force-include-usage", "--enable-request-id-headers", "--enable-server-load-tracking"}
_servers: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], int]] = {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _translated(arguments: Sequence[str]) -> tuple[str, ...]:
    """The flags of `thalweg serve` for vLLM's; flags about devices, memory, LoRA and backends are left out."""
    flags = ["--context-length", str(LONGEST)]
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    known = set(_serve_help().split())
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        if flag == "--reasoning-parser":
            flags += ["--chat-template", str(_thinking_template())]
        elif flag in _FLAGS and (ours := _FLAGS[flag]) in known:
            flags += [ours, value]
        elif flag in _SWITCHES & known:
            flags.append(flag)
    return tuple(flags)


def _thinking_template() -> Path:
    """The small model's chat template, with thinking where the request does not choose, as the tests expect."""
    path = Path(tempfile.gettempdir()) / "thinks_by_default.jinja"
    path.write_text(_template_source("{%- set thinking = thinking if thinking is defined else true -%}"))
    return path


def _template_source(head: str) -> str:
    from thalweg.text import chat

    return "{%- set style = 'v32' -%}" + head + (chat.TEMPLATES / "deepseek_v32.jinja").read_text()


def _serve_help() -> str:
    global _help
    if not _help:
        command = [sys.executable, "-m", "thalweg", "serve", "--help"]
        _help = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace(",", " ")
    return _help


_help = ""


class RemoteOpenAIServer:
    """A running `thalweg serve`. Tests that start it with the same flags share one."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], env_dict: Mapping[str, str] | None = None, **_: Any
    ) -> None:
        key = (env_dict or {}).get("VLLM_API_KEY")
        flags = _translated([*vllm_serve_args, *(["--api-key", key] if key else [])])
        self.host, self.uds = "127.0.0.1", None
        if flags not in _servers or _servers[flags][0].poll() is not None:
            _servers[flags] = self._start(flags)
        self.proc, self.port = _servers[flags]

    @staticmethod
    def _start(flags: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], int]:
        port = _free_port()
        command = [sys.executable, "-m", "thalweg", "serve", MODEL, "--port", str(port), "--device", "cpu", *flags]
        command += [part for name in NAMES for part in ("--served-model-name", name)]
        process = subprocess.Popen(command)
        for _ in range(1200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}: {' '.join(command)}")
            time.sleep(0.1)
        _wait_until_ready(port)
        return process, port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The server stays for the next test; all end with the run."""

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *(part.strip("/") for part in parts)))

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(**self._client_options("v1", options))

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._client_options("v1", options))

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._client_options("", options))

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._client_options("", options))

    def _client_options(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        url = self.url_for(path).rstrip("/")
        return {"base_url": url, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120} | options


def _wait_until_ready(port: int) -> None:
    import httpx

    for _ in range(600):
        if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=10).status_code == 200:
            return
        time.sleep(0.1)
    raise RuntimeError("the server does not become ready")


@atexit.register
def _stop_servers() -> None:
    for process, _ in _servers.values():
        process.terminate()
    for process, _ in _servers.values():
        process.wait(30)


class _Missing(type):
    """A class of vLLM's that nothing stands in for."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"vLLM's own {cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"vLLM's own {cls.__name__}.{name}")


class _Platform:
    """No GPU of any make."""

    device_type = "cpu"

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: name == "is_cpu"


def _tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    tokenizer.chat_template = _template_source("")
    return tokenizer


class _ModelConfig:
    def __init__(self, **_: Any) -> None: ...

    def get_vocab_size(self) -> int:
        return len(_tokenizer())


def _llm(model: str = "", **options: Any) -> Any:
    from thalweg.llm import LLM

    return LLM(MODEL, **{"max_model_len": 512} | options)


def _replaced(module: str, name: str) -> Any:
    import thalweg

    match name:
        case "get_tokenizer":
            return _tokenizer
        case "current_platform":
            return _Platform()
        case "ModelConfig":
            return _ModelConfig
        case "LLM":
            return _llm
        case "SamplingParams":
            from thalweg.core.sampling import SamplingParams

            return SamplingParams
        case "__version__" | "VLLM_VERSION":
            return thalweg.__version__
        case "get_open_port":
            return _free_port
        case "_prev_minor_version":
            return lambda: "0.0"
        case "cleanup_dist_env_and_memory":
            return lambda *_, **__: None
        case "is_aiter_found_and_supported":
            return lambda: False
    return _Missing(name, (), {"__module__": module})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if name == "version" or name == "envs":
            return importlib.import_module(f"{self.__name__}.{name}")
        value = _replaced(self.__name__, name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    """Finds `vllm` and everything below it, and the test folders' own helpers that need vLLM."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name == "vllm" or name.startswith("vllm."):
            return ModuleSpec(name, self, is_package=True)
        if name in ("tests.utils", "tests.conftest", "tests.v1", "tests.v1.utils"):
            return ModuleSpec(name, self, is_package=name == "tests.v1")
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _tests_utils() if spec.name == "tests.utils" else _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _tests_utils() -> ModuleType:
    module = _Module("tests.utils")
    skip = pytest.mark.skip(reason="needs GPUs")
    values: dict[str, Any] = {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_ENV_OVERRIDES": {},
        "ROCM_EXTRA_ARGS": [],
        "VLLM_PATH": Path(os.environ.get("PEER_TESTS_SOURCE", ".")),
        "multi_gpu_only": lambda **_: skip,
        "requires_fp8": skip,
        "large_gpu_mark": lambda **_: skip,
        "create_new_process_for_each_test": lambda *_: lambda test: test,
    }
    vars(module).update(values)
    return module


class _Absent(_Finder):
    """Finds what some tests import and need not be installed: last, so that what is installed wins."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in ("fastapi", "pybase64") else None


sys.meta_path.append(_Absent())
sys.meta_path.insert(0, _Finder())  # at import: conftest files are read before pytest_configure


def pytest_configure(config: pytest.Config) -> None:
    import huggingface_hub
    import transformers

    huggingface_hub.snapshot_download = lambda *_, **__: "no-such-adapter"
    transformers.AutoTokenizer.from_pretrained = _tokenizer
    for mark in ("skip_global_cleanup", "slow_test"):
        config.addinivalue_line("markers", mark)
