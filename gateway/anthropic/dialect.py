"""Errors in Anthropic's shape: a type that follows from the status, and a message that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.anthropic.models import is_of_anthropics_client
from gateway.dialect import Dialect
from gateway.errors import ApiError

THREAD = "thread"  # a field; clients that are told so send their turns without it, and whole
OVERLOADED = 529  # Anthropic's own; its clients have an exception for it, and try again
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def status_of(error: ApiError) -> int:
    """A full queue is not the client's doing, as a rate limit is: Anthropic tells the two apart."""
    return OVERLOADED if error.code == "overloaded" else error.status


def error_document(error: ApiError) -> dict[str, Any]:
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if error.param is not None and error.param not in message:  # this shape has no field for it
        message = f"{error.param}: {message}"
    told: dict[str, Any] = {"type": kind, "message": message}
    if error.param == THREAD:
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
    return {"type": "error", "error": told}


ANTHROPIC = Dialect(
    ("x-request-id", "request-id"),
    status_of,
    lambda error, request_id: {**error_document(error), "request_id": request_id},
)


def speaks_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Also of a path that nothing answers, so that its refusal can be read. Models are asked for at the same
    URL as OpenAI's."""
    if path == "/v1/models" or path.startswith("/v1/models/"):
        return is_of_anthropics_client(headers)
    return path == "/v1/messages" or path.startswith("/v1/messages/")
