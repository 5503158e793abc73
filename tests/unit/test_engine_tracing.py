"""Spans of a request, made from its timeline."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_service.engine import Timeline
from engine_service.tracing import RequestSpans
from shared.identifiers import EngineId, RequestId, TenantId
from shared.telemetry import SpanAttribute, SpanName, Tracing

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
CONTEXT = {"traceparent": f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"}


def spans_of(timeline: Timeline) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"), provider)
    # Monotonic second 50 is wall second 1050.
    RequestSpans(tracing, EngineId("e"), monotonic=lambda: 50.0, wall_ns=lambda: 1050 * 10**9).record(
        timeline
    )
    return {span.name: span for span in exporter.get_finished_spans()}


def timeline(*moments_s: float | None, context: dict[str, str] = CONTEXT) -> Timeline:
    queued_s, scheduled_s, first_token_s, finished_s = moments_s
    assert queued_s is not None
    return Timeline(
        RequestId("r"), TenantId("acme"), context, queued_s, scheduled_s, first_token_s, finished_s, 7, 3
    )


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_queue_prefill_and_decode_follow_each_other_under_the_requests_span() -> None:
    spans = spans_of(timeline(40.0, 41.0, 43.0, 47.0))
    assert seconds(spans[SpanName.ENGINE_QUEUE]) == (1040.0, 1041.0)
    assert seconds(spans[SpanName.ENGINE_PREFILL]) == (1041.0, 1043.0)
    assert seconds(spans[SpanName.ENGINE_DECODE]) == (1043.0, 1047.0)
    for span in spans.values():
        assert span.context.trace_id == TRACE_ID
        assert span.parent is not None
        assert span.parent.span_id == PARENT_ID
        assert span.attributes is not None
        assert span.attributes[SpanAttribute.REQUEST_ID] == "r"


@pytest.mark.parametrize(
    ("moments_s", "names"),
    [
        ((40.0, None, None, 47.0), [SpanName.ENGINE_QUEUE]),
        ((40.0, 41.0, None, 47.0), [SpanName.ENGINE_QUEUE, SpanName.ENGINE_PREFILL]),
    ],
)
def test_a_request_that_ends_early_has_the_spans_that_it_reached(
    moments_s: tuple[float | None, ...], names: list[str]
) -> None:
    spans = spans_of(timeline(*moments_s))
    assert list(spans) == names
    assert seconds(spans[names[-1]])[1] == 1047.0


def test_a_request_without_a_context_starts_its_own_trace() -> None:
    span = spans_of(timeline(40.0, 41.0, 43.0, 47.0, context={}))[SpanName.ENGINE_QUEUE]
    assert span.parent is None
