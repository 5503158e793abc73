"""Tenants, routes and options of the gateway: one immutable snapshot per request, swapped whole.

What the configuration file says and what the admin API has changed lie in Redis, apart from each other and
under one version (`PolicyRecord`). Every gateway publishes the file that it was started with, or that was
changed under it, and follows whatever is published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import redis.asyncio

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import ApiError, model_not_found, permission_denied, unavailable
from gateway.policy_change import FilePublication, PolicyChange
from gateway.policy_storage import PolicyStorage, StoredPolicy, UnreadablePolicyError, readable
from shared.config import GatewayConfig, HeadraceConfig, RouteConfig, TenantConfig, VariantConfig
from shared.identifiers import TenantId
from shared.redis_schema import PolicyRecord, RedisKeys
from shared.route_names import unknown_routes

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    version: int  # 0: of the file alone; Redis could not be asked yet
    options: GatewayConfig
    tenants: Mapping[TenantId, TenantConfig]
    routes: Mapping[str, RouteConfig]  # a model's own name is a route to it, too

    def tenant(self, tenant_id: TenantId) -> TenantConfig:
        """Raises ApiError 403 for the key of a tenant that is no longer configured."""
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            raise permission_denied("The tenant of this API key is not configured.")
        return tenant

    def route(self, name: str, tenant: TenantConfig) -> RouteConfig:
        """The route a client named as `model`. Raises ApiError 404 or 403."""
        route = self.routes.get(name)
        if route is None:
            raise model_not_found(name)
        if not tenant.may_use(name):
            raise permission_denied(f"This API key may not use the model {name!r}.", "model")
        return route

    def unknown_routes(self, tenant: TenantConfig) -> list[str]:
        """What it says of routes that there are not, or not yet."""
        return [
            *unknown_routes("models", tenant.models, self.routes),
            *unknown_routes("route_limits", tenant.route_limits, self.routes),
        ]

    def routes_of(self, tenant: TenantConfig) -> list[RouteConfig]:
        return [route for route in self.routes.values() if tenant.may_use(route.name)]


def own_routes(config: HeadraceConfig) -> dict[str, RouteConfig]:
    """A model's own name leads to it."""
    return {
        model.name: RouteConfig(
            name=model.name, sticky="none", split=[VariantConfig(variant="default", model=model.name)]
        )
        for model in config.models
    }


def make_snapshot(
    version: int, tenants: Sequence[TenantConfig], routes: Sequence[RouteConfig], config: HeadraceConfig
) -> PolicySnapshot:
    """`config`: whose options and models they are."""
    return PolicySnapshot(
        version=version,
        options=config.gateway,
        tenants={TenantId(tenant.name): tenant for tenant in tenants},
        routes=own_routes(config) | {route.name: route.resolved(config.models) for route in routes},
    )


class PolicyStore:
    """Owns the snapshot in force. `config` is what the file says, with the models that really run."""

    def __init__(
        self, config: HeadraceConfig, client: redis.asyncio.Redis, keys: RedisKeys, breaker: RedisBreaker
    ) -> None:
        self._config = config
        self._storage = PolicyStorage(client, keys, breaker)
        self._stored: StoredPolicy | None = None  # the last one that could be read
        self._seen: bytes | None = None  # also if it could not
        self._num_swaps = 0
        self._is_published = False
        self._changing = asyncio.Lock()  # what was committed last is to be swapped in last
        # What the file says holds until Redis can be asked.
        self.current = make_snapshot(0, config.tenants, config.routes, config)

    @property
    def config(self) -> HeadraceConfig:
        return self._config

    @property
    def record(self) -> PolicyRecord:
        """Who said what of the policy in force."""
        if self._stored is not None:
            return self._stored.record
        return PolicyRecord(0, "", self._config.tenants, self._config.routes)

    async def publish(self, *, only_if_absent: bool = False) -> None:
        """Puts the file's policy into Redis unless it was already published from this same text.

        `only_if_absent`: nor if any other was published before.
        """
        async with self._changing:
            await self._publish(self._config, only_if_absent=only_if_absent)

    async def reload(self, config: HeadraceConfig) -> None:
        """Puts another file's tenants, routes and options in force, here at once also without Redis.

        Its models are those that run, and it has been checked as a whole.
        """
        async with self._changing:
            await self._publish(config)

    async def commit(self, change: PolicyChange, *, actor: str, expected_version: int | None) -> PolicyRecord:
        """The policy with this change in it, which is in force here from now on.

        Raises ApiError: 4xx if it was refused, and then nothing has changed; 503 if Redis does not take it.
        """
        async with self._changing:
            try:
                stored = await self._storage.commit(
                    change, self._config, actor=actor, expected_version=expected_version
                )
            except UnreadablePolicyError as error:
                raise unavailable(f"Nothing was changed: {error}", 60.0) from error
            try:
                self._swap(self._config, stored)
            except Exception:  # it is committed, and must not be told as if it were not
                logger.exception("policy version %d could not be put in force here", stored.record.version)
        return stored.record

    async def refresh(self) -> None:
        """Swaps in the stored policy if it is another one. A record that cannot be read keeps the old one."""
        num_swaps = self._num_swaps
        try:
            found = await self._storage.read()
        except RedisUnavailableError:
            return
        if num_swaps != self._num_swaps:
            return  # what was read may be older than what was swapped in meanwhile
        if found is None or not self._is_published:  # flushed, or an empty Redis in the place of the old one
            await self.publish()
            return
        if found == self._seen:
            return
        self._seen = found
        try:
            stored = StoredPolicy(found, readable(found))
        except UnreadablePolicyError as error:
            logger.error("%s; the one before it stays in force", error)
            return
        self._swap(self._config, stored)

    async def follow(self) -> None:
        """Refreshes for ever."""
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            await self.refresh()

    async def _publish(self, config: HeadraceConfig, *, only_if_absent: bool = False) -> None:
        self._is_published = False
        stored = self._stored
        try:
            stored = await self._storage.commit(
                FilePublication(config, only_if_absent), config, actor="configuration file"
            )
            self._is_published = True
        except UnreadablePolicyError as error:
            self._is_published = True  # there is no more to do: it may be a newer gateway's
            logger.error("%s; the configuration file's is used, and not published", error)
            stored = None if stored is None else stored.with_file(config)
        except ApiError as error:
            logger.warning(
                "the policy of the configuration file is used, but could not be published: %s", error
            )
            # With what the admin API had changed before.
            stored = None if stored is None else stored.with_file(config)
        self._swap(config, stored)

    def _swap(self, config: HeadraceConfig, stored: StoredPolicy | None) -> None:
        self._num_swaps += 1
        self._config = config
        if stored is None:
            self.current = make_snapshot(0, config.tenants, config.routes, config)
            return
        record = stored.record
        is_new = self._stored is None or stored.data != self._stored.data
        self._stored = stored
        self._seen = stored.data
        self.current = make_snapshot(record.version, record.tenants_in_force, record.routes_in_force, config)
        if is_new:
            logger.info("policy version %d is in force", record.version)
            self._warn_of_unknown_models()
            self._warn_of_unknown_routes()

    def _warn_of_unknown_models(self) -> None:
        models = {model.name for model in self._config.models}
        for route in self.current.routes.values():
            unknown = sorted({arm.model for arm in route.split} - models)
            if unknown:
                logger.warning("the route %r leads to models not configured here: %s", route.name, unknown)

    def _warn_of_unknown_routes(self) -> None:
        for tenant in self.current.tenants.values():
            for problem in self.current.unknown_routes(tenant):
                logger.warning("the tenant %r: %s", tenant.name, problem)
