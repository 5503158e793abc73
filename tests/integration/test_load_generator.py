"""The generator on real sockets: what it puts on the wire, when, and what it makes of what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import ssl
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loadtest.arrivals import arrival_offsets_within_ns
from loadtest.client import OpenAIClient, Target
from loadtest.client_check import HELD_BACK, check_client, is_client_bound
from loadtest.connection_pool import MAX_IDLE_NS, ConnectionPool
from loadtest.datasets.prompt import Conversation, Item, Prompt, Turn
from loadtest.fleet import Fleet, WorkerDied
from loadtest.generator import ClosedLoop, LoadRun, OpenLoop, Schedule, generate_load
from loadtest.request_record import RequestRecord
from loadtest.summary import summarise
from tests.benchmarks.gateway_overhead import upstream
from tests.planted_server import FIRST_TOKEN_DELAY_S, TOKEN_DELAY_S, PlantedServer, planted_server

MS = 1_000_000
IDS = [1000, 1001, 1002]


@pytest.fixture(scope="module")
def running_server() -> Iterator[PlantedServer]:
    with planted_server() as planted:
        yield planted


@pytest.fixture
def server(running_server: PlantedServer) -> PlantedServer:
    running_server.forget()
    return running_server


def target(server: PlantedServer, model: str = "steady", **more: Any) -> Target:
    is_chat = more.get("backend") == "openai-chat"
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return Target(f"http://127.0.0.1:{server.port}{path}", **{"backend": "openai", "model": model, **more})


async def load(where: Target, items: Sequence[Item], schedule: Schedule | None = None) -> LoadRun:
    async with OpenAIClient(where) as client:
        return await generate_load(items, schedule or ClosedLoop(1), client.send)


async def one(where: Target, prompt: Prompt | None = None) -> RequestRecord:
    content: Any = "a word" if where.backend == "openai-chat" else IDS
    run = await load(where, [prompt or Prompt(content, 4)])
    return run.records[0]


async def test_events_of_a_request_come_in_order_on_one_clock(server: PlantedServer) -> None:
    record = await one(target(server))
    assert record.succeeded, record.error
    moments = [
        record.t_due_ns, record.t_dispatch_ns, record.t_ready_ns, record.t_sent_ns, record.t_headers_ns,
        record.t_first_event_ns, record.t_first_token_ns, *record.chunk_times_ns, record.t_end_ns,
    ]  # fmt: skip
    assert moments == sorted(moment for moment in moments if moment is not None)
    assert record.generator_lag_ns is not None
    assert record.connect_ns is not None
    assert record.dispatch_lag_ns == record.generator_lag_ns + record.connect_ns
    assert record.text == "tok tok tok tok "


async def test_connections_are_kept_and_a_new_one_is_told_with_its_time(server: PlantedServer) -> None:
    run = await load(target(server), [Prompt(IDS, 1)] * 6, ClosedLoop(2))
    assert len(set(server.peers)) == 2
    assert sorted(record.connect_ns is None for record in run.records) == [False] * 2 + [True] * 4
    assert summarise(run).num_new_connections == 2


async def test_refusals_keep_their_connection_and_broken_streams_lose_it(server: PlantedServer) -> None:
    run = await load(target(server, "often-busy"), [Prompt(IDS, 1)] * 6)
    assert sum(record.failure == "http_status" for record in run.records) == 2
    assert len(set(server.peers)) == 1
    await load(target(server, "garbled"), [Prompt(IDS, 1)] * 3)
    assert len(set(server.peers)) == 4


async def test_traceparent_is_the_records_trace_and_sampled_for_a_share(server: PlantedServer) -> None:
    run = await load(target(server, trace_share=0.3), [Prompt(IDS, 1)] * 60, ClosedLoop(20))
    sent = {}
    for headers in server.headers:
        match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0([01])", headers["traceparent"])
        assert match
        sent[match[1]] = match[3] == "1"
    assert sent == {record.trace_id: record.is_trace_sampled for record in run.records}
    assert 5 <= sum(sent.values()) <= 32
    none = await load(target(server), [Prompt(IDS, 1)] * 20, ClosedLoop(20))
    assert not any(record.is_trace_sampled for record in none.records)


async def test_headers_and_model_of_a_prompt_go_before_those_of_the_target(server: PlantedServer) -> None:
    where = target(server, headers={"Authorization": "Bearer k0", "X-All": "1"}, request_id_prefix="run7-")
    prompt = Prompt(IDS, 1, tenant="acme", model="bundled", headers=(("authorization", "Bearer k1"),))
    record = await one(where, prompt)
    assert server.headers[0]["Authorization"] == "Bearer k1"
    assert server.headers[0]["X-All"] == "1"
    assert server.headers[0]["x-request-id"] == "run7-0"
    assert server.bodies[0]["model"] == "bundled"
    assert record.tenant == "acme"


async def test_answer_in_one_piece_has_latency_and_tokens_but_no_first_token(server: PlantedServer) -> None:
    record = await one(target(server, is_streaming=False), Prompt(IDS, 5))
    assert record.succeeded, record.error
    assert "stream_options" not in server.bodies[0]
    assert (record.num_output_tokens, record.num_prompt_tokens, record.text) == (5, 3, "tok " * 5)
    assert record.e2el_ns is not None
    assert (record.ttft_ns, record.ttft_content_ns, record.tpot_ns, record.itls_ns) == (None, None, None, [])
    assert record.ttft_due_ns == record.e2el_due_ns  # its reader waits for all of it


async def test_running_token_counts_tell_the_tokens_of_each_chunk(server: PlantedServer) -> None:
    record = await one(target(server, "bundled", asks_continuous_usage=True), Prompt(IDS, 10))
    assert server.bodies[0]["stream_options"]["continuous_usage_stats"] is True
    assert record.chunk_tokens == [4, 4, 2]
    silent = await one(target(server, "bundled"), Prompt(IDS, 10))
    assert silent.chunk_tokens == []


@pytest.mark.parametrize(
    ("model", "num_tokens", "has_output"), [("reasoning-only", 3, False), ("tool-only", 2, True)]
)
async def test_answers_without_text_have_a_first_token(
    server: PlantedServer, model: str, num_tokens: int, has_output: bool
) -> None:
    record = await one(target(server, model, backend="openai-chat"))
    assert record.succeeded, record.error
    assert record.ttft_content_ns is not None
    assert record.ttft_content_ns >= TOKEN_DELAY_S * 1e9
    assert record.num_output_tokens == num_tokens
    assert (record.t_first_output_ns is not None) is has_output
    assert record.text == ""


async def test_first_output_comes_after_the_reasoning(server: PlantedServer) -> None:
    record = await one(target(server, "thinking-first", backend="openai-chat"))
    assert record.ttft_output_ns is not None
    assert record.ttft_content_ns is not None
    assert record.ttft_output_ns - record.ttft_content_ns >= FIRST_TOKEN_DELAY_S * 0.9e9


async def test_one_token_answer_has_a_first_token_and_no_time_per_token(server: PlantedServer) -> None:
    record = await one(target(server), Prompt(IDS, 1))
    assert record.ttft_ns is not None
    assert record.tpot_ns is None


async def test_usage_below_the_chunks_is_called_odd(server: PlantedServer) -> None:
    run = await load(target(server, "overcounted"), [Prompt(IDS, 4)])
    assert summarise(run).num_odd_usages == 1
    assert summarise(await load(target(server), [Prompt(IDS, 4)])).num_odd_usages == 0


async def test_stall_of_two_seconds_shows_from_the_due_time_though_the_load_is_capped(
    server: PlantedServer,
) -> None:
    """Coordinated omission: while the server stalls, a capped generator sends next to nothing."""
    server.stall_s = 2.0
    schedule = OpenLoop([index * 25 * MS for index in range(80)], max_concurrency=8)
    run = await load(target(server), [Prompt(IDS, 1)] * 80, schedule)
    summary = summarise(run)
    assert summary.ttft_due_ms is not None
    assert summary.dispatch_lag_ms is not None
    assert summary.ttft_due_ms.percentiles[99.0] >= 1800
    assert summary.dispatch_lag_ms.percentiles[99.0] >= 1500
    ttft = summary.metrics_ms["ttft"]
    assert ttft is not None
    assert ttft.median <= 500  # what a tool that starts the clock at the sending would report
    checks = {check.check: check for check in check_client(run.records, run.generator)}
    assert not checks[HELD_BACK].passed


async def test_turn_waits_for_the_answer_before_and_takes_it_along(server: PlantedServer) -> None:
    talk = Conversation((Turn("one", 8), Turn("two", 8, 0.05), Turn("three", 8, 0.0)), system="sys")
    where = target(server, "echoing", backend="openai-chat")
    run = await load(where, [talk, Prompt("alone", 8)], OpenLoop([0, 0]))
    turns = [record for record in run.records if record.conversation == 0]
    assert [(record.index, record.turn, record.text) for record in turns] == [
        (0, 0, "2 messages"),
        (1, 1, "4 messages"),
        (2, 2, "6 messages"),
    ]
    assert [record.index for record in run.records] == [0, 1, 2, 3]
    for before, after in itertools.pairwise(turns):
        assert before.t_end_ns is not None
        assert after.t_due_ns >= before.t_end_ns
    assert turns[1].t_due_ns - turns[0].t_end_ns >= 0.05e9  # type: ignore[operator]
    last = max(server.bodies, key=lambda body: len(body["messages"]))
    assert [message["role"] for message in last["messages"]] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert last["messages"][2]["content"] == "2 messages"


async def test_failed_turn_ends_its_conversation(server: PlantedServer) -> None:
    talk = Conversation((Turn("one", 2), Turn("two", 2)))
    run = await load(target(server, "silent", backend="openai-chat"), [talk])
    assert [record.failure for record in run.records] == ["empty"]


async def test_server_that_is_not_there_is_a_failed_connection() -> None:
    record = await one(Target("http://127.0.0.1:1/v1/completions", "openai", "m"))
    assert record.failure == "connection"
    assert record.t_sent_ns is None
    assert record.t_end_ns is not None


async def test_cancelled_load_leaves_its_records_and_closes_its_connections(server: PlantedServer) -> None:
    records: list[RequestRecord] = []
    async with OpenAIClient(target(server, "hanging")) as client:
        run = asyncio.create_task(
            generate_load([Prompt(IDS, 2)] * 3, ClosedLoop(3), client.send, records=records)
        )
        await server.wait_for(3)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
    assert [(record.t_end_ns, record.failure) for record in records] == [(None, None)] * 3


async def test_poisson_load_arrives_as_it_was_due_and_never_early(server: PlantedServer) -> None:
    offsets = arrival_offsets_within_ns(1.0, 150.0, 1.0, np.random.default_rng(8))
    run = await load(target(server), [Prompt(IDS, 1)] * len(offsets), OpenLoop(offsets))
    assert len(server.bodies) == len(offsets)
    assert all(record.succeeded for record in run.records)
    lags_ms = sorted((record.generator_lag_ns or 0) / MS for record in run.records)
    assert lags_ms[0] >= 0
    assert lags_ms[len(lags_ms) // 2] <= 10  # the 99th percentile is what the soak test is for


@pytest.fixture
def instant_server() -> Iterator[int]:
    """Answers at once, in a process of its own: its port."""
    context = multiprocessing.get_context("spawn")
    control, its_end = context.Pipe()
    process = context.Process(target=upstream.run, args=(its_end,))
    process.start()
    yield control.recv()
    control.send(None)
    process.join()


@pytest.mark.soak
@pytest.mark.parametrize("rate", [50.0, 200.0, 500.0, 2000.0])
async def test_generator_keeps_the_schedule_at_every_rate(instant_server: int, rate: float) -> None:
    """Needs two cores with nothing else to do."""
    offsets = arrival_offsets_within_ns(30.0, rate, 1.0, np.random.default_rng(8))
    where = Target(f"http://127.0.0.1:{instant_server}/v1/completions", "openai", upstream.MODEL)
    run = await load(where, [Prompt(IDS, 16)] * len(offsets), OpenLoop(offsets))
    assert all(record.succeeded for record in run.records)
    assert abs(len(run.records) - 30 * rate) <= 3 * (30 * rate) ** 0.5
    checks = check_client(run.records, run.generator)
    assert not is_client_bound(checks), [check.reason for check in checks if not check.passed]


async def test_several_processes_make_one_load_with_one_start(server: PlantedServer) -> None:
    offsets = [index * 5 * MS for index in range(40)]
    async with Fleet(target(server, trace_share=1.0), 2) as fleet:
        first = await fleet.generate_load([Prompt(IDS, 2)] * 40, OpenLoop(offsets))
        second = await fleet.generate_load([Prompt(IDS, 2)] * 4, ClosedLoop(2))
    assert [record.index for record in first.records] == list(range(40))
    assert [record.t_due_ns - first.t_start_ns for record in first.records] == offsets
    assert all(record.succeeded for record in (*first.records, *second.records))
    assert len({record.trace_id for record in first.records}) == 40
    assert len(server.bodies) == 44
    assert [samples.worker for samples in first.generator] == [0, 1]
    assert all(samples.cpu_s > 0 for samples in first.generator)
    assert first.t_end_ns >= max(record.t_end_ns or 0 for record in first.records)


async def test_death_of_a_process_is_an_error_that_says_so_and_ends_the_others(
    server: PlantedServer,
) -> None:
    async with Fleet(target(server, "hanging"), 2) as fleet:
        pids = fleet.pids
        run = asyncio.create_task(fleet.generate_load([Prompt(IDS, 2)] * 4, OpenLoop([0] * 4)))
        await server.wait_for(4)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"process 2 of 2 .* signal SIGKILL"):
            await run
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_interrupted_command_ends_its_processes(server: PlantedServer) -> None:
    code = (
        "import sys; from loadtest.options import BenchServeOptions; "
        "from loadtest.serve import run_bench_serve; "
        f"sys.exit(run_bench_serve(BenchServeOptions(port={server.port}, model='hanging', num_prompts=4, "
        "num_workers=2)))"
    )
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    await server.wait_for(4)
    workers = psutil.Process(command.pid).children()
    assert len(workers) == 2
    command.send_signal(signal.SIGINT)
    assert await command.wait() == 130
    assert psutil.wait_procs(workers, timeout=10)[1] == []


async def test_https_is_verified_unless_told_otherwise(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(tmp_path))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"choices": [{"text": "hi", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as running:
        url = f"https://127.0.0.1:{running.sockets[0].getsockname()[1]}/v1/completions"
        trusting = await one(Target(url, "openai", "m", is_streaming=False, verifies_tls=False))
        assert (trusting.text, trusting.failure) == ("hi", None)
        careful = await one(Target(url, "openai", "m", is_streaming=False))
        assert careful.failure == "connection"
        assert "certificate" in careful.error


def self_signed(directory: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = directory / "both.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


async def test_connection_that_was_idle_for_long_is_not_used_again(server: PlantedServer) -> None:
    """Servers close idle connections; one must not be used in the moment in which that happens."""
    now_ns = 0
    async with OpenAIClient(target(server), lambda: now_ns) as client:
        for pause_ns in (0, MAX_IDLE_NS - 1, MAX_IDLE_NS + 1):
            now_ns += pause_ns
            await client.send(Prompt(IDS, 1), RequestRecord(0, 1, 0))
    first, second, third = server.peers
    assert first == second
    assert third != first


async def test_address_that_does_not_answer_is_left_out_of_the_turn(server: PlantedServer) -> None:
    """Of a name with two addresses, as localhost has them."""
    pool = ConnectionPool(urlsplit(f"http://localhost:{server.port}"), lambda: 0)
    await pool.resolve()
    pool.addresses = ["127.0.0.2", "127.0.0.1"]  # nothing listens on the first
    connections = [await pool.open() for _ in range(3)]
    assert all(connection.is_open for connection in connections)
    assert pool.addresses == ["127.0.0.1"]
    pool.close()
