"""`GET /v1/models`: the names that this key may use. Answered from our own state, whatever engines do."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from gateway.services import Services
from shared.config import RouteConfig

CREATED = 0  # OpenAI's clients want a time; ours have none that means anything


class ModelsEndpoint:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._runners = {model.name: model.runner for model in services.config.models}

    async def list(self, request: web.Request) -> web.Response:
        key = await self._services.authenticator.authenticate(request.headers)
        policy = self._services.policy.current
        routes = policy.routes_of(policy.tenant(key.tenant))
        return _json({"object": "list", "data": [self._describe(route) for route in routes]})

    async def get(self, request: web.Request) -> web.Response:
        key = await self._services.authenticator.authenticate(request.headers)
        policy = self._services.policy.current
        route = policy.route(request.match_info["name"], policy.tenant(key.tenant))
        return _json(self._describe(route))

    def _describe(self, route: RouteConfig) -> dict[str, Any]:
        lengths = [
            link.card.max_model_len for arm in route.split for link in self._services.pool.ready(arm.model)
        ]
        return {
            "id": route.name,
            "object": "model",
            "created": CREATED,
            "owned_by": "headrace",
            # vLLM's extension; what every variant of the route can take
            "max_model_len": min(lengths) if lengths else None,
            # ours: "generate" or "pooling", the endpoints that take it
            "runner": self._runners.get(route.split[0].model, "generate"),
        }


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
