"""What an operator sees of this gateway, and the caches of its engines."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.admin.access import AdminAccess, answer
from gateway.engine_link import LinkState
from gateway.errors import invalid_request, model_not_found
from gateway.openai.body import read_json
from gateway.openai.schema import Body, check_body
from gateway.services import Services


class ResetBody(Body):
    model: str | None = None  # as configured, not as routed; None: of all models


class StatusEndpoint:
    def __init__(self, services: Services, access: AdminAccess) -> None:
        self._services = services
        self._access = access

    async def status(self, request: web.Request) -> web.Response:
        self._access.check(request)
        policy = self._services.policy.current
        configuration = self._services.config_file
        return answer(
            {
                "policy_version": policy.version,
                "tenants": sorted(policy.tenants),
                "routes": sorted(policy.routes),
                "draining": self._services.is_draining,
                "configuration": {
                    "path": configuration.path,
                    "error": configuration.error,
                    "loaded_at": configuration.loaded_at,
                },
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
        )

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Has the engines forget what they cached, all or those of one model; says how many were told."""
        self._access.check(request)
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
        return answer({"engines_told": len(told)})

    def _check_has_cache(self, name: str) -> None:
        configured = {model.name: model for model in self._services.config.models}
        if name not in configured:
            raise model_not_found(name)
        if configured[name].runner == "pooling":
            raise invalid_request(f"The model {name!r} makes embeddings and caches nothing.", "model")
