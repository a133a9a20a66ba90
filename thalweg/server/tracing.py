"""OpenTelemetry traces over OTLP/HTTP: `--otlp-traces-endpoint`.

Each request for text becomes a trace, or a part of the trace whose `traceparent` (W3C) it has. Its spans are made when
it has ended, from its accounting, so that nothing is traced while it runs:

    POST /v1/chat/completions          server; from the headers to the end of the response
      chat tiny                        OpenTelemetry's conventions for generative AI; events first_token, last_token
        queue, prefill, decode         the phases of its time

Only this file knows OpenTelemetry, which `pip install 'thalweg[otel]'` installs. Without it the import raises
UnsupportedConfig.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import urlsplit

from thalweg import __version__
from thalweg.core.errors import UnsupportedConfig
from thalweg.server.accounting import GENERATION, RequestAccounting

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as missing:
    reason = f"needs OpenTelemetry, and {missing.name} is not installed: pip install 'thalweg[otel]'"
    raise UnsupportedConfig(f"otlp_traces_endpoint: {reason}") from missing

CLOSE_TIMEOUT = 2.0  # seconds
MAX_FINISHES = 128  # of one request, in its trace
Attributes = dict[str, Any]


class Traces:
    """Makes spans from accountings for a processor, which sends them on a thread of its own."""

    def __init__(self, processor: SpanProcessor) -> None:
        defaults = Resource.create({"service.name": "thalweg", "service.version": __version__})
        resource = defaults.merge(OTELResourceDetector().detect())  # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("thalweg", __version__)
        self._context_of = TraceContextTextMapPropagator().extract

    def record(self, accounting: RequestAccounting) -> None:
        if accounting.path not in GENERATION:
            return
        name, parent = f"{accounting.method} {accounting.path}", self._context_of(accounting.headers)
        span = self._span(name, accounting.began, parent, SpanKind.SERVER, _http(accounting))
        accounting.trace = f"{span.get_span_context().trace_id:032x}"
        if accounting.submitted and span.is_recording():
            self._record_generation(accounting, set_span_in_context(span))
        failed = accounting.status >= 500 or accounting.error and accounting.submitted
        _end(span, accounting.ended, accounting.error if failed else None)

    def close(self) -> None:
        """Sends what is left, for CLOSE_TIMEOUT at most."""
        shutdown = threading.Thread(target=self._provider.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(CLOSE_TIMEOUT)

    def _record_generation(self, accounting: RequestAccounting, parent: Context) -> None:
        submitted, admitted, first, last = accounting.submitted, accounting.admitted, accounting.first, accounting.last
        name = f"{GENERATION[accounting.path]} {accounting.model}"
        span = self._span(name, submitted, parent, SpanKind.INTERNAL, _gen_ai(accounting))
        context = set_span_in_context(span)
        for phase, began, ended in (
            ("queue", submitted, admitted),
            ("prefill", admitted, first),
            ("decode", first, last),
        ):
            if began and ended:  # the engine's clock may be behind
                _end(self._span(phase, began, context, SpanKind.INTERNAL, {}), max(began, ended), None)
        if first:
            span.add_event("first_token", timestamp=_nanoseconds(first))
            span.add_event("last_token", timestamp=_nanoseconds(last))
        _end(span, last or accounting.ended, accounting.error or None)

    def _span(self, name: str, began: float, parent: Context, kind: Any, attributes: Attributes) -> Span:
        present = {key: value for key, value in attributes.items() if value is not None}
        return self._tracer.start_span(name, parent, kind, present, start_time=_nanoseconds(began))


def traces_to(endpoint: str) -> Traces:
    """Traces for a collector at this address; OTLP's own path is added if it has none."""
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
    """The parameters are those of the first prompt."""
    params = accounting.params[0]
    return {
        "gen_ai.operation.name": GENERATION[accounting.path],
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


def _end(span: Span, at: float, error: str | None) -> None:
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(_nanoseconds(at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
