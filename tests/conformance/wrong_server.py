"""A server with planted faults: a relay in front of a right one, which changes what goes through it.

It relays bytes of connections, not requests, so that whatever a fault does not touch stays exactly as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"


@dataclass(slots=True)
class RelayedAnswer:
    """The head of an answer, and its body unless it is a stream."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes = b""


@dataclass(slots=True)
class Fault:
    """Changes nothing. One object for each connection, so that it may remember."""

    requests: bytearray = field(default_factory=bytearray)  # all that the client has sent so far

    def request(self, data: bytes) -> bytes:
        """Must keep the length: a Content-Length has been told."""
        return data

    def answer(self, answer: RelayedAnswer) -> None:
        """Changes a whole answer, or the head of a stream, in place."""

    def event(self, event: bytes) -> bytes:
        """An event of a stream, with the empty line that ends it."""
        return event

    def ends_connection(self) -> bool:
        return False

    def is_silent(self) -> bool:
        """The answer never comes."""
        return False


@asynccontextmanager
async def wrong_server(url: str, fault: type[Fault]) -> AsyncIterator[str]:
    """The URL of a relay to the right server at `url`."""
    upstream = urlsplit(url)
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs this in a task"
        running.add(task)
        task.add_done_callback(running.discard)
        up_reader, up_writer = await asyncio.open_connection(upstream.hostname, upstream.port)
        one = fault()
        requests = asyncio.create_task(_relay_requests(reader, up_writer, one))
        try:
            await _relay_answers(up_reader, writer, one)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # either side has left, or the test is over
        finally:
            requests.cancel()
            for each in (writer, up_writer):
                each.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _relay_requests(reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, fault: Fault) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            fault.requests += data
            upstream.write(fault.request(data))
            await upstream.drain()
    # The client has left or sends no more: a right server sees its connection end, too.
    with contextlib.suppress(OSError):
        upstream.write_eof()


async def _relay_answers(upstream: asyncio.StreamReader, client: asyncio.StreamWriter, fault: Fault) -> None:
    while True:
        head = await upstream.readuntil(HEAD_END)
        if fault.is_silent():
            await asyncio.Event().wait()
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines]
        answer = RelayedAnswer(
            int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}
        )
        if answer.status == 100:
            client.write(head)
            continue
        is_stream = "event-stream" in answer.headers.get("content-type", "")
        is_chunked = "chunked" in answer.headers.get("transfer-encoding", "")
        has_body = b"HEAD " not in fault.requests[:5] or b"GET " in fault.requests
        if not is_stream and has_body:
            answer.body = await upstream.readexactly(int(answer.headers.get("content-length", "0")))
        fault.answer(answer)
        if answer.body:
            answer.headers["content-length"] = str(len(answer.body))
        version = first.split()[0]
        client.write(f"{version} {answer.status} Relayed\r\n".encode())
        for name, value in answer.headers.items():
            client.write(f"{name}: {value}\r\n".encode("latin-1"))
        client.write(b"\r\n" + answer.body)
        if is_stream:
            await _relay_stream(upstream, client, fault, is_chunked=is_chunked)
        await client.drain()
        closes = answer.headers.get("connection", "").lower() == "close" or (is_stream and not is_chunked)
        if closes or fault.ends_connection():
            return


async def _relay_stream(
    upstream: asyncio.StreamReader, client: asyncio.StreamWriter, fault: Fault, *, is_chunked: bool
) -> None:
    waiting = b""
    async for piece in _pieces(upstream, is_chunked=is_chunked):
        *events, waiting = re.split(rb"(?<=\n\n)", waiting + piece)
        for event in events:
            if changed := fault.event(event):
                client.write(b"%x\r\n%b\r\n" % (len(changed), changed) if is_chunked else changed)
        await client.drain()
    if is_chunked:
        client.write(b"0\r\n\r\n")


async def _pieces(upstream: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    if not is_chunked:
        while data := await upstream.read(65_536):
            yield data
        return
    while size := int(await upstream.readuntil(b"\r\n"), 16):
        yield await upstream.readexactly(size)
        await upstream.readexactly(2)
    await upstream.readuntil(b"\r\n")
