"""Who may use `/admin`, and how its answers look."""

from __future__ import annotations

import hmac
import logging
import time
from typing import Any

import msgspec
from aiohttp import web

from gateway.errors import invalid_api_key, invalid_request
from gateway.services import Services
from shared.audit import bounded_actor

logger = logging.getLogger(__name__)

ACTOR_HEADER = "x-headrace-actor"
UNNAMED_ACTOR = "admin token"
LOG_INTERVAL_S = 10.0


class AdminAccess:
    """Checks the token, and counts who comes with a wrong one."""

    def __init__(self, services: Services) -> None:
        self._token = services.admin_token.encode()
        self._refusals = services.metrics.admin_refusals
        self._num_unlogged = 0
        self._logged_at = float("-inf")

    def check(self, request: web.Request) -> None:
        """Raises ApiError 401."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        is_right = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)
        if not is_right or not self._token:
            self._count_refusal(request)
            raise invalid_api_key("The admin token is missing or wrong.")

    def _count_refusal(self, request: web.Request) -> None:
        """In the log at most once in a while: whoever guesses must not fill the disk."""
        self._refusals.inc()
        self._num_unlogged += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            logger.warning(
                "%d requests to /admin with a wrong token or none, the last one from %s",
                self._num_unlogged,
                request.remote,
            )
            self._num_unlogged, self._logged_at = 0, now


def actor_of(request: web.Request) -> str:
    """As it says of itself: for the audit, not for any decision."""
    return bounded_actor(request.headers.get(ACTOR_HEADER, ""), UNNAMED_ACTOR)


def expected_version_of(request: web.Request) -> int | None:
    """What `If-Match` wants the policy's version to be. Raises ApiError 400 for what is none."""
    given = request.headers.get("If-Match")
    if given is None or given.strip() == "*":
        return None
    text = given.strip().removeprefix("W/").strip('"')
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise invalid_request(
            'If-Match must be a version of the policy, such as "7".', "If-Match", "invalid_value"
        )
    return int(text)


def answer(document: dict[str, Any], *, status: int = 200, version: int | None = None) -> web.Response:
    """`version`: of the policy, which becomes the entity tag."""
    response = web.Response(
        status=status, body=msgspec.json.encode(document), content_type="application/json"
    )
    if version is not None:
        response.headers["ETag"] = f'"{version}"'
    return response
