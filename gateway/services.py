"""The parts of one gateway, put together once. Handlers get this and nothing global."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, field

import redis.asyncio

from gateway.auth import Authenticator
from gateway.balancer import Balancer
from gateway.breaker import RedisBreaker
from gateway.engine_pool import EnginePool
from gateway.ledger import Ledger
from gateway.limits import Limiter
from gateway.metrics import GatewayMetrics
from gateway.openai.responses.background import BackgroundResponses
from gateway.openai.responses.store import ResponseStore
from gateway.policy import PolicyStore
from gateway.running_requests import RunningRequests
from shared.config import HeadraceConfig
from shared.identifiers import GatewayId
from shared.redis_client import connect_async
from shared.redis_schema import RedisKeys
from shared.telemetry import Tracing

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Services:
    config: HeadraceConfig
    admin_token: str
    tracing: Tracing
    redis: redis.asyncio.Redis
    authenticator: Authenticator
    policy: PolicyStore
    limiter: Limiter
    pool: EnginePool
    balancer: Balancer
    responses: ResponseStore
    background_responses: BackgroundResponses
    metrics: GatewayMetrics
    ledger: Ledger
    running: RunningRequests = field(default_factory=RunningRequests)
    is_draining: bool = False
    _background: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Publishes the policy and starts what runs beside the requests."""
        await self.policy.publish()
        await self.policy.refresh()
        for follow in (
            self.policy.follow,
            self.pool.follow,
            self.limiter.keep_slots,
            self.background_responses.keep_leases,
        ):
            task = asyncio.create_task(follow(), name=follow.__qualname__)
            task.add_done_callback(_end_with_process)
            self._background.append(task)

    async def close(self) -> None:
        """After the last request has ended."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.limiter.drain()
        await self.pool.close()
        await self.redis.aclose()
        self.tracing.shutdown()


def _end_with_process(task: asyncio.Task[None]) -> None:
    """These tasks run for ever. A gateway that goes on without one of them would serve a frozen world."""
    if not task.cancelled():
        logger.critical("%s has failed", task.get_name(), exc_info=task.exception())
        signal.raise_signal(signal.SIGTERM)


def make_services(
    config: HeadraceConfig,
    *,
    redis_url: str,
    key_pepper: bytes,
    admin_token: str,
    gateway_id: GatewayId,
    tracing: Tracing,
) -> Services:
    """Needs a running event loop; opens no connection yet."""
    client = connect_async(redis_url, config.redis.timeout_ms)
    keys = RedisKeys(config.redis.namespace)
    breaker = RedisBreaker()
    policy = PolicyStore(config, client, keys, breaker)
    pool = EnginePool(client, keys, breaker, gateway_id)
    responses = ResponseStore(
        client,
        keys,
        breaker,
        lifetime_s=config.gateway.responses_ttl_s,
        max_bytes=config.gateway.max_stored_response_bytes,
    )
    return Services(
        config=config,
        admin_token=admin_token,
        tracing=tracing,
        redis=client,
        authenticator=Authenticator(client, keys, key_pepper, breaker),
        policy=policy,
        limiter=Limiter(client, keys, breaker, config.gateway.on_redis_failure),
        pool=pool,
        balancer=Balancer(),
        responses=responses,
        background_responses=BackgroundResponses(responses),
        metrics=GatewayMetrics(lambda: pool.links, lambda: policy.current.version),
        ledger=Ledger(),
    )
