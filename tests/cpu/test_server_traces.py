"""Traces made by the OpenTelemetry SDK, sent to a collector over HTTP and into memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.cpu.fakes import FakeFront, eventually, fake_app
from tests.cpu.operations import APIS, CHAT, lines, logged, talk
from thalweg.config.server import ServerOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.sampling import SamplingParams
from thalweg.server.accounting import RequestAccounting
from thalweg.server.tracing import Traces


class Collector:
    """An OTLP/HTTP collector, as far as traces go. spans: what came."""

    def __init__(self) -> None:
        self.spans: list[OtlpSpan] = []
        self.resources: dict[str, str] = {}
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.add(self.path)
                message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for group in message.resource_spans:
                    collector.resources |= {a.key: a.value.string_value for a in group.resource.attributes}
                    for scope in group.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing on stderr."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_trace_reaches_a_collector(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with logged() as out, talk(otlp_traces_endpoint=collector.url) as api:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "traced"}
        api.post("/v1/chat/completions", json=CHAT | {"stream": True, "temperature": 0.5}, headers=headers)
        (line,) = lines(out, 1)
        eventually(lambda: len(collector.spans) >= 3)
    assert collector.paths == {"/v1/traces"} and line["trace"] == TRACE
    assert collector.resources["service.name"] == "thalweg"
    assert collector.resources["deployment.environment.name"] == "test"
    spans = {span.name: span for span in collector.spans}
    server, chat, decode = spans["POST /v1/chat/completions"], spans["chat scripted"], spans["decode"]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert server.parent_span_id.hex() == PARENT and server.kind == OtlpSpan.SPAN_KIND_SERVER
    assert chat.parent_span_id == server.span_id and decode.parent_span_id == chat.span_id
    assert server.start_time_unix_nano <= chat.start_time_unix_nano <= decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= chat.end_time_unix_nano <= server.end_time_unix_nano
    assert [event.name for event in chat.events] == ["first_token", "last_token"]


@contextmanager
def traced(front: FakeFront | None = None) -> Iterator[tuple[Traces, InMemorySpanExporter, httpx.Client]]:
    """A server whose spans stay in memory: everything is the SDK's, but for where they go."""
    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thalweg.server.tracing.traces_to", lambda endpoint: traces)
        with talk(front, otlp_traces_endpoint="http://nowhere") as api:
            yield traces, exporter, api


@pytest.mark.parametrize("path", APIS)
def test_spans_of_every_api(path: str) -> None:
    with traced() as (_, exporter, api):
        api.post(path, json=APIS[path], headers={"X-Request-Id": "mine-1"})
        eventually(lambda: len(exporter.get_finished_spans()) == 3)
        decode, inner, outer = exporter.get_finished_spans()
    operation = "text_completion" if path in ("/v1/completions", "/generate") else "chat"
    assert (outer.name, inner.name, decode.name) == (f"POST {path}", f"{operation} scripted", "decode")
    assert outer.parent is None and inner.parent is not None and inner.parent.span_id == outer.context.span_id
    given, http = dict(inner.attributes or {}), dict(outer.attributes or {})
    assert http["http.response.status_code"] == 200 and http["http.route"] == path
    assert http["thalweg.request.id"] == "mine-1" and given["gen_ai.request.id"] == "mine-1"
    assert given["gen_ai.operation.name"] == operation and given["gen_ai.request.model"] == "scripted"
    assert (given["gen_ai.usage.output_tokens"], given["gen_ai.request.max_tokens"]) == (6, 6)
    assert given["gen_ai.usage.input_tokens"] >= 16 and given["gen_ai.response.finish_reasons"] == ("length",)
    assert 0 <= given["gen_ai.latency.time_to_first_token"] <= given["gen_ai.latency.e2e"]
    assert not any("private" in str(value) for value in (*given.values(), *http.values())), "no texts in traces"


def test_spans_of_what_fails() -> None:
    front = FakeFront(gap=0.05)
    with traced(front) as (_, exporter, api):
        api.post("/generate", json={"text": ""})
        api.get("/health")
        api.get("/nowhere")
        with api.stream("POST", "/generate", json=APIS["/generate"] | {"stream": True}) as answer:
            chunks = answer.iter_bytes()
            next(chunks)
            front.die("out of luck")
            assert b"out of luck" in b"".join(chunks)
        eventually(lambda: len(exporter.get_finished_spans()) == 4)
        refused, _, inner, outer = exporter.get_finished_spans()
        api.post("/generate", json=APIS["/generate"])
        eventually(lambda: len(exporter.get_finished_spans()) == 5)
        dead = exporter.get_finished_spans()[-1]
    assert refused.attributes and refused.attributes["http.response.status_code"] == 400 and refused.status.is_unset
    assert outer.attributes and outer.attributes["error.type"] == "engine_dead" and not outer.status.is_ok
    assert inner.attributes and inner.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert not inner.status.is_unset and not dead.status.is_unset
    assert dead.attributes and dead.attributes["http.response.status_code"] == 503


@pytest.mark.parametrize(
    "parent",
    ["nonsense", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01", "00-" + "g" * 32 + f"-{PARENT}-01", "x" * 9000],
)
def test_a_wrong_traceparent_begins_a_new_trace(parent: str) -> None:
    with traced() as (_, exporter, api):
        assert api.post("/generate", json=APIS["/generate"], headers={"traceparent": parent}).status_code == 200
        eventually(lambda: len(exporter.get_finished_spans()) == 3)
        assert exporter.get_finished_spans()[-1].parent is None


def test_what_the_caller_does_not_sample_makes_no_spans() -> None:
    with traced() as (_, exporter, api):
        api.post("/generate", json=APIS["/generate"], headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        api.post("/generate", json=APIS["/generate"])
        eventually(lambda: len(exporter.get_finished_spans()) == 3)
        assert TRACE not in {f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans()}


def test_phases_are_spans() -> None:
    exporter = InMemorySpanExporter()
    account = RequestAccounting(
        "POST", "/generate", {}, 10.0, submitted=10.1, admitted=10.2, first=10.5, last=11.0, ended=11.1
    )
    account.params, account.rids, account.status, account.preemptions = (SamplingParams(),), ("r",), 200, 2
    Traces(SimpleSpanProcessor(exporter)).record(account)
    got = {}
    for span in exporter.get_finished_spans():
        got[span.name] = round((span.start_time or 0) / 1e9, 6), round((span.end_time or 0) / 1e9, 6)
    assert got == {
        "queue": (10.1, 10.2),
        "prefill": (10.2, 10.5),
        "decode": (10.5, 11.0),
        "text_completion ": (10.1, 11.0),
        "POST /generate": (10.0, 11.1),
    }
    inner = dict(exporter.get_finished_spans()[-2].attributes or {})
    assert inner["thalweg.preemptions"] == 2 and inner["gen_ai.latency.time_in_queue"] == pytest.approx(0.1)


def test_where_traces_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedConfig, match="4318"):
        ServerOptions(otlp_traces_endpoint="localhost:4317")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(__import__("sys").modules, "thalweg.server.tracing")
    with pytest.raises(UnsupportedConfig, match=r"pip install 'thalweg\[otel\]'"):
        fake_app(FakeFront(), ServerOptions(otlp_traces_endpoint="http://localhost:4318"))


def test_a_missing_collector_does_not_affect_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thalweg.server.tracing.CLOSE_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with talk(otlp_traces_endpoint=f"http://127.0.0.1:{port}") as api:
        assert api.post("/generate", json=APIS["/generate"]).status_code == 200
        before = time.monotonic()
    assert time.monotonic() - before < 3, "the server's end does not wait for it"
