"""Names in traces and metrics, and how tracing is switched on.

Tracing follows the standard `OTEL_*` variables and is off unless one of them asks for it: then
every span is a no-op object and nothing is allocated, buffered or sent. Context crosses processes
as a field of the message (W3C traceparent); nothing here relies on ambient context.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.errors import ConfigError

FLUSH_TIMEOUT_S = 2.0
_PROPAGATOR = TraceContextTextMapPropagator()


class SpanName:
    HTTP_REQUEST = "headrace.http"
    TOKENIZE = "headrace.tokenize"
    ROUTE = "headrace.route"
    SHADOW = "headrace.shadow"
    ENGINE_QUEUE = "headrace.engine.queue"
    ENGINE_PREFILL = "headrace.engine.prefill"
    ENGINE_DECODE = "headrace.engine.decode"


class SpanAttribute:
    """GenAI semantic conventions (OpenTelemetry 1.41, development status), then our own."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    RESPONSE_MODEL = "gen_ai.response.model"
    RESPONSE_ID = "gen_ai.response.id"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    HTTP_METHOD = "http.request.method"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
    ERROR_TYPE = "error.type"
    TENANT = "headrace.tenant"
    VARIANT = "headrace.variant"
    ENGINE = "headrace.engine"
    REQUEST_ID = "headrace.request_id"
    ROUTE_REASON = "headrace.route.reason"
    CACHED_TOKENS = "headrace.cached_tokens"
    NUM_PREEMPTIONS = "headrace.num_preemptions"


@dataclass(frozen=True, slots=True)
class Tracing:
    """A tracer and what has to be shut down with it. `enabled` lets callers skip preparing attributes."""

    tracer: trace.Tracer
    provider: TracerProvider | None = None

    @property
    def enabled(self) -> bool:
        return self.provider is not None

    def shutdown(self) -> None:
        """Sends what is buffered, within a bound; call once, at the end of the process."""
        if self.provider is not None:
            # A collector that is gone would keep the exporter trying for tens of seconds.
            flush = threading.Thread(target=self.provider.shutdown, name="flush spans", daemon=True)
            flush.start()
            flush.join(FLUSH_TIMEOUT_S)


def start_tracing(service: str, instance: str) -> Tracing:
    """Tracing as the environment asks for it. Raises ConfigError on an exporter we do not have."""
    exporters = _exporters_from_environment()
    if not exporters:
        return Tracing(trace.NoOpTracer())
    resource = Resource.create(
        {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service), SERVICE_INSTANCE_ID: instance}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # the sampler: OTEL_TRACES_SAMPLER
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer("headrace"), provider)


def _exporters_from_environment() -> list[SpanExporter]:
    """`OTEL_TRACES_EXPORTER` is a list; without it, an OTLP endpoint that is set asks for OTLP."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    has_endpoint = any(
        os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )
    names = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if has_endpoint else "none")
    exporters: list[SpanExporter] = []
    for name in map(str.strip, names.split(",")):
        match name:
            case "none" | "":
                continue
            case "otlp":
                # Brings protobuf, which a process that exports nothing need not load.
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporters.append(OTLPSpanExporter())
            case "console":
                exporters.append(ConsoleSpanExporter())
            case _:
                raise ConfigError(f"{name!r} is not one of: otlp, console, none", "OTEL_TRACES_EXPORTER")
    return exporters


def inject(span: trace.Span) -> dict[str, str]:
    """The context that makes another process's spans children of this one; empty when not traced."""
    carrier: dict[str, str] = {}
    if span.get_span_context().is_valid:
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """The context of a carrier; an invalid or missing traceparent gives an empty one."""
    return _PROPAGATOR.extract(carrier, Context())
