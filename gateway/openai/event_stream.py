"""Server-sent events, as the official clients read them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
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

    def __init__(self, request: web.Request, headers: Mapping[str, str], write_timeout_s: float) -> None:
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        self._request = request
        self._write_timeout_s = write_timeout_s

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Writes whole events, and waits while the client does not read: this is the back-pressure.

        Raises ConnectionResetError when the client is gone, TimeoutError when it reads nothing.
        """
        try:
            async with asyncio.timeout(self._write_timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(events)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()  # closing in order would wait for the client, too
            raise

    async def end(self, last_events: bytes) -> web.StreamResponse:
        await self.send(last_events)
        await self.response.write_eof()
        return self.response
