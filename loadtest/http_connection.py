"""HTTP/1.1 (RFC 9112) as a load generator needs it: one POST at a time on a kept connection.

Written for cost: parsing happens where the bytes arrive, with the time taken first, and no coroutine
wakes before the answer is whole. aiohttp's client costs several times as much for an answer in twenty
events, so that a generator on it measures itself at a few hundred requests per second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Protocol, cast

MAX_HEAD_BYTES = 65_536  # also of a line between chunks


class Answer(Protocol):
    """Takes what comes back, as it comes. Whatever these methods raise ends the exchange."""

    def take_head(self, status: int, headers: Mapping[bytes, bytes], now_ns: int) -> None:
        """The names are in lower case."""

    def take_body(self, piece: bytes, now_ns: int) -> None:
        """Never empty."""

    def take_end(self, now_ns: int) -> None:
        """The body is whole."""

    def fail(self, error: Exception, now_ns: int) -> None:
        """Instead of `take_end`, with what was raised or what became of the connection."""


class ProtocolError(Exception):
    """What came back is not HTTP/1.1."""


class _Expecting(Enum):
    NOTHING = auto()
    HEAD = auto()
    LENGTH = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    CLOSE = auto()


# Looked at for every chunk, where a global name costs half of an attribute.
_NOTHING, _HEAD, _LENGTH = _Expecting.NOTHING, _Expecting.HEAD, _Expecting.LENGTH
_CHUNK_SIZE, _CHUNK_DATA, _CHUNK_END = _Expecting.CHUNK_SIZE, _Expecting.CHUNK_DATA, _Expecting.CHUNK_END
_TRAILER, _CLOSE = _Expecting.TRAILER, _Expecting.CLOSE


class HttpConnection(asyncio.Protocol):
    """Owned by whoever has called `start`, until the answer's `take_end` or `fail`."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._answer: Answer | None = None
        self._expecting = _NOTHING
        self._rest = b""  # received, not yet understood
        self._num_left = 0  # bytes of the body or of the chunk
        self._is_kept = False
        self.is_open = False
        self.idle_since_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    @property
    def is_busy(self) -> bool:
        return self._answer is not None

    @property
    def is_reusable(self) -> bool:
        return self.is_open and self._is_kept and self._answer is None and not self._rest

    def start(self, request: bytes, answer: Answer) -> None:
        """Writes a whole request. What comes back goes to the answer."""
        assert self._answer is None, "the connection is busy"
        self._answer = answer
        self._expecting = _HEAD
        self._transport.write(request)

    def close(self) -> None:
        """At once; what is under way fails no answer any more."""
        self._answer = None
        self.is_open = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now_ns = self._clock_ns()
        if self._answer is None:  # nobody has asked: an early goodbye such as 408
            self.close()
            return
        try:
            self._understand(self._rest + data if self._rest else data, now_ns)
        except Exception as error:  # of the answer too: it says itself what it makes of it
            self._fail(error, now_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is None:
            return
        now_ns = self._clock_ns()
        if self._expecting is _CLOSE and exc is None:
            self._finish(now_ns)
        else:
            self._fail(exc or ConnectionResetError("the server closed the connection"), now_ns)

    def _understand(self, data: bytes, now_ns: int) -> None:
        """Reads as far as `data` goes. Keeps what is not yet whole.

        The chunks of one reading go on in one piece: they came at one time.
        """
        at = 0
        answer = self._answer
        assert answer is not None, "bytes for nobody"
        pieces: list[bytes] = []
        is_whole = False
        while at < len(data) and not is_whole:
            expecting = self._expecting
            if expecting is _CHUNK_SIZE:
                end = data.find(b"\r\n", at)
                if end < 0:
                    break
                self._num_left = _chunk_size(data[at:end])
                at = end + 2
                end = at + self._num_left
                if self._num_left and data[end : end + 2] == b"\r\n":  # the usual case: all of it is here
                    pieces.append(data[at:end])
                    at = end + 2
                else:
                    self._expecting = _CHUNK_DATA if self._num_left else _TRAILER
            elif expecting is _CHUNK_DATA or expecting is _LENGTH:
                piece = data[at : at + self._num_left]
                pieces.append(piece)
                at += len(piece)
                self._num_left -= len(piece)
                if not self._num_left:
                    is_whole = expecting is _LENGTH
                    self._expecting = _CHUNK_END
            elif expecting is _CHUNK_END:
                if len(data) - at < 2:
                    break
                if data[at : at + 2] != b"\r\n":
                    raise ProtocolError("a chunk is longer than it says")
                at += 2
                self._expecting = _CHUNK_SIZE
            elif expecting is _TRAILER:
                end = data.find(b"\r\n", at)
                if end < 0:
                    break
                is_whole = end == at  # after a line without anything
                at = end + 2
            elif expecting is _CLOSE:
                pieces.append(data[at:])
                at = len(data)
            else:
                end = data.find(b"\r\n\r\n", at)
                if end < 0:
                    break
                self._take_head(data[at:end], answer, now_ns)
                at = end + 4
                is_whole = self._expecting is _LENGTH and not self._num_left
        self._rest = data[at:]
        if pieces:
            answer.take_body(pieces[0] if len(pieces) == 1 else b"".join(pieces), now_ns)
        if is_whole:
            self._finish(now_ns)
        elif len(self._rest) > MAX_HEAD_BYTES:
            raise ProtocolError(f"no end of a line within {MAX_HEAD_BYTES} bytes")

    def _take_head(self, head: bytes, answer: Answer, now_ns: int) -> None:
        status_line, *lines = head.split(b"\r\n")
        version, status_code = status_line[:9], status_line[9:12]
        if version not in (b"HTTP/1.1 ", b"HTTP/1.0 ") or not status_code.isdigit():
            raise ProtocolError(f"not an HTTP/1.1 status line: {status_line[:80]!r}")
        status = int(status_code)
        if status < 200:  # 100, 103: the answer proper comes later
            return
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        connection = headers.get(b"connection", b"").lower()
        self._is_kept = b"close" not in connection and (
            version == b"HTTP/1.1 " or b"keep-alive" in connection
        )
        if status in (204, 304):
            self._expecting, self._num_left = _LENGTH, 0
        elif b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._expecting = _CHUNK_SIZE
        elif (length := headers.get(b"content-length")) is not None:
            if not length.isdigit():
                raise ProtocolError(f"content-length is {length[:40]!r}")
            self._expecting, self._num_left = _LENGTH, int(length)
        else:
            self._expecting, self._is_kept = _CLOSE, False
        answer.take_head(status, headers, now_ns)

    def _finish(self, now_ns: int) -> None:
        answer, self._answer = self._answer, None
        self._expecting = _NOTHING
        assert answer is not None, "an end for nobody"
        try:
            answer.take_end(now_ns)
        except Exception as error:  # as in data_received
            answer.fail(error, now_ns)

    def _fail(self, error: Exception, now_ns: int) -> None:
        answer = self._answer
        self.close()
        if answer is not None:
            answer.fail(error, now_ns)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        return int(digits, 16)
    except ValueError as error:
        raise ProtocolError(f"not the size of a chunk: {digits[:40]!r}") from error
