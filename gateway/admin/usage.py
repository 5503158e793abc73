"""`GET /admin/usage`: requests and tokens, summed by tenant, model, day …"""

from __future__ import annotations

from aiohttp import web

from gateway.admin.access import AdminAccess, answer
from gateway.admin.query import flag_in, number_in
from gateway.errors import invalid_request, unavailable
from gateway.services import Services
from gateway.usage.reader import UsageUnreadableError
from shared.usage_database import GROUPINGS, UsageFilter

DEFAULT_GROUPS = "tenant,model"
MAX_SECONDS = 10**11


class UsageEndpoint:
    def __init__(self, services: Services, access: AdminAccess) -> None:
        self._services = services
        self._access = access

    async def sums(self, request: web.Request) -> web.Response:
        """`since`, `until`: unix seconds; `tenant`, `route`, `key`; `with_shadow`; `by`, with commas."""
        self._access.check(request)
        wanted, groups = _filter_of(request), _groups_of(request)
        try:
            found = await self._services.usage_reader.sums(wanted, groups)
        except UsageUnreadableError as error:
            raise unavailable(f"Usage cannot be read at the moment: {error}.", 1.0) from error
        return answer(
            {
                "object": "list",
                "data": found.rows,
                "incomplete_until": found.incomplete_until,
                "num_left_out": found.num_left_out,
            }
        )


def _filter_of(request: web.Request) -> UsageFilter:
    """Raises ApiError 400."""
    return UsageFilter(
        since=number_in(request, "since", 0, MAX_SECONDS),
        until=number_in(request, "until", 0, MAX_SECONDS),
        tenant=request.query.get("tenant"),
        route=request.query.get("route"),
        key=request.query.get("key"),
        with_shadow=flag_in(request, "with_shadow"),
    )


def _groups_of(request: web.Request) -> list[str]:
    """Raises ApiError 400."""
    names = [name for name in request.query.get("by", DEFAULT_GROUPS).split(",") if name]
    for name in names:
        if name not in GROUPINGS:
            raise invalid_request(
                f"by: {name[:128]!r} is none of {', '.join(GROUPINGS)}.", "by", "invalid_value"
            )
    return list(dict.fromkeys(names))
