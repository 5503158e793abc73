"""`headrace bench serve` against a real HTTP server whose delays, tokens and faults are known.

The server writes down when it sent each chunk, on the clock that the load generator reads too (one
machine), so that figures are compared with what happened and not with what was planned.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loadtest.options import BenchServeOptions
from loadtest.serve import run_bench_serve
from shared.errors import ConfigError

FIRST_TOKEN_DELAY_S = 0.04
TOKEN_DELAY_S = 0.01
SLACK_S = 0.25  # for a busy machine; the delays' lower bounds are what a test leans on


@dataclass
class FakeServer:
    """Streams `max_tokens` tokens. What else it does hangs on the model's name."""

    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    chunk_times_ns: list[list[int]] = field(default_factory=list)  # per request, in order of arrival
    num_running: int = 0
    most_running: int = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "steady"}, {"id": "other"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("Authorization"))
        number = len(self.bodies)
        if body["model"] == "often-busy" and number % 3 == 0:
            error = {"message": "try later", "type": "overloaded", "param": None, "code": None}
            return web.json_response({"error": error}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-request-id": "r"})
        await response.prepare(request)
        stream = Stream(response, request.transport, is_chat="messages" in body)
        self.chunk_times_ns.append(stream.times_ns)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await SCRIPTS[body["model"]](stream, body, number)
        self.num_running -= 1
        return response


@dataclass
class Stream:
    response: web.StreamResponse
    transport: asyncio.Transport | None
    is_chat: bool
    times_ns: list[int] = field(default_factory=list)

    def abort_connection(self) -> None:
        assert self.transport is not None, "the connection is gone already"
        self.transport.abort()

    async def data(self, payload: object) -> None:
        text = payload if isinstance(payload, str) else json.dumps(payload)
        await self.response.write(f"data: {text}\n\n".encode())

    async def chunk(self, text: str, finish_reason: str | None = None) -> None:
        self.times_ns.append(time.monotonic_ns())
        content = {"delta": {"content": text}} if self.is_chat else {"text": text}
        await self.data({"choices": [{"index": 0, **content, "finish_reason": finish_reason}], "usage": None})

    async def tokens(self, count: int, per_chunk: int = 1, *, finish: bool = True) -> None:
        await asyncio.sleep(FIRST_TOKEN_DELAY_S)
        for start in range(0, count, per_chunk):
            if start:
                await asyncio.sleep(TOKEN_DELAY_S * per_chunk)
            is_last = start + per_chunk >= count
            await self.chunk("tok " * min(per_chunk, count - start), "length" if is_last and finish else None)

    async def end(self, body: dict[str, Any], count: int) -> None:
        usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": count, "total_tokens": 0}
        await self.data({"choices": [], "usage": usage})
        await self.data("[DONE]")


def prompt_tokens(body: dict[str, Any]) -> int:
    if "messages" in body:
        return len(body["messages"][0]["content"].split()) + 5  # a template's own tokens
    return len(body["prompt"])


async def steady(stream: Stream, body: dict[str, Any], number: int) -> None:
    await stream.tokens(body["max_tokens"])
    await stream.end(body, body["max_tokens"])


async def bundled(stream: Stream, body: dict[str, Any], number: int) -> None:
    await stream.tokens(body["max_tokens"], per_chunk=4)
    await stream.end(body, body["max_tokens"])


async def role_first(stream: Stream, body: dict[str, Any], number: int) -> None:
    await stream.data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    await steady(stream, body, number)


async def no_usage(stream: Stream, body: dict[str, Any], number: int) -> None:
    await stream.tokens(body["max_tokens"])
    await stream.data("[DONE]")


async def faulty(stream: Stream, body: dict[str, Any], number: int) -> None:
    """Five in turn: good, socket cut, error event after 200 OK, no [DONE], no finish_reason."""
    if number % 5 == 1:
        await steady(stream, body, number)
        return
    await stream.tokens(2, finish=False)
    match number % 5:
        case 2:
            stream.abort_connection()
        case 3:
            await stream.data({"error": {"message": "engine died", "type": "server_error"}})
        case 4:
            pass
        case _:
            await stream.end(body, 2)


async def slow_start(stream: Stream, body: dict[str, Any], number: int) -> None:
    await asyncio.sleep(1.5)
    await steady(stream, body, number)


async def silent(stream: Stream, body: dict[str, Any], number: int) -> None:
    await stream.end(body, 0)


async def garbled(stream: Stream, body: dict[str, Any], number: int) -> None:
    await stream.data("{this is not JSON")


async def hanging(stream: Stream, body: dict[str, Any], number: int) -> None:
    await stream.tokens(1, finish=False)
    await asyncio.sleep(30)


SCRIPTS: dict[str, Callable[[Stream, dict[str, Any], int], Any]] = {
    "steady": steady,
    "often-busy": steady,
    "bundled": bundled,
    "role-first": role_first,
    "no-usage": no_usage,
    "faulty": faulty,
    "slow-start": slow_start,
    "silent": silent,
    "garbled": garbled,
    "hanging": hanging,
}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Runs in a thread of its own: the command under test owns the main thread's event loop."""
    fake = FakeServer()
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", fake.models)
        app.router.add_post("/v1/completions", fake.completions)
        app.router.add_post("/v1/chat/completions", fake.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.port = runner.addresses[0][1]
        ready.set()
        await stopping.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(10), "the server did not start"
    yield fake
    loop.call_soon_threadsafe(stopping.set)
    thread.join(10)
    loop.close()


@dataclass
class Bench:
    server: FakeServer
    directory: Path

    def run(self, **options: Any) -> tuple[int, dict[str, Any]]:
        """The exit code and the result file."""
        settings: dict[str, Any] = {
            "port": self.server.port,
            "random_input_len": 12,
            "random_output_len": 8,
            "result_filename": "result.json",
            "result_dir": self.directory,
            "save_result": True,
            "save_detailed": True,
            **options,
        }
        exit_code = run_bench_serve(BenchServeOptions(**settings))
        return exit_code, json.loads((self.directory / "result.json").read_text())


@pytest.fixture
def bench(server: FakeServer, tmp_path: Path) -> Bench:
    return Bench(server, tmp_path)


def test_counts_and_latencies_are_those_of_the_server(bench: Bench) -> None:
    exit_code, result = bench.run(model="steady", num_prompts=6, max_concurrency=2)
    assert exit_code == 0
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 12, 6 * 8)
    assert result["output_lens"] == [8] * 6
    assert result["max_concurrent_requests"] == 2
    assert result["output_throughput"] == pytest.approx(48 / result["duration"])

    assert min(result["ttfts"]) >= FIRST_TOKEN_DELAY_S
    assert result["mean_ttft_ms"] <= 1000 * (FIRST_TOKEN_DELAY_S + SLACK_S)
    written = bench.server.chunk_times_ns
    tpots_ms = [(times[-1] - times[0]) / 7 / 1e6 for times in written]
    assert result["mean_tpot_ms"] == pytest.approx(sum(tpots_ms) / 6, abs=1000 * SLACK_S / 7)
    assert [len(gaps) for gaps in result["itls"]] == [7] * 6


def test_events_of_a_request_are_in_order_on_one_clock(bench: Bench) -> None:
    _, result = bench.run(model="steady", num_prompts=3, max_concurrency=1)
    for request, written in zip(result["headrace"]["requests"], bench.server.chunk_times_ns, strict=True):
        assert all(seen > sent for seen, sent in zip(request["chunk_times_ns"], written, strict=True))
        times = [request[f"t_{name}_ns"] for name in ("due", "sent", "headers", "first_event", "first_token")]
        times += [request["chunk_times_ns"][-1], request["t_end_ns"]]
        assert times == sorted(times)
        assert all(type(moment) is int for moment in times)


def test_prompts_go_out_as_distinct_token_ids_with_exact_lengths(bench: Bench) -> None:
    bench.run(model="steady", num_prompts=4, max_concurrency=4, temperature=0.0, api_key="hr-k")
    bodies = bench.server.bodies
    assert {len(body["prompt"]) for body in bodies} == {12}
    assert len({body["prompt"][0] for body in bodies}) == 4
    assert {body["max_tokens"] for body in bodies} == {8}
    assert {body["min_tokens"] for body in bodies} == {8}
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in bodies)
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
    assert set(bench.server.authorizations) == {"Bearer hr-k"}
    assert "hr-k" not in (bench.directory / "result.json").read_text()


def test_failed_requests_are_counted_named_and_make_the_exit_code(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, result = bench.run(model="often-busy", num_prompts=9, max_concurrency=3)
    assert exit_code == 1
    assert (result["completed"], result["failed"]) == (6, 3)
    assert result["total_output_tokens"] == 6 * 8
    assert [error for error in result["errors"] if error] == ["HTTP 503: try later"] * 3
    assert result["headrace"]["failures"] == {"http_status": 3}
    assert result["headrace"]["ttft_due_ms"]["count"] == 9
    assert result["headrace"]["ttft_due_ms"]["p99"] == "inf"
    shown = capsys.readouterr()
    assert "3 of 9 requests failed" in shown.err
    assert f"{'Failed requests:':<40} 3" in shown.out


def test_broken_streams_after_200_ok_are_failures(bench: Bench) -> None:
    exit_code, result = bench.run(model="faulty", num_prompts=5, max_concurrency=1)
    assert exit_code == 1
    assert (result["completed"], result["failed"]) == (1, 4)
    kinds = [request["failure"] for request in result["headrace"]["requests"]]
    assert kinds == [None, "cut", "error_event", "cut", "cut"]
    assert result["errors"][2] == "engine died"
    assert "[DONE]" in result["errors"][3]
    assert "finish_reason" in result["errors"][4]
    # What arrived before the fault is kept, but in no statistics.
    assert [len(gaps) for gaps in result["itls"]] == [7, 1, 1, 1, 1]
    assert result["headrace"]["e2el_due_ms"]["count"] == 5


@pytest.mark.parametrize(("model", "kind"), [("silent", "empty"), ("garbled", "bad_stream")])
def test_answers_without_tokens_or_sense_are_failures(bench: Bench, model: str, kind: str) -> None:
    exit_code, result = bench.run(model=model, num_prompts=2, max_concurrency=1)
    assert exit_code == 1
    assert result["headrace"]["failures"] == {kind: 2}
    assert result["mean_ttft_ms"] is None


def test_request_that_never_ends_is_given_up_and_counted(bench: Bench) -> None:
    exit_code, result = bench.run(model="hanging", num_prompts=1, max_concurrency=1, request_timeout_s=0.3)
    assert exit_code == 1
    assert result["headrace"]["failures"] == {"timeout": 1}


def test_chat_with_an_early_role_delta_keeps_both_first_tokens(bench: Bench) -> None:
    _, result = bench.run(backend="openai-chat", model="role-first", num_prompts=3, max_concurrency=1)
    content_ms = result["headrace"]["ttft_content_ms"]["p50"]
    assert content_ms >= 1000 * FIRST_TOKEN_DELAY_S
    # vLLM's rule takes the role delta, which left the server a whole delay earlier.
    assert result["median_ttft_ms"] <= content_ms - 1000 * FIRST_TOKEN_DELAY_S / 2
    assert "choices" in result["headrace"]["ttft_rule"]
    assert result["input_lens"] == [12 + 5] * 3  # as usage says, template included
    assert bench.server.bodies[0]["messages"][0]["role"] == "user"


def test_several_tokens_in_a_chunk_keep_tpot_per_token_and_itl_per_chunk(bench: Bench) -> None:
    _, result = bench.run(model="bundled", num_prompts=3, max_concurrency=1, random_output_len=16)
    assert result["headrace"]["tokens_per_chunk"] == 4
    assert [len(gaps) for gaps in result["itls"]] == [3] * 3
    request = result["headrace"]["requests"][0]
    span_ns = request["chunk_times_ns"][-1] - request["chunk_times_ns"][0]
    assert sum(result["itls"][0]) * 1e9 == pytest.approx(span_ns)
    assert result["mean_tpot_ms"] == pytest.approx(result["mean_itl_ms"] * 3 / 15)


def test_server_without_usage_leaves_token_figures_open(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, result = bench.run(model="no-usage", num_prompts=2, max_concurrency=1)
    assert exit_code == 0
    assert (result["total_output_tokens"], result["output_throughput"], result["mean_tpot_ms"]) == (None,) * 3
    assert result["mean_ttft_ms"] >= 1000 * FIRST_TOKEN_DELAY_S
    assert result["total_input_tokens"] == 24  # we sent the ids, so that much is known
    assert "no usage" in capsys.readouterr().err


def test_open_loop_charges_the_wait_for_a_slot_to_the_due_latency(bench: Bench) -> None:
    """Four due within 20 ms, one slot: the last one waits for three others."""
    _, result = bench.run(model="steady", num_prompts=4, request_rate=200.0, max_concurrency=1)
    one_answer_ms = 1000 * (FIRST_TOKEN_DELAY_S + 7 * TOKEN_DELAY_S)
    extras = result["headrace"]
    assert extras["loop"] == "open"
    last = max(extras["requests"], key=lambda request: request["t_sent_ns"])
    assert (last["t_sent_ns"] - last["t_due_ns"]) / 1e6 >= 2 * one_answer_ms
    assert extras["ttft_due_ms"]["p99"] >= result["p99_ttft_ms"] + one_answer_ms
    assert result["p99_client_queue_time_ms"] == pytest.approx(extras["dispatch_lag_ms"]["p99"])


def test_open_loop_without_a_limit_is_not_held_back_by_a_pool_of_connections(bench: Bench) -> None:
    _, result = bench.run(model="slow-start", num_prompts=150)
    assert result["failed"] == 0
    assert bench.server.most_running == 150  # aiohttp's own limit would be 100


def test_sweep_makes_a_file_for_each_level_and_one_table(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = BenchServeOptions(
        port=bench.server.port,
        concurrency_sweep=(1, 3),
        num_prompts=3,
        num_warmups=1,
        random_input_len=4,
        random_output_len=2,
        result_dir=tmp_path,
        save_result=True,
    )
    assert run_bench_serve(options) == 0
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*concurrency*.json"))]
    assert [result["max_concurrency"] for result in results] == [1, 3]
    assert {result["model_id"] for result in results} == {"steady"}  # the first that the server lists
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert [row.split("|")[1].strip() for row in table[2:]] == ["1", "3"]
    # 2 levels x (1 warm-up + 3): no prompt twice.
    first_ids = [tuple(body["prompt"]) for body in bench.server.bodies]
    assert len(first_ids) == len(set(first_ids)) == 8


def test_no_server_and_no_model_name_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--base-url") as raised:
        run_bench_serve(BenchServeOptions(port=1))
    assert raised.value.param == "--model"
