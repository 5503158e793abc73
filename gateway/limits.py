"""Rate and concurrency limits of a tenant, over all gateways: reserved before, released after."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis.asyncio

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import rate_limited, unavailable
from shared.config import OnRedisFailure, TenantConfig
from shared.identifiers import RequestId, TenantId
from shared.redis_schema import RedisKeys

logger = logging.getLogger(__name__)

SLOT_LIFETIME_S = 60.0  # a gateway that dies gives its slots back after this
SLOT_REFRESH_INTERVAL_S = 20.0
RELEASE_RETRY_S = 1.0
DRAIN_TIMEOUT_S = 2.0


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request holds. Owned by the request; `Limiter.release` takes it back, once."""

    tenant: TenantId
    slot_id: RequestId
    holds_slot: bool
    requests_limit: int | None = None
    requests_remaining: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self.requests_limit is None or self.requests_remaining is None:
            return {}
        return {
            "x-ratelimit-limit-requests": str(self.requests_limit),
            "x-ratelimit-remaining-requests": str(self.requests_remaining),
        }


class Limiter:
    """Reserves in one atomic script. Slots carry an expiry, which `keep_slots` moves on."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        breaker: RedisBreaker,
        on_redis_failure: OnRedisFailure,
    ) -> None:
        self._client = client
        self._keys = keys
        self._breaker = breaker
        self._on_redis_failure = on_redis_failure
        self._reserve: Any = client.register_script(
            resources.files("gateway").joinpath("reserve.lua").read_text()
        )
        self._held: set[Reservation] = set()
        self._releases: set[asyncio.Task[None]] = set()

    async def reserve(self, tenant: TenantConfig, slot_id: RequestId) -> Reservation:
        """Raises ApiError 429, or 503 when limits fail closed and Redis cannot be asked."""
        tenant_id = TenantId(tenant.name)
        if tenant.requests_per_minute is None and tenant.max_concurrency is None:
            return Reservation(tenant_id, slot_id, holds_slot=False)
        script = asyncio.create_task(self._breaker.call(lambda: self._run_script(tenant, slot_id)))
        try:
            answer = await asyncio.shield(script)
        except asyncio.CancelledError:
            # The client left while we waited. Whatever the script still takes is given back after it.
            taken = Reservation(tenant_id, slot_id, tenant.max_concurrency is not None)
            script.add_done_callback(lambda done: self._release_after(done, taken))
            raise
        except RedisUnavailableError as error:
            # Redis may be slow rather than gone: the script may still run, and take a slot.
            unsure = Reservation(tenant_id, slot_id, holds_slot=tenant.max_concurrency is not None)
            if self._on_redis_failure == "fail_closed":
                self.release(unsure)
                raise unavailable("Limits cannot be checked at the moment.", 1.0) from error
            return unsure
        if answer[0] == 0:
            raise _refusal(tenant, answer[1].decode(), answer[2] / 1e6)
        reservation = Reservation(
            tenant_id,
            slot_id,
            holds_slot=tenant.max_concurrency is not None,
            requests_limit=tenant.requests_per_minute,
            requests_remaining=answer[1] if answer[1] >= 0 else None,
        )
        if reservation.holds_slot:
            self._held.add(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Gives the slot back, in the background; idempotent. Without Redis it expires by itself."""
        if not reservation.holds_slot:
            return
        reservation.holds_slot = False
        self._held.discard(reservation)
        task = asyncio.create_task(self._remove_slot(reservation))
        self._releases.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._releases.discard)

    def _release_after(self, script: asyncio.Task[Any], taken: Reservation) -> None:
        if not script.cancelled() and script.exception() is None:  # else nothing was taken
            self.release(taken)

    async def drain(self) -> None:
        """Waits for the releases that are on their way, but not for a Redis that is away."""
        if self._releases:
            await asyncio.wait(list(self._releases), timeout=DRAIN_TIMEOUT_S)

    async def _run_script(self, tenant: TenantConfig, slot_id: RequestId) -> Any:
        tenant_id = TenantId(tenant.name)
        return await self._reserve(
            keys=[self._keys.request_rate(tenant_id), self._keys.concurrency_slots(tenant_id)],
            args=[
                tenant.requests_per_minute or 0,
                tenant.burst or tenant.requests_per_minute or 0,
                tenant.max_concurrency or 0,
                slot_id,
                int(SLOT_LIFETIME_S * 1e6),
            ],
        )

    async def _remove_slot(self, reservation: Reservation) -> None:
        key = self._keys.concurrency_slots(reservation.tenant)
        for _ in range(int(SLOT_LIFETIME_S / RELEASE_RETRY_S)):
            try:
                await self._breaker.call(lambda: self._client.zrem(key, reservation.slot_id))
            except RedisUnavailableError:
                await asyncio.sleep(RELEASE_RETRY_S)  # a slot that is kept locks its tenant out
            else:
                return
        logger.warning("slot %s is left to expire", reservation.slot_id)

    async def keep_slots(self) -> None:
        """Moves the expiry of held slots on, for ever. By Redis' time, like everything about limits."""
        while True:
            await asyncio.sleep(SLOT_REFRESH_INTERVAL_S)
            if not self._held:
                continue
            try:
                await self._breaker.call(self._refresh_slots)
            except RedisUnavailableError:
                continue  # the breaker has logged it; the next round tries again

    async def _refresh_slots(self) -> None:
        seconds, microseconds = await self._client.time()
        expires_at_us = int((seconds + SLOT_LIFETIME_S) * 1e6) + microseconds
        async with self._client.pipeline(transaction=False) as pipe:
            for held in list(self._held):
                key = self._keys.concurrency_slots(held.tenant)
                # XX: a slot that was released meanwhile must not come back.
                pipe.zadd(key, {held.slot_id: expires_at_us}, xx=True)
                pipe.expire(key, int(SLOT_LIFETIME_S))
            await pipe.execute()


def _refusal(tenant: TenantConfig, reason: str, wait_s: float) -> Exception:
    if reason == "concurrency":
        return rate_limited(
            f"Limit of {tenant.max_concurrency} concurrent requests reached for this tenant.", 1.0
        )
    return rate_limited(
        f"Limit of {tenant.requests_per_minute} requests per minute reached for this tenant.", wait_s
    )
