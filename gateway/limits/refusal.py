"""How a request is refused that a limit does not let in."""

from __future__ import annotations

from gateway.errors import ApiError, invalid_request
from gateway.limits.dimensions import Bound, Dimension, Kind
from gateway.limits.headers import LIMIT_HEADER, Standing

INSUFFICIENT_QUOTA = "insufficient_quota"


class LimitReachedError(ApiError):
    """429, and where its limits stand."""

    def __init__(
        self,
        message: str,
        dimension: Dimension,
        standing_of: dict[str, Standing],
        *,
        code: str,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(
            429,
            message,
            kind=INSUFFICIENT_QUOTA if code == INSUFFICIENT_QUOTA else "rate_limit_error",
            code=code,
            retry_after_s=retry_after_s,
            headers={LIMIT_HEADER: dimension.reason},
        )
        self.standing_of = standing_of


def refusal(
    dimension: Dimension, wait_s: float | None, standing_of: dict[str, Standing]
) -> LimitReachedError:
    """`wait_s`: None: a request of this size is never let in."""
    if wait_s is None:
        return LimitReachedError(
            f"This request is larger than the limit of {dimension.text} ever lets in.",
            dimension,
            standing_of,
            code="request_too_large_for_limit",
        )
    message = f"The limit of {dimension.text} is reached."
    if dimension.kind is Kind.DAY:  # until midnight: nothing that a client should wait for by itself
        message += " It begins anew at midnight, UTC."
        return LimitReachedError(message, dimension, standing_of, code=INSUFFICIENT_QUOTA)
    return LimitReachedError(
        message, dimension, standing_of, code="rate_limit_exceeded", retry_after_s=wait_s
    )


def prompt_too_long(num_tokens: int, bound: Bound, param: str) -> ApiError:
    error = invalid_request(
        f"This prompt has {num_tokens} tokens, but you may send {bound.num_tokens} at most.",
        param,
        "max_prompt_tokens_exceeded",
    )
    error.add_headers({LIMIT_HEADER: bound.reason})
    return error


def output_too_long(num_tokens: int, bound: Bound, param: str) -> ApiError:
    error = invalid_request(
        f"{param} is {num_tokens}, but you may ask for {bound.num_tokens} tokens at most.",
        param,
        "max_output_tokens_exceeded",
    )
    error.add_headers({LIMIT_HEADER: bound.reason})
    return error
