"""A server with a planted fault: a relay in front of a right one, which changes what goes through it.

It relays bytes of connections, not requests, so that whatever a fault does not touch stays exactly as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
# Also behind a body of JSON, which ends without a line break.
_REQUEST_LINE = re.compile(rb"([A-Z]+) (\S+) HTTP/1")
_LENGTH = re.compile(rb"^content-length: *(\d+)", re.MULTILINE | re.IGNORECASE)
Memory = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as it has come."""

    method: str
    path: str  # with its query
    head: bytes  # in lower case
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """{} where the body is no object."""
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}


@dataclass(slots=True)
class RelayedAnswer:
    """The head of an answer, and its body unless it is a stream."""

    asked: Asked
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes = b""

    @property
    def is_stream(self) -> bool:
        return "event-stream" in self.headers.get("content-type", "")


class Fault:
    """Changes nothing. One object for each connection, so that it may remember."""

    def __init__(self, memory: Memory) -> None:
        """`memory`: of the server, for all connections."""
        self.memory = memory
        self.requests = bytearray()  # all that the client has sent so far
        self.has_ended = False  # nothing more comes from the client
        self.answered: RelayedAnswer | None = None  # the newest

    def request(self, data: bytes) -> bytes:
        """What goes on to the right server of what has come; b"" to wait for more."""
        return data

    def answer(self, answer: RelayedAnswer) -> None:
        """Changes a whole answer, or the head of a stream, in place."""

    def event(self, event: bytes) -> bytes:
        """An event of a stream, with the empty line that ends it; b"" leaves it out."""
        return event

    def stream_end(self) -> bytes:
        """What comes behind the last event."""
        return b""

    def end_of_requests(self) -> None:
        """Nothing more comes from the client: it has left, or waits for the last answer."""
        self.has_ended = True

    def ends_connection(self) -> bool:
        """After this answer, whatever the client wants."""
        return False

    def keeps_connection(self) -> bool:
        """Though the right server has closed it."""
        return False

    def is_silent(self) -> bool:
        """The answer never comes."""
        return False


MakeFault = Callable[[Memory], Fault]


@asynccontextmanager
async def wrong_server(url: str, make_fault: MakeFault) -> AsyncIterator[str]:
    """The URL of a relay to the right server at `url`."""
    upstream = urlsplit(url)
    running: set[asyncio.Task[None]] = set()
    memory: Memory = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs this in a task"
        running.add(task)
        task.add_done_callback(running.discard)
        up_reader, up_writer = await asyncio.open_connection(upstream.hostname, upstream.port)
        fault = make_fault(memory)
        requests = asyncio.create_task(_relay_requests(reader, up_writer, fault))
        try:
            await _relay_answers(up_reader, writer, fault)
            if fault.keeps_connection():
                await asyncio.Event().wait()
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
    fault.end_of_requests()
    with contextlib.suppress(OSError):
        upstream.write_eof()


async def _relay_answers(upstream: asyncio.StreamReader, client: asyncio.StreamWriter, fault: Fault) -> None:
    num_answers = 0
    while True:
        try:
            head = await upstream.readuntil(HEAD_END)
        except asyncio.IncompleteReadError:
            return
        if fault.is_silent():
            await asyncio.Event().wait()
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines]
        answer = RelayedAnswer(
            _request_of(bytes(fault.requests), num_answers),
            int(first.split()[1]),
            {name.lower(): value.strip() for name, _, value in pairs},
        )
        is_chunked = "chunked" in answer.headers.get("transfer-encoding", "")
        if answer.status != 100 and answer.asked.method != "HEAD" and not answer.is_stream:
            answer.body = await upstream.readexactly(int(answer.headers.get("content-length", "0")))
        had_body = bool(answer.body)
        was_stream = answer.is_stream
        fault.answered = answer
        fault.answer(answer)
        is_cut = was_stream and bool(answer.body)  # it has become a whole answer
        if answer.body or had_body:
            answer.headers.pop("transfer-encoding", None)
            answer.headers["content-length"] = str(len(answer.body))
        version = first.split()[0]
        client.write(f"{version} {answer.status} Relayed\r\n".encode())
        for name, value in answer.headers.items():
            client.write(f"{name}: {value}\r\n".encode("latin-1"))
        client.write(b"\r\n" + answer.body)
        if answer.status == 100:
            continue
        num_answers += 1
        if was_stream and not is_cut:
            await _relay_stream(upstream, client, fault, is_chunked=is_chunked)
        await client.drain()
        closes = answer.headers.get("connection", "").lower() == "close" or (was_stream and not is_chunked)
        if closes or is_cut or fault.ends_connection():
            return


def _request_of(sent: bytes, number: int) -> Asked:
    """Of a connection, counted from 0; the last one if they cannot be told apart."""
    while number and (length := _length_of_request(sent)) is not None and length < len(sent):
        sent, number = sent[length:], number - 1
    found = _REQUEST_LINE.match(sent)
    if found is None:
        return Asked("", "", b"", sent)
    head, _, body = sent[: _length_of_request(sent)].partition(HEAD_END)
    return Asked(found[1].decode(), found[2].decode("latin-1"), head.lower(), body)


def _length_of_request(sent: bytes) -> int | None:
    """Of the first one. None: it does not say so, or in more than one way."""
    head, _, _ = sent.partition(HEAD_END)
    lengths = _LENGTH.findall(head)
    if len(lengths) > 1 or b"transfer-encoding" in head.lower():
        return None
    return len(head) + len(HEAD_END) + (int(lengths[0]) if lengths else 0)


async def _relay_stream(
    upstream: asyncio.StreamReader, client: asyncio.StreamWriter, fault: Fault, *, is_chunked: bool
) -> None:
    def write(data: bytes) -> None:
        if data:
            client.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    waiting = b""
    async for piece in _pieces(upstream, is_chunked=is_chunked):
        *events, waiting = re.split(rb"(?<=\n\n)", waiting + piece)
        for event in events:
            write(fault.event(event))
        await client.drain()
    write(fault.stream_end())
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
