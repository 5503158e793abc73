"""From the bytes of a request to a JSON document, within bounds."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec
from aiohttp import web

from gateway.errors import ApiError, body_timed_out, invalid_request, too_large, unsupported_media_type
from gateway.openai.content_encoding import check_encoding, decoded
from shared.config import GatewayConfig

_DECODER = msgspec.json.Decoder()


async def read_json(request: web.Request, config: GatewayConfig) -> object:
    """The document. Raises ApiError 400, 408, 413, or 415.

    aiohttp counts the bytes it really reads against the application's `client_max_size`, also when the
    client sends no Content-Length.
    """
    if request.content_type not in ("application/json", "application/octet-stream"):
        raise unsupported_media_type(f"Content-Type must be application/json, not {request.content_type}.")
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    check_encoding(encoding)
    if (request.content_length or 0) > config.max_body_bytes:
        raise too_large(config.max_body_bytes)  # without waiting for it to arrive
    try:
        if request.content.is_eof():  # all of it came with its headers
            data = await request.read()
        else:
            async with asyncio.timeout(config.body_timeout_s):
                data = await request.read()
    except TimeoutError as error:
        raise body_timed_out(config.body_timeout_s) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large(config.max_body_bytes) from error
    except web.RequestPayloadError as error:  # e.g. a chunk of no size, see gateway/connection.py
        raise invalid_request("The request body cannot be read as its headers describe it.") from error
    data = await decoded(data, encoding, config.max_body_bytes)
    try:
        document: object = _DECODER.decode(data)
    except RecursionError as error:
        raise invalid_request("The JSON of the request body is nested too deeply.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refusal(data, error) from error
    return document


def _refusal(data: bytes, error: Exception) -> ApiError:
    """Why the strict decoder refused it: with the field named, if a laxer one can read it at all."""
    try:
        document = json.loads(data, parse_int=float)
    except (ValueError, RecursionError):
        return invalid_request(f"The request body is not valid JSON: {error}")
    for path, value in _leaves(document, ""):
        problem = None
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            problem = "the text holds half of a surrogate pair"
        elif isinstance(value, float) and not math.isfinite(value):
            problem = "the number is out of range"
        if problem is not None:
            param = _ascii(path)
            return invalid_request(f"Invalid value for {param}: {problem}.", param, "invalid_value")
    return invalid_request(f"The request body is not valid JSON: {error}")


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    """Every string and number of a document with its path, e.g. `messages[0].content`; keys count, too."""
    found: list[tuple[str, Any]] = []
    pending = [(path, value)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            found += [(path or "body", key) for key in value]
            pending += [(f"{path}.{key}".lstrip("."), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
        else:
            found.append((path, value))
    return found


def _ascii(param: str) -> str:
    """A path may hold the very characters that cannot be sent."""
    return param.encode("ascii", "backslashreplace").decode()[:200]
