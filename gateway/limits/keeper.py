"""What a gateway does for the limits beside its requests: tells that it lives, and lets nothing be lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator

import msgspec

from gateway.breaker import RedisBreaker
from gateway.limits.dimensions import Dimensions
from gateway.limits.reservation import InRedis, Reservation
from gateway.limits.script_channel import MAX_BATCH, US, Call, Lane, Reply, Script, by_dimensions
from gateway.metrics import GatewayMetrics
from gateway.policy import PolicySnapshot
from gateway.redis_errors import REDIS_ERRORS
from shared.identifiers import GatewayId, TenantId
from shared.redis_schema import GATEWAY_LIFETIME_S, RedisKeys

MAX_TENANTS_SWEPT = 64  # in one beat
MAX_LEASES_SWEPT = 256  # of one tenant, in one beat


class Keeper:
    """Its calls also tell the breaker whether Redis is there, so that no request has to find out."""

    def __init__(
        self,
        lane: Lane,
        keys: RedisKeys,
        policy: Callable[[], PolicySnapshot],
        gateway_id: GatewayId,
        metrics: GatewayMetrics,
        breaker: RedisBreaker,
        lease_us: int,
    ) -> None:
        self.num_gateways = 1  # that live, as last heard
        self._lane = lane
        self._keys = keys
        self._policy = policy
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._breaker = breaker
        self._lease_us = lease_us
        self._renew_script, self._sweep_script = Script("renew.lua"), Script("sweep.lua")
        self._beat_script = Script("beat.lua", has_accounts=False)
        self._account_cursors: dict[TenantId, bytes | str] = {}
        self._tenants_ahead: Iterator[TenantId] = iter(())

    async def beat(self) -> bool:
        """Says that this gateway lives, and settles what dead ones have left of some tenants.

        Returns whether Redis was there.
        """
        lives_us = int(GATEWAY_LIFETIME_S * US)
        calls = [Call(self._beat_script, [self._keys.gateways], [self._gateway_id, lives_us])]
        tenants = self._next_tenants()
        for tenant in tenants:
            cursor = self._account_cursors.get(tenant, b"0")
            calls.append(Call(self._sweep_script, self._keys.limit_state(tenant), [MAX_LEASES_SWEPT, cursor]))
        replies = await self._ask(calls)
        if replies is None:
            return False
        self.num_gateways = max(1, replies[0])
        self._metrics.live_gateways.set(self.num_gateways)
        for tenant, (_, cursor) in zip(tenants, replies[1:], strict=True):
            self._account_cursors[tenant] = cursor
        return True

    async def renew(self, held: Collection[Reservation]) -> None:
        """Extends their leases, with the output so far; puts those back that Redis does not know."""
        output_of = {reservation: reservation.output_so_far() for reservation in held}
        for dimensions, group in by_dimensions(output_of, lambda reservation: reservation.dimensions):
            for start in range(0, len(group), MAX_BATCH):
                await self._renew_some(dimensions, group[start : start + MAX_BATCH], output_of)

    async def close(self) -> None:
        await self._lane.close()

    def _next_tenants(self) -> list[TenantId]:
        """Some of them, each time the next ones."""
        tenants = list(itertools.islice(self._tenants_ahead, MAX_TENANTS_SWEPT))
        if len(tenants) < MAX_TENANTS_SWEPT:
            in_force = self._policy().tenants
            self._account_cursors = {
                tenant: cursor for tenant, cursor in self._account_cursors.items() if tenant in in_force
            }
            self._tenants_ahead = iter(list(in_force))
        return tenants

    async def _renew_some(
        self, dimensions: Dimensions, group: list[Reservation], output_of: dict[Reservation, int]
    ) -> None:
        running = [reservation for reservation in group if not reservation.is_settled]
        told = [(one.request_id, output_of[one], *one.charged) for one in running]
        argument = msgspec.msgpack.encode((self._lease_us, dimensions.packed, told))
        for reservation in running:
            reservation.is_renewing = True
        replies = await self._ask([Call(self._renew_script, dimensions.redis_keys, (argument,))])
        for reservation in running:
            reservation.is_renewing = False
            if replies is None:
                reservation.in_redis = InRedis.UNSURE
                continue
            reservation.reported_output = output_of[reservation]
            if reservation.in_redis is InRedis.NO:  # what is unsure stays so: the old command may yet come
                reservation.in_redis = InRedis.YES

    async def _ask(self, calls: list[Call]) -> list[Reply] | None:
        """What they returned; None: Redis is away, or answers with errors."""
        try:
            replies = await self._lane.send(calls)
        except REDIS_ERRORS as error:
            self._breaker.failed(error)
            return None
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors:
            self._breaker.failed(errors[0])
            return None
        self._breaker.succeeded()
        return replies
