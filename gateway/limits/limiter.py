"""Reserves what requests may take of their limits, over all gateways, and settles what they have taken.

What is asked for in one turn of the event loop goes to Redis together. A request never waits for a Redis that
is silent longer than `redis.timeout_ms`, nor for one that answers others longer than four times that. What is
counted is the time of a batch that was sent: a gateway that has much to do is no Redis that is away. Where
there is no answer, each of the request's limits does as its `on_redis_failure` says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import redis.asyncio

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import unavailable
from gateway.limits.dimensions import Dimension, Dimensions, dimensions_of
from gateway.limits.headers import standings
from gateway.limits.keeper import Keeper
from gateway.limits.local_share import LocalShare
from gateway.limits.refusal import refusal
from gateway.limits.reservation import Demand, InRedis, Reservation
from gateway.limits.script_channel import MAX_BATCH, US, Call, Lane, Pulse, Reply, Script, by_dimensions
from gateway.limits.settlements import Settlement, Settlements
from gateway.metrics import GatewayMetrics
from gateway.policy import PolicySnapshot
from gateway.redis_errors import REDIS_ERRORS
from shared.config import Limits, OnRedisFailure, TenantConfig
from shared.identifiers import GatewayId, fresh_request_id
from shared.redis_schema import GATEWAY_REFRESH_INTERVAL_S, RedisKeys

logger = logging.getLogger(__name__)

NUM_LANES = 4  # batches on their way at one time
OVERLAP_AFTER_S = 0.002  # a batch waits for the one before it, unless that takes longer: calls are what costs
SETTLE_DELAY_S = 0.003  # for more to come; whoever holds a slot does not wait
RENEW_INTERVAL_S = 2.0  # short, since what Redis has lost is also put back by it
DRAIN_TIMEOUT_S = 2.0
MAX_CACHED_DIMENSIONS = 10_000


class _Asked(NamedTuple):
    """A reservation and who waits for it."""

    reservation: Reservation
    answer: asyncio.Future[Sequence[Any]]


class _Known(NamedTuple):
    """Dimensions, and what they were made of."""

    tenant: TenantConfig
    key_limits: Limits | None
    on_redis_failure: OnRedisFailure
    dimensions: Dimensions


@dataclass(slots=True)
class _Batch:
    settlements: list[Settlement]
    asked: list[_Asked]

    def __bool__(self) -> bool:
        return bool(self.settlements or self.asked)


class Limiter:
    """Owns every reservation of this gateway until it is settled."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        policy: Callable[[], PolicySnapshot],
        gateway_id: GatewayId,
        metrics: GatewayMetrics,
        breaker: RedisBreaker,
        *,
        timeout_s: float,
        lease_s: float,
    ) -> None:
        self._keys = keys
        self._policy = policy
        self._metrics = metrics
        self._lease_us = int(lease_s * US)
        self._lease_s = lease_s
        self._breaker = breaker
        pulse = Pulse(timeout_s)
        self._lanes = [Lane(client, pulse) for _ in range(NUM_LANES)]
        self._free_lanes = list(self._lanes)
        self._keeper = Keeper(Lane(client, pulse), keys, policy, gateway_id, metrics, breaker, self._lease_us)
        self._reserve_script, self._settle_script = Script("reserve.lua"), Script("settle.lua")
        self._known: dict[tuple[str, str | None, str], _Known] = {}
        self._asked: list[_Asked] = []
        self._settlements = Settlements()
        self._held: set[Reservation] = set()
        self._flush_timer: asyncio.Handle | None = None
        self._flushes_soon = False  # at the end of this turn of the event loop, that is
        self._sent_at = 0.0
        self._sending: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly
        self._local_share = LocalShare()

    # ------------------------------------------------------------------ what requests ask for

    def dimensions(
        self, tenant: TenantConfig, route: str | None, key_id: str, key_limits: Limits | None
    ) -> Dimensions:
        """The limits of a request. Made once for all those that are alike. `route`: None: it is of none."""
        its_key = tenant.name, route, key_id
        known = self._known.get(its_key)
        mode = self._policy().options.on_redis_failure
        if known is None or known[:-1] != (tenant, key_limits, mode):
            made = dimensions_of(tenant, route, key_id, key_limits, self._keys, mode)
            if len(self._known) >= MAX_CACHED_DIMENSIONS:
                self._known.clear()
            known = self._known[its_key] = _Known(tenant, key_limits, mode, made)
        return known.dimensions

    async def reserve(self, dimensions: Dimensions, demand: Demand) -> Reservation:
        """Raises ApiError 429, or 503 when a limit fails closed and Redis cannot be asked."""
        reservation = Reservation(
            fresh_request_id(),
            dimensions,
            demand.input_tokens,
            demand.reserved_output(self._policy().options.reserved_output_tokens),
        )
        if not dimensions.all:
            return reservation
        if self._breaker.is_open:
            return self._without_redis(reservation)
        loop = asyncio.get_running_loop()
        asked = _Asked(reservation, loop.create_future())
        self._asked.append(asked)
        self._flush_soon()
        try:
            answer = await asked.answer
        except asyncio.CancelledError:
            # The client left while we waited. Whatever the script still takes is given back after it.
            reservation.in_redis = InRedis.UNSURE
            self._settle(reservation, 0, 0)
            raise
        except RedisUnavailableError:
            return self._without_redis(reservation)
        return self._answered(reservation, answer)

    def settle(self, reservation: Reservation, input_tokens: int, output_tokens: int) -> None:
        """With what it has really taken. In the background, without waiting; idempotent."""
        self._held.discard(reservation)
        self._local_share.leave(reservation)
        if reservation.in_redis is not InRedis.NO or reservation.is_renewing:
            self._settle(reservation, input_tokens, output_tokens)

    def _settle(self, reservation: Reservation, input_tokens: int, output_tokens: int) -> None:
        if reservation.is_settled or not reservation.is_kept:
            return
        reservation.is_settled = True
        is_unsure = reservation.in_redis is InRedis.UNSURE or reservation.is_renewing
        self._settlements.add(Settlement(reservation, input_tokens, output_tokens, is_unsure))
        if reservation.dimensions.has_slots:  # its client may ask again at once, and needs it back
            self._flush_soon()
        elif self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(SETTLE_DELAY_S, self._flush)
            self._flushes_soon = False

    def _answered(self, reservation: Reservation, answer: Sequence[Any]) -> Reservation:
        status, refusing, wait_us, shadows, figures = answer
        dimensions = reservation.dimensions.all
        for index in shadows:
            self._count(self._metrics.limit_shadow_refusals, reservation, dimensions[index - 1])
        standing_of = standings(dimensions, figures)
        if status == 0:
            dimension = dimensions[refusing - 1]
            self._count(self._metrics.limit_refusals, reservation, dimension)
            wait_s = None if wait_us < 0 else wait_us / US
            raise refusal(dimension, wait_s, standing_of)
        reservation.standings = standing_of
        reservation.in_redis = InRedis.YES
        self._hold(reservation)
        return reservation

    def _without_redis(self, reservation: Reservation) -> Reservation:
        """As each of its limits says."""
        dimensions = reservation.dimensions.all
        if any(each.on_redis_failure == "fail_closed" and not each.is_shadow for each in dimensions):
            self._settle_unsure(reservation)
            raise unavailable("Limits cannot be checked at the moment.", 1.0)
        refused = self._local_share.reserve(reservation, self._keeper.num_gateways)
        if refused is not None:
            self._settle_unsure(reservation)
            self._count(self._metrics.limit_refusals, reservation, refused.dimension)
            raise refusal(refused.dimension, refused.wait_s, {})
        self._hold(reservation)
        return reservation

    def _settle_unsure(self, reservation: Reservation) -> None:
        if reservation.in_redis is InRedis.UNSURE:
            self._settle(reservation, 0, 0)

    def _hold(self, reservation: Reservation) -> None:
        if reservation.is_kept:
            self._held.add(reservation)
            self._local_share.hold(reservation)

    def _count(self, counter: Any, reservation: Reservation, dimension: Dimension) -> None:
        counter.labels(dimension.scope, dimension.name, reservation.dimensions.tenant).inc()

    # ------------------------------------------------------------------ to Redis and back

    def _flush_soon(self) -> None:
        if self._flush_timer is not None:
            if self._flushes_soon:
                return
            self._flush_timer.cancel()
        self._flush_timer = asyncio.get_running_loop().call_soon(self._flush)
        self._flushes_soon = True

    def _flush(self) -> None:
        """Sends what has come together, if there is a lane for it; else whoever frees one does."""
        self._flush_timer = None
        if self._breaker.is_open:
            self._fail(self._asked, InRedis.NO)
            self._asked = []
            return  # settlements wait for `keep`, which tries whether Redis is there
        loop = asyncio.get_running_loop()
        is_sending = len(self._free_lanes) < NUM_LANES
        if is_sending and loop.time() < self._sent_at + OVERLAP_AFTER_S:
            self._flush_timer = loop.call_later(OVERLAP_AFTER_S, self._flush)
            self._flushes_soon = False
            return  # who is on the way will be back before that, and more have come together by then
        self._asked = [each for each in self._asked if not each.answer.done()]
        while self._free_lanes and (batch := self._next_batch()):
            self._sent_at = loop.time()
            lane = self._free_lanes.pop()
            task = asyncio.create_task(self._send(lane, batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def _next_batch(self) -> _Batch:
        asked = self._asked[:MAX_BATCH]
        del self._asked[:MAX_BATCH]
        return _Batch(self._settlements.take(MAX_BATCH), asked)

    async def _send(self, lane: Lane, batch: _Batch) -> None:
        # Settlements first: a client whose request has ended may have sent the next one already.
        settling = by_dimensions(batch.settlements, lambda settlement: settlement.reservation.dimensions)
        asking = by_dimensions(batch.asked, lambda asked: asked.reservation.dimensions)
        calls = [
            *(self._settle_call(dimensions, settlements) for dimensions, settlements in settling),
            *(self._reserve_call(dimensions, asked) for dimensions, asked in asking),
        ]
        try:
            replies = await lane.send(calls)
        except REDIS_ERRORS as error:
            self._breaker.failed(error)
            self._settlements.put_back(batch.settlements)
            self._fail(batch.asked, InRedis.UNSURE)
        except asyncio.CancelledError:
            self._settlements.put_back(batch.settlements)
            raise
        else:
            self._take_replies(settling, asking, replies)
        finally:
            self._free_lanes.append(lane)
        if self._asked or (len(self._settlements) and not self._breaker.is_open):
            self._flush_soon()

    def _take_replies(
        self,
        settling: list[tuple[Dimensions, list[Settlement]]],
        asking: list[tuple[Dimensions, list[_Asked]]],
        replies: list[Reply],
    ) -> None:
        for (_, settlements), reply in zip(settling, replies, strict=False):
            if isinstance(reply, Exception):
                self._settlements.put_back(settlements)
        for (_, asked), reply in zip(asking, replies[len(settling) :], strict=True):
            if isinstance(reply, Exception):
                self._fail(asked, InRedis.NO)
                continue
            for each, answer in zip(asked, msgspec.msgpack.decode(reply), strict=True):
                if not each.answer.done():
                    each.answer.set_result(answer)
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors:
            self._breaker.failed(errors[0])
        else:
            self._breaker.succeeded()
            self._settlements.were_sent()

    def _fail(self, asked: Iterable[_Asked], in_redis: InRedis) -> None:
        for each in asked:
            if not each.answer.done():
                each.reservation.in_redis = in_redis
                each.answer.set_exception(RedisUnavailableError("Redis has failed"))

    def _reserve_call(self, dimensions: Dimensions, asked: list[_Asked]) -> Call:
        requests = [
            (
                reservation.request_id if reservation.is_kept else "",
                reservation.input_tokens,
                reservation.output_tokens,
            )
            for reservation, _ in asked
        ]
        argument = msgspec.msgpack.encode((self._lease_us, dimensions.packed, requests))
        return Call(self._reserve_script, dimensions.redis_keys, (argument,))

    def _settle_call(self, dimensions: Dimensions, settlements: list[Settlement]) -> Call:
        told = [
            (one.reservation.request_id, one.input_tokens, one.output_tokens, int(one.is_unsure))
            for one in settlements
        ]
        argument = msgspec.msgpack.encode((self._lease_us, told))
        return Call(self._settle_script, dimensions.redis_keys, (argument,))

    # ------------------------------------------------------------------ beside the requests

    async def keep(self) -> None:
        """For ever: tells that this gateway lives, renews leases, and settles what dead gateways have left.

        It is also who finds out that Redis is there again, so that no request has to wait for that.
        """
        loop = asyncio.get_running_loop()
        interval_s = min(GATEWAY_REFRESH_INTERVAL_S, self._lease_s / 4)
        renews_at = loop.time()
        while True:
            was_open = self._breaker.is_open
            if await self._keeper.beat() and (was_open or loop.time() >= renews_at):
                renews_at = loop.time() + min(RENEW_INTERVAL_S, self._lease_s / 3) - interval_s / 2
                await self._keeper.renew(self._held)
            if len(self._settlements):
                self._flush_soon()
            await asyncio.sleep(interval_s)

    async def drain(self) -> None:
        """Settles what has ended, but does not wait for a Redis that is away."""
        deadline = asyncio.get_running_loop().time() + DRAIN_TIMEOUT_S
        while (self._settlements or self._sending) and not self._breaker.is_open:
            self._flush()
            left_s = deadline - asyncio.get_running_loop().time()
            if not self._sending or left_s <= 0:
                break
            await asyncio.wait(list(self._sending), timeout=left_s)
        for task in list(self._sending):
            task.cancel()
        for lane in self._lanes:
            await lane.close()
        await self._keeper.close()
