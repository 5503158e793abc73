"""An OpenAI-compatible server whose delays, tokens and faults are known.

It writes down when it sent each chunk, on the clock that the load generator reads too (one machine), so
that figures are compared with what happened and not with what was planned.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FIRST_TOKEN_DELAY_S = 0.04
TOKEN_DELAY_S = 0.01


@dataclass
class PlantedServer:
    """Streams `max_tokens` tokens. What else it does hangs on the model's name."""

    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)  # the client's port of each request: one per connection
    metrics_page: str = ""  # none: 404
    taken: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # one per request
    stall_s: float = 0.0  # how long the first request holds up all others, once
    stalled_until_ns: int = 0
    chunk_times_ns: list[list[int]] = field(default_factory=list)  # per request, in order of arrival
    num_running: int = 0
    most_running: int = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "steady"}, {"id": "other"}]})

    def forget(self) -> None:
        """As if it had just been started."""
        for seen in (self.bodies, self.headers, self.peers, self.chunk_times_ns):
            seen.clear()
        self.taken = threading.Semaphore(0)
        self.most_running = 0
        self.metrics_page = ""
        self.stall_s, self.stalled_until_ns = 0.0, 0

    async def wait_for(self, num_requests: int) -> None:
        """Of other event loops: until so many more requests have been taken."""
        for _ in range(num_requests):
            await asyncio.to_thread(self.taken.acquire)

    async def metrics(self, request: web.Request) -> web.Response:
        if not self.metrics_page:
            raise web.HTTPNotFound
        counts = {"requests": len(self.bodies), "tokens": sum(prompt_tokens(body) for body in self.bodies)}
        return web.Response(text=self.metrics_page.format(**counts))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        assert request.transport is not None, "the client is gone already"
        self.peers.append(request.transport.get_extra_info("peername")[1])
        number = len(self.bodies)
        self.taken.release()
        if self.stall_s and not self.stalled_until_ns:
            self.stalled_until_ns = time.monotonic_ns() + int(self.stall_s * 1e9)
        await asyncio.sleep(max(0, self.stalled_until_ns - time.monotonic_ns()) / 1e9)
        if not body["stream"]:
            return web.json_response(whole_answer(body), headers={"x-request-id": "r"})
        if body["model"] == "often-busy" and number % 3 == 0:
            error = {"message": "try later", "type": "overloaded", "param": None, "code": None}
            return web.json_response({"error": error}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-request-id": "r"})
        await response.prepare(request)
        stream = Stream(response, request.transport, is_chat="messages" in body)
        self.chunk_times_ns.append(stream.times_ns)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        stream.is_continuous = "continuous_usage_stats" in body["stream_options"]
        try:
            await SCRIPTS[body["model"]](stream, body, number)
        finally:
            self.num_running -= 1
        return response


@dataclass
class Stream:
    response: web.StreamResponse
    transport: asyncio.Transport | None
    is_chat: bool
    times_ns: list[int] = field(default_factory=list)
    is_continuous: bool = False
    num_tokens: int = 0

    def abort_connection(self) -> None:
        assert self.transport is not None, "the connection is gone already"
        self.transport.abort()

    async def data(self, payload: object) -> None:
        text = payload if isinstance(payload, str) else json.dumps(payload)
        await self.response.write(f"data: {text}\n\n".encode())

    async def chunk(self, text: str, finish_reason: str | None = None) -> None:
        self.num_tokens += len(text.split())
        await self.delta({"content": text} if self.is_chat else {"text": text}, finish_reason)

    async def delta(self, content: dict[str, Any], finish_reason: str | None = None) -> None:
        self.times_ns.append(time.monotonic_ns())
        choice = {"index": 0, **({"delta": content} if self.is_chat else content)}
        usage = {"prompt_tokens": 7, "completion_tokens": self.num_tokens} if self.is_continuous else None
        await self.data({"choices": [{**choice, "finish_reason": finish_reason}], "usage": usage})

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


def whole_answer(body: dict[str, Any]) -> dict[str, Any]:
    text = "tok " * body["max_tokens"]
    content = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
    usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": body["max_tokens"]}
    return {"choices": [{"index": 0, **content, "finish_reason": "length"}], "usage": usage}


def prompt_tokens(body: dict[str, Any]) -> int:
    if "messages" in body:
        return (
            sum(len(message["content"].split()) for message in body["messages"]) + 5
        )  # a template's own tokens
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


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


async def reasoning_only(stream: Stream, body: dict[str, Any], number: int) -> None:
    for _ in range(3):
        await asyncio.sleep(TOKEN_DELAY_S)
        await stream.delta({"reasoning_content": "hm "})
    await stream.delta({}, "length")
    await stream.end(body, 3)


async def tool_only(stream: Stream, body: dict[str, Any], number: int) -> None:
    for piece in ('{"a"', ": 1}"):
        await asyncio.sleep(TOKEN_DELAY_S)
        await stream.delta({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
    await stream.delta({}, "tool_calls")
    await stream.end(body, 2)


async def thinking_first(stream: Stream, body: dict[str, Any], number: int) -> None:
    await stream.delta({"reasoning": "hm "})
    await asyncio.sleep(FIRST_TOKEN_DELAY_S)
    await stream.delta({"content": "so "})
    await stream.delta({}, "stop")
    await stream.end(body, 2)


async def overcounted(stream: Stream, body: dict[str, Any], number: int) -> None:
    """Usage tells fewer tokens than there were chunks with content."""
    await stream.tokens(4)
    await stream.end(body, 2)


async def echoing(stream: Stream, body: dict[str, Any], number: int) -> None:
    """Says how many messages it was sent."""
    await stream.chunk(f"{len(body['messages'])} messages", "stop")
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
    "reasoning-only": reasoning_only,
    "tool-only": tool_only,
    "thinking-first": thinking_first,
    "overcounted": overcounted,
    "echoing": echoing,
    "slow-start": slow_start,
    "silent": silent,
    "garbled": garbled,
    "hanging": hanging,
}


@contextlib.contextmanager
def planted_server() -> Iterator[PlantedServer]:
    """Runs in a thread of its own: the command under test owns the main thread's event loop."""
    planted = PlantedServer()
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", planted.models)
        app.router.add_get("/metrics", planted.metrics)
        app.router.add_post("/v1/completions", planted.completions)
        app.router.add_post("/v1/chat/completions", planted.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        planted.port = runner.addresses[0][1]
        ready.set()
        await stopping.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(10), "the server did not start"
    yield planted
    loop.call_soon_threadsafe(stopping.set)
    thread.join(10)
    loop.close()
