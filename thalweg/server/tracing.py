"""OpenTelemetry traces, sent over OTLP/HTTP: `--otlp-traces-endpoint`. Each request for text becomes one trace, or a
part of the trace whose `traceparent` (W3C) it brought. Its spans are made when it has ended, with the times that its
account holds, so nothing is traced while it runs:

    POST /v1/chat/completions          server; from the headers to the end of the answer
      chat tiny                        OpenTelemetry's conventions for generative AI; events first_token, last_token
        queue, prefill, decode         what its time went into

This is the only file that knows OpenTelemetry, which is installed by `pip install 'thalweg[otel]'`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from thalweg import __version__
from thalweg.core.errors import UnsupportedConfig
from thalweg.server.accounting import RequestAccounting

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

OPERATIONS = {  # by route, as the conventions name them
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}
LAST_WORDS = 2.0  # seconds
MAX_FINISHES = 128  # of one request, in its trace
Attributes = dict[str, Any]


class NoTraces:
    """Without `--otlp-traces-endpoint`."""

    def tell(self, accounting: RequestAccounting) -> None:
        """Sends nothing."""

    def close(self) -> None:
        """There is nothing to send."""


class Traces:
    """Makes spans of accounts and gives them to a processor, which sends them on a thread of its own."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ours = Resource.create({"service.name": "thalweg", "service.version": __version__})
        resource = ours.merge(OTELResourceDetector().detect())  # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("thalweg", __version__)
        self._context_of = TraceContextTextMapPropagator().extract

    def tell(self, accounting: RequestAccounting) -> None:
        if accounting.path not in OPERATIONS:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        name = f"{accounting.method} {accounting.path}"
        parent = self._context_of(accounting.headers)
        span = self._span(name, accounting.began, parent, SpanKind.SERVER, _http(accounting))
        accounting.trace = f"{span.get_span_context().trace_id:032x}"
        if accounting.submitted and span.is_recording():
            self._generation(accounting, _within(span))
        if accounting.status >= 500 or accounting.error and accounting.submitted:
            span.set_status(Status(StatusCode.ERROR, accounting.error))
        span.end(_nanoseconds(accounting.ended))

    def close(self) -> None:
        """Sends what is left, for LAST_WORDS at most: a collector that does not answer holds up nobody's end."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(LAST_WORDS)

    def _generation(self, accounting: RequestAccounting, parent: Context) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = accounting.last or accounting.ended
        name = f"{OPERATIONS[accounting.path]} {accounting.model}"
        span = self._span(name, accounting.submitted, parent, SpanKind.INTERNAL, _gen_ai(accounting))
        inside = _within(span)
        phases = (
            ("queue", accounting.submitted, accounting.admitted),
            ("prefill", accounting.admitted, accounting.first),
        )
        for phase, began, ended in (*phases, ("decode", accounting.first, accounting.last)):
            if began and ended:  # the admission is by the engine's reading of the same clock
                self._span(phase, began, inside, SpanKind.INTERNAL, {}).end(_nanoseconds(max(began, ended)))
        if accounting.first:
            span.add_event("first_token", timestamp=_nanoseconds(accounting.first))
            span.add_event("last_token", timestamp=_nanoseconds(accounting.last))
        if accounting.error:
            span.set_status(Status(StatusCode.ERROR, accounting.error))
        span.end(_nanoseconds(end))

    def _span(self, name: str, began: float, parent: Context, kind: Any, attributes: Attributes) -> Span:
        given = {key: value for key, value in attributes.items() if value is not None}
        return self._tracer.start_span(name, parent, kind, given, start_time=_nanoseconds(began))


def traces_to(endpoint: str) -> Traces:
    """Traces that go to a collector. endpoint: its address, to which OTLP's own path is added where it has none.

    Raises UnsupportedConfig when OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise UnsupportedConfig(
            f"otlp_traces_endpoint: needs OpenTelemetry, and {missing.name} is not installed: pip install"
            " 'thalweg[otel]'"
        ) from missing
    path = urlsplit(endpoint).path
    address = endpoint if path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    return Traces(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))


def _http(accounting: RequestAccounting) -> Attributes:
    return {
        "http.request.method": accounting.method,
        "http.route": accounting.path,
        "url.path": accounting.path,
        "http.response.status_code": accounting.status,
        "error.type": accounting.error or (str(accounting.status) if accounting.status >= 500 else None),
        "thalweg.request.id": accounting.id,
        "thalweg.client_disconnected": accounting.gone or None,
    }


def _gen_ai(accounting: RequestAccounting) -> Attributes:
    """Of several prompts in one request, the first one's parameters stand for all."""
    params = accounting.params[0]
    return {
        "gen_ai.operation.name": OPERATIONS[accounting.path],
        "gen_ai.provider.name": "thalweg",
        "gen_ai.request.id": accounting.rids[0],
        "gen_ai.request.model": accounting.model,
        "gen_ai.response.model": accounting.model,
        "gen_ai.request.stream": accounting.stream,
        "gen_ai.request.choice.count": len(accounting.finishes) if len(accounting.finishes) > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.response.finish_reasons": accounting.finishes[:MAX_FINISHES],
        "gen_ai.usage.input_tokens": accounting.prompt_tokens,
        "gen_ai.usage.output_tokens": accounting.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": accounting.cached_tokens,
        "gen_ai.response.time_to_first_chunk": accounting.ttft if accounting.stream else None,
        "gen_ai.latency.time_in_queue": accounting.queued,
        "gen_ai.latency.time_to_first_token": accounting.ttft,
        "gen_ai.latency.e2e": (accounting.last or accounting.ended) - accounting.began,
        "error.type": accounting.error or None,
        "thalweg.preemptions": accounting.preemptions or None,
        "thalweg.drafted_tokens": accounting.drafted_tokens or None,
        "thalweg.accepted_tokens": accounting.accepted_tokens if accounting.drafted_tokens else None,
    }


def _within(span: Span) -> Context:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
