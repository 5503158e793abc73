"""Answers of HTTP/1.1, cut at any byte, and what is none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from loadtest.http_connection import HttpConnection, ProtocolError

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;name=value\r\n, world\r\n1A\r\nabcdefghijklmnopqrstuvwxyz\r\n"
    b"0\r\nX-Trailer: 1\r\n\r\n"
)
WITH_LENGTH = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nX-Request-Id: r7\r\n\r\nnope"
EMPTY = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nConnection: close\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nall of it"


class Pipe(asyncio.Transport):
    """The other end of a connection: what was written, and whether it was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.is_aborted = True


class Taken:
    """An answer that only writes down what it is given."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.body = b""
        self.times: list[int] = []
        self.ended_at: int | None = None
        self.error: Exception | None = None

    def take_head(self, status: int, headers: Mapping[bytes, bytes], now_ns: int) -> None:
        self.status, self.headers = status, headers

    def take_body(self, piece: bytes, now_ns: int) -> None:
        assert piece
        self.body += piece
        self.times.append(now_ns)

    def take_end(self, now_ns: int) -> None:
        self.ended_at = now_ns

    def fail(self, error: Exception, now_ns: int) -> None:
        self.error = error


class Exchange:
    def __init__(self) -> None:
        self.now = 0
        self.pipe = Pipe()
        self.connection = HttpConnection(lambda: self.now)
        self.connection.connection_made(self.pipe)

    def ask(self) -> Taken:
        taken = Taken()
        self.connection.start(b"POST / HTTP/1.1\r\n\r\n", taken)
        return taken

    def arrive(self, data: bytes) -> None:
        self.now += 1
        self.connection.data_received(data)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 10_000])
@pytest.mark.parametrize(
    ("answer", "status", "body", "is_kept"),
    [
        (CHUNKED, 200, b"hello, worldabcdefghijklmnopqrstuvwxyz", True),
        (WITH_LENGTH, 404, b"nope", True),
        (EMPTY, 503, b"", False),
    ],
)
def test_answer_is_the_same_however_its_bytes_arrive(
    size: int, answer: bytes, status: int, body: bytes, is_kept: bool
) -> None:
    exchange = Exchange()
    taken = exchange.ask()
    for start in range(0, len(answer), size):
        exchange.arrive(answer[start : start + size])
    assert (taken.status, taken.body, taken.error) == (status, body, None)
    assert taken.ended_at == exchange.now  # with the last byte, not before and not after
    assert exchange.connection.is_reusable is is_kept


def test_kept_connection_takes_one_request_after_another() -> None:
    exchange = Exchange()
    for answer in (CHUNKED, WITH_LENGTH, CHUNKED):
        taken = exchange.ask()
        exchange.arrive(answer)
        assert taken.ended_at is not None
    assert exchange.pipe.written.count(b"POST") == 3
    assert taken.headers[b"content-type"] == b"text/event-stream"


def test_chunks_of_one_reading_have_its_time_and_later_ones_theirs() -> None:
    exchange = Exchange()
    taken = exchange.ask()
    head, _, rest = CHUNKED.partition(b"7;name")
    exchange.arrive(head)
    exchange.arrive(b"7;name" + rest)
    assert taken.times == [1, 2]


def test_body_without_a_length_ends_with_the_connection() -> None:
    exchange = Exchange()
    taken = exchange.ask()
    exchange.arrive(UNTIL_CLOSE)
    assert taken.ended_at is None
    exchange.connection.connection_lost(None)
    assert (taken.body, taken.error) == (b"all of it", None)
    assert taken.ended_at is not None
    assert not exchange.connection.is_reusable


def test_connection_lost_inside_an_answer_fails_it() -> None:
    exchange = Exchange()
    taken = exchange.ask()
    exchange.arrive(CHUNKED[:-20])
    exchange.connection.connection_lost(None)
    assert isinstance(taken.error, ConnectionResetError)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000,
    ],
)
def test_what_is_not_http_fails_the_request_and_gives_up_the_connection(answer: bytes) -> None:
    exchange = Exchange()
    taken = exchange.ask()
    exchange.arrive(answer)
    assert isinstance(taken.error, ProtocolError)
    assert exchange.pipe.is_aborted
    assert not exchange.connection.is_open


def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    exchange = Exchange()
    exchange.ask()
    exchange.arrive(WITH_LENGTH)
    exchange.arrive(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert not exchange.connection.is_open


def test_answer_that_raises_is_told_so_and_loses_its_connection() -> None:
    class Picky(Taken):
        def take_body(self, piece: bytes, now_ns: int) -> None:
            raise LookupError("not what I want")

    exchange = Exchange()
    taken = Picky()
    exchange.connection.start(b"", taken)
    exchange.arrive(CHUNKED)
    assert isinstance(taken.error, LookupError)
    assert taken.ended_at is None
    assert not exchange.connection.is_open
