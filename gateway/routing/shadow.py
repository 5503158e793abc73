"""Shadow traffic: copies of requests that run on another variant, of which only figures are kept.

A copy belongs to a task of its own, which nobody waits for. It takes nothing of the limits, is paid by
nobody, and goes behind everything else in an engine's queue. Where it would have to wait it is dropped
instead, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from gateway.engine_link import EngineLink
from gateway.engine_pool import EnginePool
from gateway.errors import as_api_error, internal_error, timed_out
from gateway.ledger import Ledger
from gateway.metrics import GatewayMetrics
from gateway.request_account import CLIENT_LEFT, RequestAccount
from gateway.routing.assignment import uniform
from shared.config import RouteConfig, VariantConfig
from shared.identifiers import TenantId

logger = logging.getLogger(__name__)

# Below all classes that requests can have, and so far that waiting never lifts a copy among them.
SHADOW_CLASS = 1000
# An engine shares fairly between tenants: copies must not use up the share of whoever asked. No tenant can be
# called so.
SHADOW_TENANT = TenantId("~shadow")

# What is to be done with the variant, by one of its engines, and told in the account.
Copy = Callable[[VariantConfig, EngineLink, RequestAccount], Coroutine[Any, Any, None]]
Outcome = Literal["attempted", "succeeded", "failed", "dropped"]


class ShadowTraffic:
    """Owns the tasks of all copies that run in this gateway."""

    def __init__(self, pool: EnginePool, ledger: Ledger, metrics: GatewayMetrics) -> None:
        self._pool = pool
        self._ledger = ledger
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_in_flight: Counter[str] = Counter()  # by route

    def offer(self, route: RouteConfig, account: RequestAccount, copy: Copy, *, is_draining: bool) -> None:
        """Of a request that has been placed, whose account this is: runs `copy`, if it is one of those that
        are sampled and nothing is in its way. Does not wait."""
        shadow = route.shadow
        if shadow is None or not is_sampled(route.name, account.request_id, shadow.percent):
            return
        variant = route.variant(shadow.variant)
        assert variant is not None, "a route's shadow is one of its variants"
        engine = self._idle_engine(variant)
        has_room = self._num_in_flight[route.name] < shadow.max_in_flight
        answers_itself = variant.variant == account.variant
        if engine is None or answers_itself or is_draining or not has_room:
            self._count(route, variant.variant, "dropped")
            return
        self._count(route, variant.variant, "attempted")
        self._num_in_flight[route.name] += 1
        its_account = account.of_shadow(variant.variant, variant.model)
        running = _within(shadow.timeout_s, copy, variant, engine, its_account)
        task = asyncio.create_task(running, name=f"shadow-{route.name}")
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:  # also of one that was cancelled before it began
            self._tasks.discard(task)
            self._num_in_flight[route.name] -= 1
            self._close_account(task, route, its_account)

        task.add_done_callback(end)

    async def close(self) -> None:
        """Ends all copies. Engines are told of it, so their links must still be there."""
        for task in self._tasks:
            task.cancel()
        await self.settled()

    async def settled(self) -> None:
        """When all copies that have begun are accounted for."""
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # for what is called when they are done

    def _close_account(self, task: asyncio.Task[None], route: RouteConfig, account: RequestAccount) -> None:
        status, error_code = 200, None
        if task.cancelled():
            status = CLIENT_LEFT
        elif (error := task.exception()) is not None:  # whatever it is, the request is not to suffer from it
            told = as_api_error(error) if isinstance(error, Exception) else internal_error()
            status, error_code = told.status, told.code
            if status == 500:
                logger.error("a shadow copy of request %s failed", account.request_id, exc_info=error)
        self._count(route, account.variant, "succeeded" if status == 200 else "failed")
        self._ledger.close(account, status, error_code)

    def _idle_engine(self, variant: VariantConfig) -> EngineLink | None:
        """One at which nothing waits: a copy must not stand in anybody's way."""
        engines = self._pool.ready(variant.model)
        return next((engine for engine in engines if not engine.load or not engine.load.num_waiting), None)

    def _count(self, route: RouteConfig, variant: str, outcome: Outcome) -> None:
        self._metrics.shadow_requests.labels(route.name, variant, outcome).inc()


async def _within(
    timeout_s: float, copy: Copy, variant: VariantConfig, engine: EngineLink, account: RequestAccount
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await copy(variant, engine, account)
    except TimeoutError as error:
        raise timed_out(f"A shadow copy may take {timeout_s:g} s.") from error


def is_sampled(route_name: str, request_id: str, percent: float) -> bool:
    """By the request's id: one that is sent again under the same id is sampled again."""
    return uniform("shadow", route_name, request_id) * 100 < percent
