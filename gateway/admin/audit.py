"""`GET /admin/audit`: who changed what, the latest first."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from gateway.admin.access import AdminAccess, answer
from gateway.admin.query import number_in
from gateway.breaker import RedisUnavailableError
from gateway.errors import invalid_request, unavailable
from gateway.services import Services
from shared.audit import AUDIT_FIELD, AuditRecord
from shared.redis_schema import RedisKeys

logger = logging.getLogger(__name__)

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


class AuditEndpoint:
    def __init__(self, services: Services, access: AdminAccess) -> None:
        self._services = services
        self._access = access
        self._key = RedisKeys(services.config.redis.namespace).audit

    async def list(self, request: web.Request) -> web.Response:
        """`since`: unix seconds; `before`: the id of a record, only those before it; `limit`."""
        self._access.check(request)
        since_s = number_in(request, "since", 0, 10**11) or 0
        limit = number_in(request, "limit", 1, MAX_LIMIT) or DEFAULT_LIMIT
        before = request.query.get("before")
        if before is not None and not _is_record_id(before):
            raise invalid_request("before must be the id of a record.", "before", "invalid_value")
        try:
            entries: Any = await self._services.breaker.call(
                lambda: self._services.redis.xrevrange(
                    self._key,
                    max="+" if before is None else f"({before}",
                    min=since_s * 1000,
                    count=limit + 1,
                )
            )
        except RedisUnavailableError as error:
            raise unavailable("The audit cannot be read at the moment.", 1.0) from error
        told = [_told(entry_id.decode(), fields) for entry_id, fields in entries[:limit]]
        return answer({"object": "list", "data": told, "has_more": len(entries) > limit})


def _told(entry_id: str, fields: dict[bytes, bytes]) -> dict[str, Any]:
    """What cannot be read is told, too: an audit has no gaps."""
    told: dict[str, Any] = {"id": entry_id, "time": int(entry_id.partition("-")[0]) / 1000}
    try:
        record = msgspec.json.decode(fields.get(AUDIT_FIELD, b""), type=AuditRecord)
    except msgspec.DecodeError as error:
        logger.error("the audit record %s cannot be read: %s", entry_id, error)
        record = AuditRecord(change_id="", actor="", action="unreadable", object="")
    return told | {
        "actor": record.actor,
        "action": record.action,
        "object": record.object,
        "version_before": record.version_before,
        "version_after": record.version_after,
        "change": record.change,
    }


def _is_record_id(text: str) -> bool:
    milliseconds, dash, number = text.partition("-")
    parts = (milliseconds, number) if dash else (milliseconds,)
    return all(part.isascii() and part.isdecimal() and len(part) <= 19 for part in parts)
