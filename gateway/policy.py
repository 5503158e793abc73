"""Tenants and routes: one immutable snapshot per request, swapped whole when Redis holds a newer one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import redis.asyncio
from redis.exceptions import WatchError

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import model_not_found, permission_denied
from shared.config import HeadraceConfig, RouteConfig, TenantConfig, VariantConfig
from shared.identifiers import TenantId
from shared.redis_schema import PolicyRecord, RedisKeys, from_json, to_json

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    version: int
    tenants: dict[TenantId, TenantConfig]
    routes: dict[str, RouteConfig]  # a model's own name is a route to it, too

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

    def routes_of(self, tenant: TenantConfig) -> list[RouteConfig]:
        return [route for route in self.routes.values() if tenant.may_use(route.name)]


def make_snapshot(
    version: int, tenants: Sequence[TenantConfig], routes: Sequence[RouteConfig], models: Sequence[str]
) -> PolicySnapshot:
    own_names = {
        model: RouteConfig(name=model, sticky="none", split=[VariantConfig(variant="default", model=model)])
        for model in models
    }
    return PolicySnapshot(
        version=version,
        tenants={TenantId(tenant.name): tenant for tenant in tenants},
        routes=own_names | {route.name: route for route in routes},
    )


class PolicyStore:
    """Publishes the policy of the configuration file, and follows the one in Redis."""

    def __init__(
        self, config: HeadraceConfig, client: redis.asyncio.Redis, keys: RedisKeys, breaker: RedisBreaker
    ) -> None:
        self._config = config
        self._models = [model.name for model in config.models]
        self._client = client
        self._key = keys.policy
        self._breaker = breaker
        self._seen: bytes | str | None = None
        # What the file says holds until Redis can be asked.
        self.current = make_snapshot(0, config.tenants, config.routes, self._models)

    async def publish(self) -> None:
        """Puts the file's policy into Redis unless it was already published from this same text."""
        source = msgspec.json.encode(
            [
                [tenant.model_dump(mode="json") for tenant in self._config.tenants],
                [route.model_dump(mode="json") for route in self._config.routes],
            ]
        )
        source_hash = hashlib.sha256(source).hexdigest()
        try:
            await self._breaker.call(lambda: self._publish_if_new(source_hash))
        except RedisUnavailableError:
            logger.warning("the policy of the configuration file is used, but could not be published")

    async def _publish_if_new(self, source_hash: str) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            while True:
                try:
                    await pipe.watch(self._key)
                    record = _read(await pipe.get(self._key))
                    if record is not None and record.source_hash == source_hash:
                        return
                    version = 1 if record is None else record.version + 1
                    pipe.multi()  # type: ignore[no-untyped-call]
                    pipe.set(
                        self._key,
                        to_json(
                            PolicyRecord(version, source_hash, self._config.tenants, self._config.routes)
                        ),
                    )
                    await pipe.execute()
                    return
                except WatchError:  # another replica published at the same moment: look again
                    continue

    async def refresh(self) -> None:
        """Swaps in the stored policy if it is newer. A record that cannot be read keeps the old one."""
        try:
            stored = await self._breaker.call(lambda: self._client.get(self._key))
        except RedisUnavailableError:
            return
        if stored is None:  # flushed, or an empty Redis in the place of the old one
            await self.publish()
            return
        if stored == self._seen:
            return
        self._seen = stored
        record = _read(stored)
        if record is not None:
            self.current = make_snapshot(record.version, record.tenants, record.routes, self._models)
            logger.info("policy version %d is in force", record.version)

    async def follow(self) -> None:
        """Refreshes for ever."""
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            await self.refresh()


def _read(stored: bytes | str | None) -> PolicyRecord | None:
    """None also for what cannot be read: it must not stop a gateway, nor replace a policy that works."""
    if stored is None:
        return None
    try:
        return from_json(PolicyRecord, stored)
    except (msgspec.DecodeError, ValueError) as error:
        logger.error("the policy in Redis cannot be read and is not used: %s", error)
        return None
