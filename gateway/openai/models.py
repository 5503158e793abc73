"""`GET /v1/models`: the names that this key may use. Answered from our own state, whatever engines do.

Anthropic's clients ask here, too, and get the shape that they know.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from gateway.anthropic.models import is_of_anthropics_client, model_info, model_page
from gateway.services import Services
from shared.config import RouteConfig

CREATED = 0  # OpenAI's clients want a time; ours have none that means anything


class ModelsEndpoint:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._runners = {model.name: model.runner for model in services.config.models}

    async def list(self, request: web.Request) -> web.Response:
        caller = await self._services.authenticator.authenticate(request.headers, request.remote)
        policy = self._services.policy.current
        tenant = policy.tenant(caller.tenant)
        routes = [route for route in policy.routes_of(tenant) if caller.may_use(route.name)]
        if is_of_anthropics_client(request.headers):
            return _json(model_page([model_info(route.name, self._max_model_len(route)) for route in routes]))
        return _json({"object": "list", "data": [self._describe(route) for route in routes]})

    async def get(self, request: web.Request) -> web.Response:
        caller = await self._services.authenticator.authenticate(request.headers, request.remote)
        policy = self._services.policy.current
        route = policy.route(request.match_info["name"], policy.tenant(caller.tenant))
        caller.check_may_use(route.name)
        if is_of_anthropics_client(request.headers):
            return _json(model_info(route.name, self._max_model_len(route)))
        return _json(self._describe(route))

    def _max_model_len(self, route: RouteConfig) -> int | None:
        """What every variant of the route can take; None: none has an engine."""
        lengths = [
            link.card.max_model_len for arm in route.split for link in self._services.pool.ready(arm.model)
        ]
        return min(lengths) if lengths else None

    def _describe(self, route: RouteConfig) -> dict[str, Any]:
        return {
            "id": route.name,
            "object": "model",
            "created": CREATED,
            "owned_by": "headrace",
            "max_model_len": self._max_model_len(route),  # vLLM's extension
            # ours: "generate" or "pooling", the endpoints that take it
            "runner": self._runners.get(route.split[0].model, "generate"),
        }


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
