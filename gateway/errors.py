"""What a client is told when something goes wrong, in OpenAI's error shape."""

from __future__ import annotations

import math
from typing import Any

from aiohttp import web

from shared.errors import UserError
from shared.messages import Reject


class ApiError(Exception):
    """An answer that is an error.

    `retry_after_s` is set exactly when trying again later can help; the official clients read both
    headers that follow from it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self._extra_headers = headers or {}

    @property
    def extra_headers(self) -> dict[str, str]:
        """Beside those that tell whether to try again."""
        return dict(self._extra_headers)

    def add_headers(self, headers: dict[str, str]) -> None:
        self._extra_headers = {**self._extra_headers, **headers}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {"x-should-retry": "false", **self._extra_headers}
        # Whole seconds, rounded up: a client that obeys must not come a moment too early.
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s))), **self._extra_headers}


class EngineFailedError(ApiError):
    """The fault is that of an engine, or that there is none: another model may answer the same request."""


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, kind="invalid_request_error", code=code, param=param)


def from_user_error(error: UserError) -> ApiError:
    return invalid_request(error.message, error.param, None if error.param is None else "invalid_value")


def context_length_exceeded(message: str, param: str) -> ApiError:
    return invalid_request(message, param, "context_length_exceeded")


def invalid_api_key(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def permission_denied(message: str, param: str | None = None) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="permission_denied", param=param)


def model_not_found(name: str) -> ApiError:
    return ApiError(
        404,
        f"The model {name!r} does not exist.",
        kind="invalid_request_error",
        code="model_not_found",
        param="model",
    )


def too_large(max_body_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {max_body_bytes} bytes.",
        kind="invalid_request_error",
        code="request_too_large",
    )


def body_timed_out(timeout_s: float) -> ApiError:
    return ApiError(
        408,
        f"The request body did not arrive within {timeout_s:g} seconds.",
        kind="invalid_request_error",
        code="timeout",
        retry_after_s=1.0,
    )


def unsupported_media_type(message: str, headers: dict[str, str] | None = None) -> ApiError:
    return ApiError(
        415, message, kind="invalid_request_error", code="unsupported_media_type", headers=headers
    )


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s
    )


def overloaded(message: str) -> EngineFailedError:
    """By the queue of an engine."""
    return EngineFailedError(429, message, kind="rate_limit_error", code="overloaded", retry_after_s=1.0)


def upstream_error(message: str) -> EngineFailedError:
    return EngineFailedError(502, message, kind="api_error", code="upstream_error", retry_after_s=1.0)


def interrupted(cause: Exception, *, by_a_step: bool) -> ApiError:
    """An engine was lost. `by_a_step`: one of its steps failed, so whatever was in it may end the next one,
    too, and no other model is to try it."""
    kind = ApiError if by_a_step else EngineFailedError
    message = f"The request was interrupted: {cause}."
    return kind(502, message, kind="api_error", code="upstream_error", retry_after_s=1.0)


def unavailable(message: str, retry_after_s: float = 2.0) -> ApiError:
    return ApiError(503, message, kind="api_error", code="unavailable", retry_after_s=retry_after_s)


def no_engine(model: str) -> EngineFailedError:
    message = f"No engine is ready for the model {model!r}."
    return EngineFailedError(503, message, kind="api_error", code="unavailable", retry_after_s=2.0)


def timed_out(message: str) -> EngineFailedError:
    return EngineFailedError(504, message, kind="api_error", code="timeout", retry_after_s=1.0)


def internal_error() -> ApiError:
    return ApiError(500, "The server had an error.", kind="api_error", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of it: of what is no answer, that the fault is ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return from_user_error(error)
    if isinstance(error, web.HTTPException):
        return from_http_exception(error)
    return internal_error()


def not_http(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, kind="invalid_request_error", code=code)


def from_http_exception(error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals: no such route, wrong method, an `Expect` that nobody can meet."""
    code = {
        404: "not_found",
        405: "method_not_allowed",
        413: "request_too_large",
        417: "expectation_failed",
    }.get(error.status)
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return ApiError(
        error.status,
        {
            404: "There is no such URL.",
            405: "This URL does not take that method.",
            417: "The only expectation that can be met is 'Expect: 100-continue'.",
        }.get(error.status, error.reason),
        kind="invalid_request_error" if error.status < 500 else "api_error",
        code=code,
        headers=headers,
    )


def from_reject(reject: Reject, param: str = "prompt") -> ApiError:
    """An engine's no. `param`: the field that holds what was too long, if the engine does not name it."""
    match reject.code:
        case "queue_full":
            return overloaded(reject.message)
        case "invalid_request":
            return invalid_request(reject.message, reject.param)
        case "context_length_exceeded":
            return context_length_exceeded(reject.message, reject.param or param)
        case "draining":
            return EngineFailedError(
                503, reject.message, kind="api_error", code="unavailable", retry_after_s=2.0
            )
        case "internal_error":
            return upstream_error(reject.message)
        case "timed_out":
            return timed_out(reject.message)
