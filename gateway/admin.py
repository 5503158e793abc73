"""`/admin`: what an operator sees of this gateway, behind a token of its own."""

from __future__ import annotations

import hmac

import msgspec
from aiohttp import web

from gateway.engine_link import LinkState
from gateway.errors import invalid_api_key, invalid_request, model_not_found
from gateway.openai.body import read_json
from gateway.openai.schema import Body, check_body
from gateway.services import Services


class ResetBody(Body):
    model: str | None = None  # as configured, not as routed; None: of all models


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

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Has the engines forget what they cached, all or those of one model; says how many were told."""
        self._authorize(request)
        document = await read_json(request, self._services.config.gateway) if request.can_read_body else {}
        body = check_body(ResetBody, document)
        if body.model is not None:
            self._check_has_cache(body.model)
        told = [
            link
            for link in self._services.pool.links
            if link.state in (LinkState.READY, LinkState.DRAINING)
            and link.card.runner == "generate"
            and body.model in (None, link.model)
        ]
        for link in told:
            link.reset_prefix_cache()
        return web.Response(
            body=msgspec.json.encode({"engines_told": len(told)}), content_type="application/json"
        )

    def _check_has_cache(self, name: str) -> None:
        configured = {model.name: model for model in self._services.config.models}
        if name not in configured:
            raise model_not_found(name)
        if configured[name].runner == "pooling":
            raise invalid_request(f"The model {name!r} makes embeddings and caches nothing.", "model")

    def _authorize(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._services.admin_token.encode()):
            raise invalid_api_key("The admin token is missing or wrong.")
