"""Clients that read slowly, and many at once."""

from __future__ import annotations

import asyncio
import json

from loadtest.conformance.answer import StreamedAnswer
from loadtest.conformance.check import check_equal
from loadtest.conformance.row import row
from loadtest.conformance.server import Server

PAUSE_S = 0.5
NUM_STREAMS = 8


async def read_slowly(
    server: Server, body: bytes, pause_s: float, has_begun: asyncio.Event | None = None
) -> str:
    """The text of a stream of which nothing is read for a while after its head."""
    path = "/v1/chat/completions"
    async with server.connection(receive_buffer_bytes=4096) as connection:
        await connection.send(server.raw_request("POST", path, body))
        status, headers = await connection.read_head()
        check_equal(status, 200, "status")
        if has_begun is not None:
            has_begun.set()
        await asyncio.sleep(pause_s)
        answer = await connection.read_body(headers)
    check_equal(answer[-14:], b"data: [DONE]\n\n", "the end of the stream")
    return answer.decode()


@row
async def a_slow_reader_gets_all(server: Server) -> None:
    """Who reads nothing for half a second gets the whole text all the same."""
    fields = {"max_tokens": 300, "logprobs": True, "top_logprobs": 5}  # large events fill buffers
    whole = (await server.chat(**fields)).ok("logprobs").json["choices"][0]["message"]["content"]
    raw = await read_slowly(server, json.dumps(server.chat_body(stream=True, **fields)).encode(), PAUSE_S)
    chunks = [json.loads(e[6:]) for e in raw.split("\n\n") if e.startswith("data: {")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    check_equal(text, whole, "the text")


@row
async def a_slow_reader_delays_nobody(server: Server) -> None:
    """While one client reads nothing, another one is answered before it goes on."""
    body = json.dumps(server.chat_body(stream=True, max_tokens=300)).encode()
    has_begun = asyncio.Event()
    slow = asyncio.create_task(read_slowly(server, body, 10 * PAUSE_S, has_begun))
    begun = asyncio.create_task(has_begun.wait())
    try:
        await asyncio.wait({slow, begun}, return_when=asyncio.FIRST_COMPLETED)
        (await server.chat(max_tokens=4)).ok()
        check_equal(slow.done(), False, "that the slow one has ended first")
    finally:
        begun.cancel()
        slow.cancel()


@row
async def streams_at_once_do_not_mix(server: Server) -> None:
    """Eight streams at once carry each its own text."""
    prompts = [[{"role": "user", "content": f"Tell me about the number {n}."}] for n in range(NUM_STREAMS)]
    alone = [(await server.chat(messages=messages)).ok().json for messages in prompts]
    together: list[StreamedAnswer] = await asyncio.gather(*(server.chat_stream(messages=m) for m in prompts))
    for number, (one, stream) in enumerate(zip(alone, together, strict=True)):
        check_equal(stream.ok().texts[0], one["choices"][0]["message"]["content"], f"text {number}")
