"""How the clients of a route expect to be refused, and to be told the id of their request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class Dialect:
    id_headers: tuple[str, ...]  # each of them carries the id
    status_of: Callable[[ApiError], int]
    body_of: Callable[[ApiError, str], dict[str, Any]]  # the second one is the id

    def refusal(self, error: ApiError, request_id: str) -> web.Response:
        return web.Response(
            status=self.status_of(error),
            body=msgspec.json.encode(self.body_of(error, request_id)),
            content_type="application/json",
            headers={**error.headers, **dict.fromkeys(self.id_headers, request_id)},
        )


OPENAI = Dialect(("x-request-id",), lambda error: error.status, lambda error, _request_id: error.body)
