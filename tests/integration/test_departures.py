"""Clients that leave, engines that die: nothing is left behind and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from tests.http_client import send
from tests.stack import Stack, fake_model, wait_until

IDLE = {"in flight": 0, "running": 0, "waiting": 0, "blocks held": 0}


def slow_stack(redis_url: str, *, engines: int = 1, **fields: Any) -> Stack:
    model = fake_model(options="step_delay_ms=10", engines=engines, max_num_seqs=32, **fields)
    return Stack(redis_url, {"models": [model], "tenants": [{"name": "t", "max_concurrency": 1000}]})


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with slow_stack(redis_url) as stack:
        yield stack


def body(*, stream: bool, max_tokens: int = 3000, prompt: str = "go on") -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}


async def leave_after(session: aiohttp.ClientSession, url: str, stay_s: float, *, stream: bool) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(stay_s):
            async with session.post(url + "/v1/completions", json=body(stream=stream)) as response:
                assert response.status == 200
                async for _ in response.content:
                    pass
            raise AssertionError("the answer was to take longer than the client stays")


async def test_200_clients_that_leave_at_random_moments_leave_nothing_behind(stack):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    headers = {"Authorization": f"Bearer {stack.key()}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        # With 32 places for 200 clients, some leave while queued, some in prefill, some while decoding.
        clients = [
            leave_after(session, stack.url, rng.uniform(0.02, 2.0), stream=rng.random() < 0.5)
            for _ in range(200)
        ]
        await asyncio.gather(*clients)
    wait_until(lambda: stack.gauges() == IDLE, 2.0, f"an idle stack after the last client ({stack.gauges()})")
    slots = stack.redis.zcard(stack.keys.concurrency_slots("t"))
    assert slots == 0
    answer = send(stack.url, "POST", "/v1/completions", body(stream=False, max_tokens=3), key=stack.key())
    assert answer.status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lone_client_that_leaves_frees_the_engine_within_a_second(stack, stream):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {stack.key()}"}) as session:
        task = asyncio.create_task(leave_after(session, stack.url, 0.6, stream=stream))
        await asyncio.to_thread(wait_until, lambda: stack.gauges()["running"] == 1, 5, "a running request")
        await task
    began = time.monotonic()
    await asyncio.to_thread(wait_until, lambda: stack.gauges() == IDLE, 1.5, "an idle stack")
    print(f"idle after {time.monotonic() - began:.2f} s (reported every 0.5 s)")


async def read_stream(session: aiohttp.ClientSession, url: str) -> list[str]:
    """The data of all events until the stream ends."""
    async with session.post(url + "/v1/completions", json=body(stream=True)) as response:
        assert response.status == 200, await response.text()
        return [line[6:].decode().strip() async for line in response.content if line.startswith(b"data: ")]


async def test_kill_9_of_an_engine_ends_every_stream_with_an_error_and_then_503(stack):
    key = stack.key()
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"}, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        streams = [asyncio.create_task(read_stream(session, stack.url)) for _ in range(20)]
        await asyncio.to_thread(wait_until, lambda: stack.gauges()["running"] == 20, 10, "20 streams")
        await asyncio.sleep(0.2)
        stack.kill("fake-0")
        killed_at = time.monotonic()
        async with asyncio.timeout(5):
            results = await asyncio.gather(*streams)
    print(f"all streams ended {time.monotonic() - killed_at:.2f} s after the kill")
    for events in results:
        assert len(events) > 1
        assert json.loads(events[-1])["error"]["code"] == "upstream_error"
        assert "[DONE]" not in events
    refused = send(stack.url, "POST", "/v1/completions", body(stream=True), key=key)
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.error["code"] == "unavailable"
    assert stack.get("/health")[0] == stack.get("/readyz")[0] == 503
    assert stack.get("/livez")[0] == 200
    stack.start_engine("fake", 0)
    stack.wait_ready()
    assert send(stack.url, "POST", "/v1/completions", body(stream=False, max_tokens=2), key=key).status == 200


async def test_a_stopped_engine_is_noticed_though_its_connection_stays_open(stack):
    key = stack.key()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        stream = asyncio.create_task(read_stream(session, stack.url))
        await asyncio.to_thread(wait_until, lambda: stack.gauges()["running"] == 1, 10, "a stream")
        stack.kill("fake-0", signal.SIGSTOP)
        async with asyncio.timeout(10):
            events = await stream
        assert json.loads(events[-1])["error"]["code"] == "upstream_error"
    stack.kill("fake-0", signal.SIGCONT)
    stack.wait_ready()  # the same epoch is taken back once its record is written again


async def test_a_request_that_showed_nothing_yet_moves_to_another_engine(redis_url):
    # One running sequence at a time and long prompts: most requests wait when the engine dies.
    with slow_stack(redis_url, engines=2) as stack:
        key = stack.key()
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"}, connector=aiohttp.TCPConnector(limit=0)
        ) as session:

            async def whole(number: int) -> int:
                one = body(stream=False, max_tokens=100, prompt=f"{number} " * 40)
                async with session.post(stack.url + "/v1/completions", json=one) as response:
                    await response.read()
                    return response.status

            requests = [asyncio.create_task(whole(number)) for number in range(150)]
            await asyncio.to_thread(wait_until, lambda: stack.gauges()["waiting"] > 40, 10, "a queue")
            stack.kill("fake-0")
            statuses = await asyncio.gather(*requests)
    assert set(statuses) <= {200, 502}
    assert statuses.count(502) <= 32  # those that had begun on the engine that died


async def test_sigterm_lets_running_streams_end_and_takes_no_new_ones(redis_url):
    with slow_stack(redis_url) as stack:
        key = stack.key()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:

            async def read() -> list[bytes]:
                one = body(stream=True, max_tokens=150)
                async with session.post(stack.url + "/v1/completions", json=one) as response:
                    return [line async for line in response.content if line.startswith(b"data: ")]

            stream = asyncio.create_task(read())
            await asyncio.to_thread(wait_until, lambda: stack.gauges()["running"] == 1, 10, "a stream")
            stack.kill("gateway", signal.SIGTERM)
            events = await stream
        assert events[-1] == b"data: [DONE]\n"
        assert stack.processes["gateway"].wait(10) == 0


async def test_a_gateway_that_dies_leaves_no_zombie_in_the_engine(stack):
    first = stack.url
    stack.start_gateway("second")
    stack.wait_ready()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {stack.key()}"}) as session:
        stream = asyncio.create_task(read_stream(session, first))
        await asyncio.to_thread(wait_until, lambda: stack.gauges()["running"] == 1, 10, "a stream")
        stack.kill("gateway")
        with pytest.raises(aiohttp.ClientError):
            await stream
        await asyncio.to_thread(wait_until, lambda: stack.gauges() == IDLE, 3, "an idle engine")


@pytest.mark.parametrize("streamed", [True, False])
async def test_what_outlasts_the_drain_limit_is_told_so(redis_url, streamed):
    document = {
        "gateway": {"drain_timeout_s": 1},
        "models": [fake_model(options="step_delay_ms=10")],
        "tenants": [{"name": "t", "max_concurrency": 10}],
    }
    with Stack(redis_url, document) as stack:
        key = stack.key()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:

            async def read() -> tuple[int, bytes]:
                async with session.post(
                    stack.url + "/v1/completions", json=body(stream=streamed)
                ) as response:
                    return response.status, await response.read()

            running = asyncio.create_task(read())
            await asyncio.to_thread(wait_until, lambda: stack.gauges()["running"] == 1, 10, "a request")
            began = time.monotonic()
            stack.kill("gateway", signal.SIGTERM)
            status, data = await running
        last = data.split(b"data: ")[-1]
        assert status == (200 if streamed else 503)
        assert json.loads(last)["error"]["code"] == "unavailable"
        assert b"[DONE]" not in data
        assert stack.processes["gateway"].wait(10) == 0
        assert time.monotonic() - began < 6
        assert stack.redis.zcard(stack.keys.concurrency_slots("t")) == 0


async def test_half_a_request_does_not_hold_up_the_end(stack):
    _, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer {stack.key()}\r\n\r\n"
    )
    writer.write(head.encode() + b"{")
    await writer.drain()
    await asyncio.sleep(0.2)
    began = time.monotonic()
    stack.kill("gateway", signal.SIGTERM)
    assert await asyncio.to_thread(stack.processes["gateway"].wait, 10) == 0
    assert time.monotonic() - began < 5
    writer.close()


async def test_a_client_that_reads_nothing_is_cut(redis_url):
    # Slow enough that updates do not merge into a few large ones: megabytes of events must pile up.
    model = fake_model(options="step_delay_ms=1", max_model_len=60_000)
    document = {"gateway": {"write_timeout_s": 1}, "models": [model]}
    with Stack(redis_url, document) as stack, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", int(stack.url.rsplit(":", 1)[1])))
        data = json.dumps(body(stream=True, max_tokens=50_000) | {"n": 16}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {stack.key()}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        gateway = psutil.Process(stack.processes["gateway"].pid)
        port = connection.getsockname()[1]

        def is_connected() -> bool:
            return any(each.raddr and each.raddr.port == port for each in gateway.net_connections("tcp"))

        await asyncio.to_thread(wait_until, is_connected, 5, "the connection")
        await asyncio.to_thread(wait_until, lambda: not is_connected(), 40, "the cut")
        await asyncio.to_thread(wait_until, lambda: stack.gauges() == IDLE, 3, "an idle stack")


async def test_a_large_prompt_stops_nobody_else(stack):
    """Tokenising megabytes takes seconds; it must not take them from the event loop."""
    key = stack.key()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        large = asyncio.create_task(
            session.post(stack.url + "/v1/completions", json=body(stream=False, prompt="a b " * 1_900_000))
        )
        worst = 0.0
        while not large.done():
            began = time.monotonic()
            async with session.get(stack.url + "/livez") as response:
                assert response.status == 200
            worst = max(worst, time.monotonic() - began)
        answer = await large
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "context_length_exceeded"
    print(f"slowest /livez meanwhile: {worst * 1000:.0f} ms")
    assert worst < 1.5


def test_a_request_whose_step_killed_an_engine_is_not_moved_to_the_next(redis_url):
    with Stack(redis_url, {"models": [fake_model(options="die_at_step=1", engines=2)]}) as stack:
        answer = send(stack.url, "POST", "/v1/completions", body(stream=False, max_tokens=3), key=stack.key())
        assert (answer.status, answer.error["code"]) == (502, "upstream_error")
        names = ("fake-0", "fake-1")
        wait_until(
            lambda: any(stack.processes[name].poll() is not None for name in names), 10, "the end of one"
        )
        time.sleep(0.5)
        assert sum(stack.processes[name].poll() is None for name in names) == 1
