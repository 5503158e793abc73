"""Requests at a fixed rate, each timed from when it was due, over raw sockets: a client that costs little.

A due request takes an idle connection or opens one; nothing waits for an earlier answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import uvloop


@dataclass(slots=True)
class Latencies:
    """Seconds from the due time, of answers that were whole and had status 200."""

    first_byte: list[float] = field(default_factory=list)  # of the body
    last_byte: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)  # of the client: from due to sent
    num_failed: int = 0


NUMBER_MARK = b"########"


def run(port: int, message: bytes, rate: float, seconds: float, seed: int) -> Latencies:
    """`message`: the whole request, in which NUMBER_MARK gives way to a number of its own, if it is there.
    Arrivals are Poisson."""
    return uvloop.run(_run(port, message, rate, seconds, seed))


async def _run(port: int, message: bytes, rate: float, seconds: float, seed: int) -> Latencies:
    loop = asyncio.get_running_loop()
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds))
    latencies, idle = Latencies(), []
    begin = loop.time() + 0.2
    pending: set[asyncio.Task[None]] = set()
    for number, due in enumerate(begin + np.cumsum(gaps)):
        if (wait_s := due - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(
            _ask(port, message.replace(NUMBER_MARK, b"%08d" % number), float(due), idle, latencies)
        )
        pending.add(task)
        task.add_done_callback(pending.discard)
    if pending:
        await asyncio.wait(list(pending), timeout=30)
    latencies.num_failed += len(pending)
    for connection in idle:
        connection.transport.close()
    return latencies


async def _ask(port: int, message: bytes, due: float, idle: list[_Connection], latencies: Latencies) -> None:
    loop = asyncio.get_running_loop()
    if idle:
        connection = idle.pop()
    else:
        _, connection = await loop.create_connection(lambda: _Connection(loop.time), "127.0.0.1", port)
    latencies.late.append(loop.time() - due)
    answer = connection.ask(message)
    try:
        first_byte_at, last_byte_at = await answer
    except (ConnectionError, ValueError):
        latencies.num_failed += 1
        return
    idle.append(connection)
    latencies.first_byte.append(first_byte_at - due)
    latencies.last_byte.append(last_byte_at - due)


class _Connection(asyncio.Protocol):
    """One request at a time. Its answer has a Content-Length, or chunks of which the last is empty."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._received = b""
        self._head_end = -1
        self._length: int | None = None
        self._first_byte_at = 0.0
        self._answer: asyncio.Future[tuple[float, float]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, message: bytes) -> asyncio.Future[tuple[float, float]]:
        """When the first and the last byte of the body came."""
        self._received, self._head_end, self._length, self._first_byte_at = b"", -1, None, 0.0
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._head_end < 0:
            self._read_head()
        if self._head_end < 0:
            return
        body_length = len(self._received) - self._head_end
        if body_length and not self._first_byte_at:
            self._first_byte_at = self._clock()
        is_whole = (
            self._received.endswith(b"0\r\n\r\n") if self._length is None else body_length >= self._length
        )
        if is_whole:
            self._settle(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle(exc or ConnectionResetError("closed"))

    def _read_head(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._received[:end].lower()
        if not head.startswith(b"http/1.1 200"):
            self._settle(ValueError(self._received[:500].decode(errors="replace")))
            return
        self._head_end = end + 4
        at = head.find(b"\r\ncontent-length:")
        self._length = None if at < 0 else int(head[at + 17 :].split(b"\r\n", 1)[0])

    def _settle(self, error: Exception | None) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result((self._first_byte_at, self._clock()))
        else:
            answer.set_exception(error)
