"""`GET /admin/experiments`: routes that split requests over variants, and how many each has had so far.

Whether a difference means anything is what `headrace experiment report` says, from the same figures.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from gateway.admin.access import AdminAccess, answer
from gateway.breaker import RedisUnavailableError
from gateway.services import Services
from shared.config import RouteConfig
from shared.experiment_figures import RequestCounts
from shared.redis_schema import RedisKeys


class _VariantCounts(msgspec.Struct):
    """Of shared.experiment_figures.VariantFigures, what is told here: the rest is large."""

    assigned: RequestCounts = msgspec.field(default_factory=RequestCounts)


class _Counts(msgspec.Struct):
    """Of shared.experiment_figures.ExperimentRecord."""

    variants: dict[str, _VariantCounts] = {}


class ExperimentsEndpoint:
    def __init__(self, services: Services, access: AdminAccess) -> None:
        self._services = services
        self._access = access
        self._keys = RedisKeys(services.config.redis.namespace)

    async def list_all(self, request: web.Request) -> web.Response:
        self._access.check(request)
        policy = self._services.policy.current
        data = [await self._told(route) for route in list(policy.routes.values()) if route.splits_traffic]
        return answer({"object": "list", "policy_version": policy.version, "data": data})

    async def _told(self, route: RouteConfig) -> dict[str, Any]:
        counts, now = await self._counts(route), time.time()
        return {
            "route": route.name,
            "version": route.version,
            "sticky": route.sticky,
            "variants": [
                {
                    "variant": arm.variant,
                    "model": arm.model,
                    "weight": arm.weight,
                    "weight_now": arm.weight_at(now),
                    "assigned": None
                    if counts is None
                    else msgspec.structs.asdict(counts.get(arm.variant, RequestCounts())),
                }
                for arm in route.split
            ],
        }

    async def _counts(self, route: RouteConfig) -> dict[str, RequestCounts] | None:
        """Over all gateways. None: they cannot be known at the moment."""
        key = self._keys.experiment(route.name, route.version)
        try:
            values: Any = await self._services.breaker.call(lambda: self._services.redis.hvals(key))
            lives = [msgspec.json.decode(value, type=_Counts) for value in values]
        except (RedisUnavailableError, msgspec.DecodeError):
            return None
        counts: dict[str, RequestCounts] = {}
        for life in lives:
            for variant, seen in life.variants.items():
                counts.setdefault(variant, RequestCounts()).add(seen.assigned)
        return counts
