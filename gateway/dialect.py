"""How the clients of a route expect to be refused, and to be told the id of their request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class Dialect:
    id_headers: tuple[str, ...]  # each of them carries the id
    status_of: Callable[[ApiError], int]
    body_of: Callable[[ApiError, str], dict[str, Any]]  # the second one is the id


OPENAI = Dialect(("x-request-id",), lambda error: error.status, lambda error, _request_id: error.body)
