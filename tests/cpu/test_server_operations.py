"""Access logs: one line for each request, with an id that clients cannot forge, and the request's engine events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.configs import config
from tests.cpu.fakes import DEEPSEEK_V32, FakeFront, Piece, eventually, fake_app, serving
from tests.cpu.operations import APIS, CHAT, lines, logged, talk
from thalweg.config.server import ServerOptions
from thalweg.core import logs
from thalweg.engine.client import EngineClient
from thalweg.server.app import build
from thalweg.server.tracing import Traces
from thalweg.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "models" / "tiny"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_a_request_is_one_line(path: str, stream: bool) -> None:
    with logged() as out, talk() as api:
        answer = api.post(path, json=APIS[path] | {"stream": stream}, headers={"X-Request-Id": "mine-1"})
        assert answer.status_code == 200 and answer.headers["X-Request-Id"] == "mine-1"
        (line,) = lines(out, 1)
    assert (line["id"], line["method"], line["path"], line["status"]) == ("mine-1", "POST", path, 200)
    assert (line["stream"], line["model"], line["finish"], line["output_tokens"]) == (stream, "scripted", "length", 6)
    assert line["prompt_tokens"] >= 16 and line["cached_tokens"] == 0 and line["level"] == "INFO"
    assert 0 <= line["ttft"] <= line["e2e"] < 5
    assert "private" not in out.getvalue() and "Answer" not in out.getvalue(), "texts are logged on wish only"


def test_nothing_is_logged_unasked() -> None:
    with logged() as out, talk(log_requests=False) as api:
        api.post("/generate", json=APIS["/generate"])
    assert "thalweg.requests" not in out.getvalue()


def test_levels_add_parameters_then_texts() -> None:
    body = {"prompt": ["ab" * 1500, "cd"], "max_tokens": 8, "temperature": 0.5, "stop": "er", "n": 2}
    for level, cut in ((1, 0), (2, 2048), (3, 3000)):
        with logged() as out, talk(log_requests_level=level) as api:
            answer = api.post("/v1/completions", json=body).json()
            (line,) = lines(out, 1)
        assert line["params"] == [{"temperature": 0.5, "stop": ["er"], "max_tokens": 8, "n": 2}]
        assert (line["choices"], line["finish"]) == (4, "stop") and "rid" not in line
        if cut:
            assert line["prompts"] == [("ab" * 1500)[:cut], "cd"]
            assert line["outputs"] == [choice["text"] for choice in answer["choices"]] and line["outputs"][0] == "Answ"
        else:
            assert "prompts" not in line and "outputs" not in line and "abab" not in out.getvalue()


@pytest.mark.parametrize(
    "evil",
    [
        "two words",
        "x" * 129,
        'quote"',
        "line\u2028end",
        "%0d%0aX-Evil: 1",
        "tab\tbed",
        "id={1}",
        "ünïcode",
        "",
    ],
)
def test_an_id_that_is_not_plain_is_replaced(evil: str) -> None:
    with logged() as out, talk() as api:
        answer = api.post("/generate", json=APIS["/generate"], headers={"X-Request-Id": evil.encode("utf-8")})
        (line,) = lines(out, 1)
    made = answer.headers["X-Request-Id"]
    assert re.fullmatch("[0-9a-f]{32}", made) and line["id"] == made
    assert "X-Evil" not in answer.headers and (not evil or evil not in out.getvalue())


def test_line_breaks_in_header_bytes_do_not_reach_the_log() -> None:
    with logged("text") as out, serving(fake_app(FakeFront(), ServerOptions(log_requests=True))) as url:
        host, port = url.removeprefix("http://").split(":")
        for id in (
            b"a\rINFO thalweg.requests: request id=forged",
            b"a\x00b",
            b"a\xff\xfe",
            b"a\x85b",
            b"a\x1b[2J",
            b"a\n INFO: forged",
        ):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(
                    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + id + b"\r\nConnection: close\r\n\r\n"
                )
                while raw.recv(65536):
                    pass
        httpx.get(url + "/a%0A2026-11-21%2000:00:00%20INFO%20thalweg.requests:%20forged%1b[2J%E2%80%A8%C2%85x")
        httpx.get(url + "/" + "y" * 5000)
        eventually(lambda: "yyy" in out.getvalue())
    text = out.getvalue()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING) thalweg\.", line) for line in text.splitlines())
    assert not any(ord(c) < 32 and c != "\n" or ord(c) in (127, 0x85, 0x2028) for c in text)
    assert max(map(len, text.splitlines())) < 500
    assert r"\n2026" in text and "id=forged" not in text


def test_formatters_keep_a_record_together() -> None:
    record = logging.LogRecord("thalweg.x", logging.ERROR, "", 0, "said %s", ("a\nb\x1b\u202e",), None)
    record.fields = {"id": "r 1", "bare": "a-b.c", "n": 3, "t": 0.25, "many": ["x\n", 1], "sign": 'a="b"\n'}
    try:
        raise ValueError("line one\n2026-11-21 00:00:00 INFO forged\u2028x\x1b[2J")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    first, *rest = logs.TextFormatter().format(record).split("\n")
    assert first.endswith(
        r"ERROR thalweg.x: said a\nb\x1b\u202e id="
        r'"r 1" bare=a-b.c n=3 t=0.25 many=["x\n", 1] sign="a=\"b\"\n"'
    )
    assert rest and all(line.startswith("    ") for line in rest), "a traceback cannot begin a line of its own"
    assert "\u2028" not in "".join(rest) and "\x1b" not in "".join(rest)
    value = json.loads(logs.JsonFormatter().format(record))
    assert logs.JsonFormatter().format(record).isascii() and "\n" not in logs.JsonFormatter().format(record)
    assert (value["message"], value["id"], value["level"]) == ("said a\nb\x1b\u202e", "r 1", "ERROR")
    assert any("forged" in line for line in value["trace"]) and value["time"].endswith("Z")


def test_errors_say_their_kind() -> None:
    front = FakeFront()
    with logged() as out, talk(front, api_key=("k",)) as api:
        key = {"Authorization": "Bearer k"}
        api.post("/generate", json={"text": "x"})
        api.post("/generate", json={"text": ""}, headers=key)
        api.get("/nowhere", headers=key)
        front.refusal = RuntimeError("by accident: a private matter")
        broken = api.post("/generate", json={"text": "x"}, headers=key | {"X-Request-Id": "acc-1"})
        front.refusal, front.full = None, True
        api.post("/v1/messages", json=CHAT, headers=key)
        front.full = False
        front.die("out of luck")
        api.post("/v1/chat/completions", json=CHAT, headers=key)
        found = lines(out, 6)
        page = api.get("/metrics").text
    assert [(line["status"], line.get("error")) for line in found] == [
        (401, "invalid_api_key"),
        (400, "invalid_value"),
        (404, "not_found"),
        (500, "server_error"),
        (429, "overloaded"),
        (503, "engine_dead"),
    ]
    assert broken.headers["X-Request-Id"] == found[3]["id"] == "acc-1"
    assert [line.get("key") for line in found] == [None] + ["key-1"] * 5  # refused ones tell whose they were
    assert all("finish" not in found[i] for i in (0, 1, 2, 4, 5))
    (error,) = [json.loads(line) for line in out.getvalue().splitlines() if '"failed"' in line]
    assert error["id"] == "acc-1" and error["level"] == "ERROR" and error["trace"]
    assert 'thalweg_requests_total{model_name="scripted",route="/generate",status="500"} 1.0' in page


def test_failed_and_unread_streams_are_logged() -> None:
    front = FakeFront(gap=0.05)
    with logged() as out, talk(front) as api:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with api.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_bytes())
        (gone,) = lines(out, 1)
        with api.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.iter_bytes()
            next(chunks)
            front.die("out of luck")
            assert b"out of luck" in b"".join(chunks)
        failed = lines(out, 2)[1]
        with pytest.raises(httpx.ReadTimeout):
            front.ready, front.state = FakeFront().ready, "ready"
            api.post("/v1/completions", json=body | {"stream": False}, timeout=0.2)
        waited = lines(out, 3)[2]
        page = api.get("/metrics").text
    assert (gone["status"], gone["gone"], gone["finish"]) == (200, True, "abort") and gone["output_tokens"] > 0
    assert (failed["status"], failed["error"], failed["finish"]) == (200, "engine_dead", "error")
    assert (waited["status"], waited["gone"], waited["finish"]) == (499, True, "abort")
    assert 'thalweg_choices_total{finish="abort",model_name="scripted"} 2.0' in page
    assert 'thalweg_choices_total{finish="error",model_name="scripted"} 1.0' in page


class Breaking(FakeFront):
    """Breaks by accident behind the first piece of a stream."""

    async def stream(self, *args: Any, **more: Any) -> AsyncGenerator[Piece, None]:
        async for piece in super().stream(*args, **more):
            yield piece
            raise RuntimeError("by accident")


@pytest.mark.parametrize("path", APIS)
def test_an_error_in_the_middle_of_a_stream_is_logged(path: str) -> None:
    with logged() as out, talk(Breaking()) as api:
        with contextlib.suppress(httpx.RemoteProtocolError):
            api.post(path, json=APIS[path] | {"stream": True}, headers={"X-Request-Id": "acc-2"})
        (line,) = lines(out, 1)
        page = api.get("/metrics").text
    assert (line["id"], line["error"], line["finish"]) == ("acc-2", "server_error", "error")
    answered = [found for found in page.splitlines() if found.startswith("thalweg_requests_total") and path in found]
    assert [found.endswith("} 1.0") for found in answered] == [True], "counted once, with the status that went out"
    failures = [json.loads(found) for found in out.getvalue().splitlines() if '"failed"' in found]
    assert [found["id"] for found in failures] == ["acc-2"]


def test_ids_of_bodies_and_ids_that_are_used_twice() -> None:
    with logged() as out, talk() as api:
        body = {"text": ["x", "y"], "rid": ["one", "two"], "sampling_params": {"max_new_tokens": 2}}
        api.post("/generate", json=body, headers={"X-Request-Id": "outer"})
        for _ in range(2):
            api.post("/generate", json=APIS["/generate"], headers={"X-Request-Id": "twice"})
        found = lines(out, 3)
    assert (found[0]["id"], found[0]["rid"]) == ("outer", ["one", "two"])
    assert [line["id"] for line in found[1:]] == ["twice", "twice"] and "rid" not in found[1]


def test_thousands_of_prompts_do_not_fill_the_log() -> None:
    many = 300
    body = {"text": ["x" * 100] * many, "rid": [f"{i}-{'r' * 100}" for i in range(many)]}
    body["sampling_params"] = [{"max_new_tokens": 1, "seed": i} for i in range(many)]
    for level, size in ((0, 3000), (2, 6000), (3, 100_000)):
        with logged() as out, talk(log_requests_level=level) as api:
            assert len(api.post("/generate", json=body).json()) == many
            (line,) = lines(out, 1)
        assert len(out.getvalue()) < size and line["choices"] == many and line["output_tokens"] == many


def test_engine_events_are_logged_with_the_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real engine with too little cache for two, behind the whole application: preempted, aborted, and the engine
    killed.
    """
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("thalweg.server.tracing.traces_to", lambda endpoint: Traces(SimpleSpanProcessor(exporter)))
    keys = ServerOptions(api_key=("k",), log_requests=True, otlp_traces_endpoint="http://nowhere")

    async def test() -> None:
        settings = config(
            model_path=str(MODEL),
            context_length=512,
            num_pages=8,
            max_running_requests=4,
            eos_ids=(1,),
            show_progress=False,
        )
        front = EngineClient(settings, Tokenizer(MODEL))
        await front.start()
        transport = httpx.ASGITransport(
            build(front, keys, DEEPSEEK_V32, path="models/tiny"), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as api:

            async def ask(id: str, tokens: int) -> httpx.Response:
                body = {
                    "text": "Once",
                    "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
                }
                return await api.post("/generate", json=body, headers={"X-Request-Id": id, "x-api-key": "k"})

            try:
                await asyncio.gather(ask("old", 300), ask("young", 300))
                running = asyncio.create_task(ask("stopped", 480))
                while not front.running:
                    await asyncio.sleep(0.01)
                await api.post("/abort", json={"rid": "stopped"}, headers={"x-api-key": "k"})
                await running
                running = asyncio.create_task(ask("lost", 480))
                while not front.running or any(request.submits for request in front._live):
                    await asyncio.sleep(0.01)  # without output it would go to the next engine
                assert front.ready is not None
                os.kill(front.ready.pid, signal.SIGKILL)
                assert (await running).status_code == 503
            finally:
                await front.close()

    with logged() as out:
        asyncio.run(asyncio.wait_for(test(), 90))
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    events = {(line["message"], line.get("id")): line for line in said if line["logger"] == "thalweg.client"}
    requests = {line["id"]: line for line in said if line["logger"] == "thalweg.requests"}
    assert {("preempted", "young"), ("aborted", "stopped"), ("failed", "lost")} <= set(events)
    assert all(events[event]["key"] == "key-1" for event in (("preempted", "young"), ("failed", "lost")))
    assert events["preempted", "young"]["tokens"] > 4 and "exit code" in events["failed", "lost"]["why"]
    assert requests["young"]["preemptions"] == 1 and "preemptions" not in requests["old"]
    assert requests["old"]["key"] == "key-1" and "rid" not in requests["old"]
    assert requests["stopped"]["finish"] == "abort" and requests["lost"]["error"] == "engine_dead"
    assert all(0 <= requests[id]["queued"] <= requests[id]["ttft"] for id in ("old", "young"))
    phases = [span for span in exporter.get_finished_spans() if span.name in ("queue", "prefill", "decode")]
    assert [span.name for span in phases[:3]] == ["queue", "prefill", "decode"]
    assert all((phases[i].end_time or 0) <= (phases[i + 1].start_time or 0) for i in (0, 1))


def test_cors_preflights_are_not_logged() -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with logged() as out, talk(cors_origins=("https://a.example",)) as api:
        assert api.options("/generate", headers=ask).status_code == 200
        api.post("/generate", json=APIS["/generate"], headers={"Origin": "https://a.example"})
        (line,) = lines(out, 1)
    assert line["status"] == 200 and line["method"] == "POST"


def test_probes_that_answer_well_are_not_logged() -> None:
    front = FakeFront()
    with logged() as out, talk(front) as api:
        api.get("/health")
        api.get("/v1/models")
        front.die("gone")
        api.get("/health")
        found = lines(out, 2)
    assert [(line["path"], line["status"]) for line in found] == [("/v1/models", 200), ("/health", 503)]
