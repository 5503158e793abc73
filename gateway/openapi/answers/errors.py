"""What is refused, in OpenAI's shape."""

from __future__ import annotations

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED


@with_config(CLOSED)
class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None  # the field that is wrong, e.g. `messages[0].content`
    code: str | None


@with_config(CLOSED)
class ErrorAnswer(TypedDict):
    error: ErrorDetails
