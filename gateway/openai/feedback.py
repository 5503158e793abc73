"""`POST /v1/feedback`: a client's score of an answer, for the experiment that the answer belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from aiohttp import web
from pydantic import Field, StringConstraints

from gateway.auth.caller import Caller
from gateway.errors import ApiError
from gateway.exchange import Exchange, exchange_of
from gateway.limits import NO_TOKENS, LimitReachedError
from gateway.openai.body import read_json
from gateway.openai.schema import check_body
from gateway.openai.strict_body import Body, Label
from gateway.openai.unknown_fields import check_without_unknown, header_value
from gateway.services import Services
from shared.config import TenantConfig


class FeedbackBody(Body):
    response_id: Annotated[str, StringConstraints(min_length=1, max_length=128)]  # the answer's `id`
    score: float = Field(ge=-1, le=1, allow_inf_nan=False)  # -1: as bad as can be, 1: as good
    comment: Label | None = None


class FeedbackEndpoint:
    """Another tenant's answer is answered for like one that never was."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def handle(self, request: web.Request) -> web.Response:
        services, exchange = self._services, exchange_of(request)
        caller = await services.authenticator.authenticate(request.headers, request.remote)
        exchange.policy = policy = services.policy.current
        tenant = policy.tenant(caller.tenant)
        document = await read_json(request, policy.options)
        ignored: tuple[str, ...] = ()
        if policy.options.unknown_fields == "ignore":
            body, ignored = check_without_unknown(FeedbackBody, document)
        else:
            body = check_body(FeedbackBody, document)
        async with self._counted(exchange, tenant, caller):
            is_known = await services.feedback.add(
                caller.tenant, body.response_id, body.score, body.comment or ""
            )
        if not is_known:
            raise ApiError(
                404,
                f"No answer with id {body.response_id!r} can be scored: there was none in the last day, or "
                "what it was asked of is no experiment.",
                kind="invalid_request_error",
                code="response_not_found",
                param="response_id",
            )
        return web.Response(
            body=msgspec.json.encode(
                {"object": "feedback", "response_id": body.response_id, "score": body.score}
            ),
            content_type="application/json",
            headers={"x-headrace-ignored": header_value(ignored)} if ignored else None,
        )

    @contextlib.asynccontextmanager
    async def _counted(self, exchange: Exchange, tenant: TenantConfig, caller: Caller) -> AsyncIterator[None]:
        """As a request without tokens, by the limits of tenant and key. Those of a route do not count: which
        one it is about, only a look into Redis tells, and that is what has to be limited.

        Raises ApiError 429 or 503."""
        limiter = self._services.limiter
        dimensions = limiter.dimensions(tenant, None, caller.key_id, caller.limits)
        try:
            reservation = await limiter.reserve(dimensions, NO_TOKENS)
        except LimitReachedError as error:
            exchange.tell_limits(error.standing_of)
            raise
        exchange.tell_limits(reservation.standings)
        try:
            yield
        finally:  # also when cancelled: it does not wait
            limiter.settle(reservation, 0, 0)
