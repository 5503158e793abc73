"""From the bytes of a request to a JSON document, within bounds."""

from __future__ import annotations

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.errors import invalid_request, too_large, unsupported_media_type

GARBLED_BODY = (HttpProcessingError, web.RequestPayloadError)
"""What aiohttp raises for a body that cannot be read as its own headers describe it."""

_DECODER = msgspec.json.Decoder()


async def read_json(request: web.Request, max_body_bytes: int) -> object:
    """The document. Raises ApiError 400, 413, or 415.

    aiohttp counts the bytes it really reads, after decompression, against the application's
    `client_max_size`, also when the client sends no Content-Length.
    """
    if request.content_type not in ("application/json", "application/octet-stream"):
        raise unsupported_media_type(request.content_type)
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large(max_body_bytes) from error
    except GARBLED_BODY as error:  # e.g. not what Content-Encoding says
        raise invalid_request("The request body cannot be read as its headers describe it.") from error
    try:
        document: object = _DECODER.decode(data)
    except RecursionError as error:
        raise invalid_request("The JSON of the request body is nested too deeply.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # lone surrogates are refused here, too
        raise invalid_request(f"The request body is not valid JSON: {error}") from error
    return document
