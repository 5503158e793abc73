"""What a client thinks of an answer."""

from __future__ import annotations

from typing import Literal

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED


@with_config(CLOSED)
class Feedback(TypedDict):
    object: Literal["feedback"]
    response_id: str
    score: float
