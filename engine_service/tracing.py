"""Spans of what the engine did for a request: queue, prefill, decode."""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.context import Context

from engine_service.engine import Timeline
from shared.identifiers import EngineId
from shared.telemetry import SpanAttribute, SpanName, Tracing, extract


class RequestSpans:
    """Makes the spans of a request when it has ended, from its timeline: nothing is open meanwhile.

    They are children of the context that came with the request. A span whose beginning was never
    reached (aborted in the queue, before the first token) is left out; the last one that was reached
    ends when the request did.
    """

    def __init__(
        self,
        tracing: Tracing,
        engine_id: EngineId,
        monotonic: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tracing = tracing
        self._engine_id = engine_id
        self._monotonic = monotonic
        self._wall_ns = wall_ns

    def record(self, timeline: Timeline) -> None:
        assert timeline.finished_s is not None, f"{timeline.request_id} has not ended"
        # Spans want wall time; the offset is taken now, so that a clock step moves all spans alike.
        offset_ns = self._wall_ns() - int(self._monotonic() * 1e9)
        parent = extract(timeline.trace_context)
        starts = (
            (SpanName.ENGINE_QUEUE, timeline.queued_s, self._queue_attributes(timeline)),
            (SpanName.ENGINE_PREFILL, timeline.scheduled_s, self._prefill_attributes(timeline)),
            (SpanName.ENGINE_DECODE, timeline.first_token_s, self._decode_attributes(timeline)),
        )
        ends = (timeline.scheduled_s, timeline.first_token_s, timeline.finished_s)
        for (name, start_s, attributes), end_s in zip(starts, ends, strict=True):
            if start_s is not None:
                start_ns = offset_ns + int(start_s * 1e9)
                end_ns = offset_ns + int((timeline.finished_s if end_s is None else end_s) * 1e9)
                self._span(name, parent, start_ns, end_ns, attributes)

    def _span(
        self, name: str, parent: Context, start_ns: int, end_ns: int, attributes: dict[str, str | int]
    ) -> None:
        span = self._tracing.tracer.start_span(name, parent, attributes=attributes, start_time=start_ns)
        span.end(end_ns)

    def _queue_attributes(self, timeline: Timeline) -> dict[str, str | int]:
        return {
            SpanAttribute.REQUEST_ID: timeline.request_id,
            SpanAttribute.ENGINE: self._engine_id,
            SpanAttribute.TENANT: timeline.tenant,
        }

    def _prefill_attributes(self, timeline: Timeline) -> dict[str, str | int]:
        return self._queue_attributes(timeline) | {
            SpanAttribute.INPUT_TOKENS: timeline.num_prompt_tokens,
            SpanAttribute.CACHED_TOKENS: timeline.num_cached_tokens,
        }

    def _decode_attributes(self, timeline: Timeline) -> dict[str, str | int]:
        return self._queue_attributes(timeline) | {
            SpanAttribute.OUTPUT_TOKENS: timeline.num_output_tokens,
            SpanAttribute.NUM_PREEMPTIONS: timeline.num_preemptions,
            SpanAttribute.FINISH_REASONS: timeline.finish_reason or "",
        }
