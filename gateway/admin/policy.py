"""`GET /admin/policy`: all that is in force, and who said so."""

from __future__ import annotations

from aiohttp import web

from gateway.admin.access import AdminAccess, answer
from gateway.admin.entries import EntriesEndpoint
from gateway.services import Services


class PolicyEndpoint:
    def __init__(
        self, services: Services, access: AdminAccess, tenants: EntriesEndpoint, routes: EntriesEndpoint
    ) -> None:
        self._services = services
        self._access = access
        self._tenants = tenants
        self._routes = routes

    async def get(self, request: web.Request) -> web.Response:
        self._access.check(request)
        policy = self._services.policy.current
        return answer(
            {
                "policy_version": policy.version,
                "tenants": self._tenants.entries(),
                "routes": self._routes.entries(),
                "options": policy.options.model_dump(mode="json"),
            },
            version=policy.version,
        )
