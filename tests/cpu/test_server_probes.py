"""Routes that other engines have about the server: their answers, keys and health."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.cpu.fakes import DEEPSEEK_V32, FakeFront, fake_app, serving
from thalweg import __version__
from thalweg.config.server import ServerOptions
from thalweg.core.errors import NumericalError
from thalweg.server import probes
from thalweg.server.app import build

TINY = Path(__file__).parents[2] / "models" / "tiny"
KEYED = (
    *("/get_model_info", "/model_info", "/tokenizer_info", "/get_load", "/load", "/version", "/server_info"),
    *("/get_server_info", "/health_generate"),
)


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[httpx.Client, FakeFront]]:
    front = FakeFront()
    app = build(front, ServerOptions(), DEEPSEEK_V32, path="models/tiny", folder=TINY)  # type: ignore[arg-type]
    with serving(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client, front


def get(client: httpx.Client, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_model_and_its_tokenizer(made: tuple[httpx.Client, FakeFront]) -> None:
    client, front = made
    config = json.loads((TINY / "config.json").read_text())
    info = get(client, "/model_info")
    assert info == get(client, "/get_model_info")
    assert (info["model_type"], info["architectures"]) == (config["model_type"], config["architectures"])
    assert (info["model_path"], info["is_generation"], info["weight_version"]) == ("models/tiny", True, "default")
    tokenizer = json.loads((TINY / "tokenizer_config.json").read_text())
    info = get(client, "/tokenizer_info")
    template = {"chat_template": DEEPSEEK_V32.encoder.templates["default"].source}
    assert info == {"tokenizer_class": "ByteTokenizer", **tokenizer, **template}


def test_version_and_load(made: tuple[httpx.Client, FakeFront]) -> None:
    client, front = made
    assert get(client, "/version") == {"version": __version__}
    assert get(client, "/load") == {"server_load": 0}
    (rank,) = get(client, "/get_load")
    assert (rank["dp_rank"], rank["num_reqs"], rank["num_waiting_reqs"], rank["num_tokens"]) == (0, 0, 0, 0)
    front.gap = 0.3
    with client.stream("POST", "/generate", json={"text": "x" * 100, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert get(client, "/load") == {"server_load": 1}
        (rank,) = get(client, "/get_load")
        assert rank["num_reqs"] == 1 and rank["num_tokens"] == 128 and rank["num_pending_tokens"] == 0
    front.gap = 0.0


def test_health_generate_generates_a_token(made: tuple[httpx.Client, FakeFront], monkeypatch: Any) -> None:
    client, front = made
    before = len(front.seen)
    assert get(client, "/health_generate")["status"] == "ready"
    ((prompt, params, *_),) = front.seen[before:]
    assert len(prompt) == 1 and params.max_tokens == 1 and not front.live
    monkeypatch.setattr(probes, "HEALTH_TIMEOUT", 0.2)
    front.gap = 1.0  # no token in time, and no step
    answer = client.get("/health_generate")
    assert answer.status_code == 503 and "no token within 0.2 s" in answer.json()["reason"] and not front.live
    front.gap, front.full = 0.0, True

    async def no_stream(prompts: Any) -> Any:
        front.check_queue(1)
        yield

    with monkeypatch.context() as patch:
        patch.setattr(front, "stream_all", no_stream)
        assert client.get("/health_generate").status_code == 503, "full, and it makes no step"
    front.full, front.refusal = False, NumericalError()
    assert client.get("/health_generate").status_code == 503
    front.refusal = None
    assert client.get("/health_generate").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_health(method: str) -> None:
    front = FakeFront()
    client = TestClient(fake_app(front, ServerOptions(api_key=("key",))))
    assert client.request(method, "/ping").status_code == 200, "SageMaker sends no key"
    front.die("it ended")
    answer = client.request(method, "/ping")
    assert answer.status_code == 503 and answer.json()["reason"] == "it ended"
    closed = TestClient(fake_app(FakeFront(), ServerOptions(api_key=("key",), open_probes=False)))
    assert closed.request(method, "/ping").status_code == 401


def test_the_other_routes_need_a_key() -> None:
    front = FakeFront()
    client = TestClient(fake_app(front, ServerOptions(api_key=("key",))))
    for path in KEYED:
        assert client.get(path).status_code == 401, path
        assert client.get(path, headers={"Authorization": "Bearer key"}).status_code == 200, path
    assert len(front.seen) == 1
