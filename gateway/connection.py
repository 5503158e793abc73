"""One connection of a client: aiohttp's, which also refuses what is no HTTP in the shape of all refusals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong
from aiohttp.streams import StreamReader

from gateway.dialect import OPENAI
from gateway.errors import ApiError, from_http_exception, internal_error, not_http
from gateway.exchange import fresh_exchange_id

logger = logging.getLogger(__name__)

KEEPALIVE_TIMEOUT_S = 75.0
# The parser tells what was too long by its limit alone: these two must differ.
MAX_URL_BYTES = 4096
MAX_HEADER_BYTES = 8190  # name and value together
MAX_HEADERS = 128
LINGER_S = 1.0


class Connection(web.RequestHandler):
    """Give it the server of an AppRunner, which then counts it among its connections and ends it.

    What cannot be parsed ends the connection, since nobody knows where the next request would begin: an
    answer that says so is its last one, and nothing behind it is read as a request.
    """

    __slots__ = ("_is_broken", "_last_body", "_on_refusal")

    def __init__(self, server: web.Server, on_refusal: Callable[[int], None], **options: Any) -> None:
        """`on_refusal` is called with the status of what no handler got to see."""
        no_access_log: Any = None  # which aiohttp allows for, unlike its annotation
        super().__init__(
            server,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            max_line_size=MAX_URL_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,  # see openai/content_encoding.py
            access_log=no_access_log,
            **options,
        )
        self._on_refusal = on_refusal
        self._is_broken = False
        self._last_body: StreamReader | None = None  # of the request that was begun last

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return  # what comes behind a broken request must not be taken for another one
        super().data_received(data)
        if not self._messages:  # aiohttp's queue of what it has parsed; nobody has taken from it yet
            return
        last, body = self._messages[-1]
        if isinstance(last, RawRequestMessage):
            self._last_body = body
            return
        self._is_broken = True
        if self._last_body is not None and not self._last_body.is_eof():
            # The fault lies in a body that a handler may wait for; aiohttp would let it wait.
            self._last_body.set_exception(web.RequestPayloadError(str(last.exc)))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what no handler sees, or could answer. aiohttp calls it."""
        if isinstance(exc, HttpProcessingError):
            logger.debug("what %s sent is no HTTP", request.remote, exc_info=exc)
            return self._refusal(_refusal_of(exc))
        logger.error("a request of %s failed outside of its handler", request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is on its way: there cannot be another one")
        return self._refusal(internal_error())

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before any handler, as for an `Expect` of nonsense
            resp = self._refusal(from_http_exception(resp))
        elif request.content.exception() is not None and not resp.prepared:
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if self._is_broken and not resp.keep_alive:
            await self._linger()
        return finished

    def _refusal(self, error: ApiError) -> web.Response:
        self._on_refusal(error.status)
        response = OPENAI.refusal(error, fresh_exchange_id())
        response.force_close()
        response.headers["Connection"] = "close"  # aiohttp leaves it away where it takes HTTP/1.0 for granted
        return response

    async def _linger(self) -> None:
        """Lets the client read while it may still send: a close at once would make its kernel throw the
        answer away (RFC 9112, 9.6). When the client closes, its handler is cancelled, and so is this."""
        if self.transport is not None and self.transport.can_write_eof():
            self.transport.write_eof()
            await asyncio.sleep(LINGER_S)


def _refusal_of(error: HttpProcessingError) -> ApiError:
    if isinstance(error, LineTooLong):
        _, limit, _ = error.args
        if limit == MAX_URL_BYTES:
            return not_http(414, f"The URL is longer than {limit} bytes.", "url_too_long")
        return not_http(431, f"A header is longer than {limit} bytes.", "headers_too_large")
    if error.message.startswith("Too many headers"):
        return not_http(431, f"The request has more than {MAX_HEADERS} headers.", "headers_too_large")
    if isinstance(error, InvalidURLError):
        return not_http(400, "The URL of the request is not valid.", "invalid_http")
    # The parser's words come first, then the line that it stands at, with what the client sent.
    lines = [line.strip().rstrip(":.") for line in error.message.splitlines()]
    reason = next((line for line in lines if line not in ("", "Bad status line")), "it cannot be parsed")
    return not_http(400, f"The request is not valid HTTP: {reason[:200]}.", "invalid_http")
