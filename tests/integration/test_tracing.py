"""One trace per request, from the HTTP request to the decode steps, exported over OTLP."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import secrets
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from shared.telemetry import SpanName
from tests.http_client import send
from tests.stack import Stack, fake_model, wait_until

ENGINE_SPANS = {SpanName.ENGINE_QUEUE, SpanName.ENGINE_PREFILL, SpanName.ENGINE_DECODE}
GATEWAY_SPANS = {SpanName.TOKENIZE, SpanName.ROUTE}


class Receiver:
    """An OTLP/HTTP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        receiver.spans.extend(scope.spans)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def stack(redis_url: str, receiver: Receiver) -> Iterator[Stack]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    models = [fake_model(options="step_delay_ms=2", engines=2), fake_model("vectors", runner="pooling")]
    document = {"models": models}
    with Stack(redis_url, document, environment) as stack:
        yield stack


async def test_engine_spans_are_children_of_their_own_request_for_50_in_parallel(stack, receiver):
    ours = {secrets.token_hex(16): secrets.token_hex(8) for _ in range(50)}
    headers = {"Authorization": f"Bearer {stack.key()}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(trace_id: str, parent_id: str) -> None:
            body = {"model": "fake", "prompt": trace_id, "max_tokens": 10}
            traceparent = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
            async with session.post(
                stack.url + "/v1/completions", json=body, headers=traceparent
            ) as response:
                assert response.status == 200

        await asyncio.gather(*(post(trace_id, parent_id) for trace_id, parent_id in ours.items()))

    def by_trace() -> dict[str, list[Span]]:
        spans = defaultdict(list)
        for span in receiver.spans:
            if span.trace_id.hex() in ours:
                spans[span.trace_id.hex()].append(span)
        return spans

    await asyncio.to_thread(
        wait_until, lambda: sum(map(len, by_trace().values())) >= 50 * 6, 10, "six spans for each request"
    )
    for trace_id, spans in by_trace().items():
        [root] = [span for span in spans if span.name == SpanName.HTTP_REQUEST]
        assert root.parent_span_id.hex() == ours[trace_id]
        children = [span for span in spans if span is not root]
        assert {span.name for span in children} == ENGINE_SPANS | GATEWAY_SPANS
        assert len(children) == 5
        assert all(span.parent_span_id == root.span_id for span in children)
        named = {span.name: span for span in children}
        order = [
            named[SpanName.ROUTE].start_time_unix_nano,  # it may end after the engine has begun
            named[SpanName.ENGINE_PREFILL].end_time_unix_nano,
            named[SpanName.ENGINE_DECODE].end_time_unix_nano,
        ]
        assert order == sorted(order)
        assert root.end_time_unix_nano >= named[SpanName.ENGINE_PREFILL].end_time_unix_nano


def test_a_request_for_embeddings_has_spans_of_its_own(stack, receiver):
    trace_id = secrets.token_hex(16)
    body = {"model": "vectors", "input": ["water", "falls"]}
    headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
    assert send(stack.url, "POST", "/v1/embeddings", body, key=stack.key(), headers=headers).status == 200

    def spans() -> list[Span]:
        ours = [span for span in receiver.spans if span.trace_id.hex() == trace_id]
        return ours if len(ours) >= 5 else []

    named = {span.name: span for span in wait_until(spans, 10, "five spans")}
    assert set(named) == {
        SpanName.HTTP_REQUEST,
        SpanName.TOKENIZE,
        SpanName.ROUTE,
        SpanName.ENGINE_QUEUE,
        SpanName.ENGINE_PREFILL,
    }
    root = named.pop(SpanName.HTTP_REQUEST)
    assert all(span.parent_span_id == root.span_id for span in named.values())
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["gen_ai.operation.name"].string_value == "embeddings"
    assert attributes["gen_ai.usage.input_tokens"].int_value == 10


@pytest.mark.parametrize(
    "traceparent", ["", "garbage", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-xyz-1-01"]
)
def test_an_invalid_traceparent_starts_a_new_trace(stack, receiver, traceparent):
    before = len(receiver.spans)
    answer = send(
        stack.url,
        "POST",
        "/v1/completions",
        {"model": "fake", "prompt": "hi", "max_tokens": 1},
        key=stack.key(),
        headers={"traceparent": traceparent},
    )
    assert answer.status == 200

    def roots() -> list[Span]:
        new = receiver.spans[before:]
        return [
            s
            for s in new
            if s.name == SpanName.HTTP_REQUEST and any(a.key == "headrace.tenant" for a in s.attributes)
        ]

    [root] = wait_until(roots, 10, "the request's span")
    assert root.parent_span_id == b""
    assert root.trace_id != bytes(16)


def test_an_unsampled_context_records_nothing(stack, receiver):
    trace_id = secrets.token_hex(16)
    traceparent = {"traceparent": f"00-{trace_id}-{'1' * 16}-00"}
    body = {"model": "fake", "prompt": "hi", "max_tokens": 1}
    assert (
        send(stack.url, "POST", "/v1/completions", body, key=stack.key(), headers=traceparent).status == 200
    )
    sampled = secrets.token_hex(16)
    traceparent = {"traceparent": f"00-{sampled}-{'1' * 16}-01"}
    assert (
        send(stack.url, "POST", "/v1/completions", body, key=stack.key(), headers=traceparent).status == 200
    )
    wait_until(
        lambda: sum(span.trace_id.hex() == sampled for span in receiver.spans) >= 6, 10, "the sampled trace"
    )
    assert not any(span.trace_id.hex() == trace_id for span in receiver.spans)


def test_a_collector_that_is_gone_does_not_hold_up_the_end(redis_url):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    with Stack(redis_url, None, environment) as stack:
        body = {"model": "fake", "prompt": "hi", "max_tokens": 1}
        assert send(stack.url, "POST", "/v1/completions", body, key=stack.key()).status == 200
        for name in ("gateway", "fake-0"):
            began = time.monotonic()
            stack.kill(name, signal.SIGTERM)
            assert stack.processes[name].wait(20) == 0
            assert time.monotonic() - began < 8, name
