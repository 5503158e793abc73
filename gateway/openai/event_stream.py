"""Server-sent events, as the official clients read them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which every reader of such streams passes over
FLOWING_BYTES = 16_384  # that wait to be sent: far below the mark from which on a write waits
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies: hand every event on at once
}
_ENCODER = msgspec.json.Encoder()


def event(data: Mapping[str, Any]) -> bytes:
    """One event. JSON has no raw line breaks, so the text inside can never look like framing."""
    return b"data: " + _ENCODER.encode(data) + b"\n\n"


class EventStream:
    """The response to one request. The status line leaves with the first event, so that whatever
    fails before it is still an ordinary HTTP error."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        *,
        write_timeout_s: float,
        keep_alive_s: float,
    ) -> None:
        """`keep_alive_s`: after so long without an event a comment is sent; 0: never."""
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s
        self._is_open = False
        self._turn = asyncio.Lock()  # of what waits: events come in one piece, the head before them
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Writes whole events, and waits while the client does not read: this is the back-pressure.

        Raises ConnectionResetError when the client is gone, TimeoutError when it reads nothing.
        """
        self._sent_at = self._clock()
        transport = self._request.transport
        num_unsent = FLOWING_BYTES if transport is None else transport.get_write_buffer_size()
        if self._is_open and num_unsent + len(events) < FLOWING_BYTES:
            await self.response.write(events)  # does not wait: a timer would cost as much as the write
            return
        try:
            async with asyncio.timeout(self._write_timeout_s), self._turn:
                if not self._is_open:
                    await self.response.prepare(self._request)
                    self._is_open = True
                await self.response.write(events)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()  # closing in order would wait for the client, too
            raise

    async def end(self, last_events: bytes) -> web.StreamResponse:
        await self.send(last_events)
        await self.response.write_eof()
        return self.response

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """While events may be long in coming: proxies and clients cut connections that are silent."""
        if self._keep_alive_s <= 0:
            yield
            return
        task = asyncio.create_task(self._comment_when_silent())
        try:
            yield
        finally:
            task.cancel()

    async def _comment_when_silent(self) -> None:
        with contextlib.suppress(ConnectionResetError, TimeoutError):  # the next event meets them, too
            while True:
                silent_s = self._clock() - self._sent_at
                if silent_s < self._keep_alive_s:
                    await asyncio.sleep(self._keep_alive_s - silent_s)
                else:
                    await self.send(KEEP_ALIVE)
