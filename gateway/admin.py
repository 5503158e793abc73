"""`/admin`: what an operator sees of this gateway, behind a token of its own."""

from __future__ import annotations

import hmac

import msgspec
from aiohttp import web

from gateway.errors import invalid_api_key
from gateway.services import Services


class AdminEndpoint:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def status(self, request: web.Request) -> web.Response:
        self._authorize(request)
        policy = self._services.policy.current
        document = {
            "policy_version": policy.version,
            "tenants": sorted(policy.tenants),
            "routes": sorted(policy.routes),
            "draining": self._services.is_draining,
            "engines": [
                {
                    "engine_id": link.engine_id,
                    "epoch": link.epoch,
                    "model": link.model,
                    "state": link.state.name.lower(),
                    "in_flight": link.num_in_flight,
                    "outstanding_tokens": link.outstanding_tokens,
                    "load": msgspec.structs.asdict(link.load) if link.load is not None else None,
                }
                for link in self._services.pool.links
            ],
        }
        return web.Response(body=msgspec.json.encode(document), content_type="application/json")

    def _authorize(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._services.admin_token.encode()):
            raise invalid_api_key("The admin token is missing or wrong.")
