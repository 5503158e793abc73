"""`/v1/responses/{id}`: what was stored, to its own tenant."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from gateway.errors import ApiError, invalid_request
from gateway.services import Services
from shared.identifiers import TenantId
from shared.redis_schema import ResponseRecord

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


class StoredResponsesEndpoint:
    """Another tenant's response is answered for like one that never was."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def get(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "false") != "false" or "starting_after" in request.query:
            param = "stream" if "stream" in request.query else "starting_after"
            raise invalid_request(
                "A stored response is not streamed: it is complete, and comes as a whole.",
                param,
                "invalid_value",
            )
        return _json((await self._record(request, await self._tenant(request))).response)

    async def delete(self, request: web.Request) -> web.Response:
        response_id, tenant = request.match_info["response_id"], await self._tenant(request)
        if not await self._services.responses.delete(tenant, response_id):
            raise _not_found(response_id)
        self._services.background_responses.cancel(tenant, response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: web.Request) -> web.Response:
        """What has ended stays as it is, and is told: so whoever cancels twice is told the same twice."""
        tenant = await self._tenant(request)
        record = await self._record(request, tenant)
        response = record.response
        if not response["background"]:
            raise invalid_request("Only responses that run in the background can be cancelled.")
        if response["status"] not in ("queued", "in_progress"):
            return _json(response)
        cancelled = {**response, "status": "cancelled"}
        if await self._services.responses.end(tenant, ResponseRecord(cancelled, record.input_items)):
            self._services.background_responses.cancel(tenant, response["id"])
            return _json(cancelled)
        return _json((await self._record(request, tenant)).response)  # it has ended in the meantime

    async def input_items(self, request: web.Request) -> web.Response:
        """Newest first unless asked otherwise: all that it was made from, earlier turns included."""
        limit = _limit_of(request)
        order = request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid_request("Invalid value for order: 'asc' or 'desc'", "order", "invalid_value")
        items = (await self._record(request, await self._tenant(request))).input_items
        if order == "desc":
            items = items[::-1]
        if (after := request.query.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise invalid_request("Invalid value for after: no such item", "after", "invalid_value")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        return _json(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }
        )

    async def _record(self, request: web.Request, tenant: TenantId) -> ResponseRecord:
        response_id = request.match_info["response_id"]
        record = await self._services.responses.get(tenant, response_id)
        if record is None:
            raise _not_found(response_id)
        return record

    async def _tenant(self, request: web.Request) -> TenantId:
        key = await self._services.authenticator.authenticate(request.headers, request.remote)
        self._services.policy.current.tenant(key.tenant)  # which has to exist still
        return key.tenant


def _limit_of(request: web.Request) -> int:
    text = request.query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LIMIT):
        raise invalid_request(
            f"Invalid value for limit: a number from 1 to {MAX_LIMIT}", "limit", "invalid_value"
        )
    return int(text)


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"Response with id {response_id[:128]!r} not found.",
        kind="invalid_request_error",
        code="response_not_found",
    )


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
