"""The parts of one gateway, put together once. Handlers get this and nothing global."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, field

import redis.asyncio

from gateway.auth.authenticator import Authenticator, make_authenticator
from gateway.auth.key_office import KeyOffice
from gateway.auth.known_keys import RedisAccess
from gateway.balancer import Balancer
from gateway.breaker import RedisBreaker
from gateway.config_file import ConfigFile, ConfigSource
from gateway.engine_pool import EnginePool
from gateway.experiment_figures import ExperimentFigures
from gateway.feedback import FeedbackStore
from gateway.ledger import Ledger
from gateway.limits import Limiter
from gateway.metrics import GatewayMetrics
from gateway.openai.responses.background import BackgroundResponses
from gateway.openai.responses.store import ResponseStore
from gateway.policy import PolicyStore
from gateway.routing.assignment import Assigner
from gateway.routing.shadow import ShadowTraffic
from gateway.running_requests import RunningRequests
from gateway.usage.keeper import UsageKeeper
from gateway.usage.reader import UsageReader
from shared.config import HeadraceConfig
from shared.identifiers import GatewayId
from shared.redis_client import connect, connect_async
from shared.redis_schema import RedisKeys
from shared.telemetry import Tracing

logger = logging.getLogger(__name__)

PATIENT_TIMEOUT_MS = 500
# Of the sockets themselves, for what nobody waits for any more: who waits has a limit that can tell a Redis
# that is silent from a gateway that has much to do (patience.py).
SOCKET_TIMEOUT_MS = 5000


@dataclass(slots=True)
class Services:
    config: HeadraceConfig
    admin_token: str
    tracing: Tracing
    prompt_redis: redis.asyncio.Redis  # for what requests wait for: keys and limits
    redis: redis.asyncio.Redis  # for all else, with more patience: what it carries may be large
    authenticator: Authenticator
    policy: PolicyStore
    config_file: ConfigFile
    key_office: KeyOffice
    breaker: RedisBreaker
    limiter: Limiter
    pool: EnginePool
    balancer: Balancer
    responses: ResponseStore
    background_responses: BackgroundResponses
    experiment_figures: ExperimentFigures
    feedback: FeedbackStore
    metrics: GatewayMetrics
    usage: UsageKeeper
    usage_reader: UsageReader
    ledger: Ledger
    assigner: Assigner
    shadows: ShadowTraffic
    running: RunningRequests = field(default_factory=RunningRequests)
    is_draining: bool = False
    _background: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Publishes the policy and starts what runs beside the requests."""
        await self.config_file.begin()
        await self.policy.refresh()
        for follow in (
            self.policy.follow,
            self.config_file.follow,
            self.usage.follow,
            self.authenticator.follow,
            self.pool.follow,
            self.limiter.keep,
            self.background_responses.keep_leases,
            self.experiment_figures.follow,
        ):
            task = asyncio.create_task(follow(), name=follow.__qualname__)
            task.add_done_callback(_end_with_process)
            self._background.append(task)

    async def close(self) -> None:
        """After the last request has ended."""
        await self.shadows.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.limiter.drain()
        await self.experiment_figures.close()
        await self.usage.close()
        await self.pool.close()
        await self.authenticator.close()
        await self.prompt_redis.aclose()
        await self.redis.aclose()
        self.key_office.close()
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
    config_source: ConfigSource | None = None,
) -> Services:
    """Needs a running event loop; opens no connection yet."""
    prompt_client = connect_async(redis_url, SOCKET_TIMEOUT_MS)
    patient_timeout_ms = max(config.redis.timeout_ms, PATIENT_TIMEOUT_MS)
    client = connect_async(redis_url, max(patient_timeout_ms, SOCKET_TIMEOUT_MS))
    keys = RedisKeys(config.redis.namespace)
    breaker = RedisBreaker(purpose="policy and records", limit_s=patient_timeout_ms / 1000)
    policy = PolicyStore(config, client, keys, breaker)
    pool = EnginePool(client, keys, breaker, gateway_id)
    responses = ResponseStore(
        client,
        keys,
        breaker,
        lifetime_s=config.gateway.responses_ttl_s,
        max_bytes=config.gateway.max_stored_response_bytes,
    )
    metrics = GatewayMetrics(lambda: pool.links, lambda: policy.current.version)
    # Each of its own: a Redis that is full answers those that only read, and what is a long wait differs.
    key_breaker = RedisBreaker(purpose="keys", limit_s=config.redis.timeout_ms / 1000)
    limit_breaker = RedisBreaker(purpose="limits")
    usage_breaker = RedisBreaker(purpose="usage rows", limit_s=patient_timeout_ms / 1000)
    figures_breaker = RedisBreaker(purpose="figures of experiments", limit_s=patient_timeout_ms / 1000)
    for each in (breaker, key_breaker, limit_breaker, usage_breaker, figures_breaker):
        metrics.follow_redis(each)
    experiment_figures = ExperimentFigures(client, keys, figures_breaker, gateway_id)
    usage = UsageKeeper(
        config.usage,
        client,
        keys,
        usage_breaker,
        gateway_id,
        on_dropped=lambda place: metrics.usage_rows_dropped.labels(place).inc(),
    )
    ledger = Ledger([metrics.variants.keep, usage.put], [experiment_figures.keep])
    return Services(
        config=config,
        admin_token=admin_token,
        tracing=tracing,
        prompt_redis=prompt_client,
        redis=client,
        authenticator=make_authenticator(
            lambda: policy.current.options,
            config.jwt,
            keys,
            RedisAccess(prompt_client, key_breaker),
            RedisAccess(client, breaker),
            key_pepper,
            on_failure=lambda reason: metrics.auth_failures.labels(reason).inc(),
        ),
        policy=policy,
        config_file=ConfigFile(config_source, config, policy, metrics.config_reload_failed),
        key_office=KeyOffice(connect(redis_url, patient_timeout_ms), keys, key_pepper),
        breaker=breaker,
        limiter=Limiter(
            prompt_client,
            keys,
            lambda: policy.current,
            gateway_id,
            metrics,
            limit_breaker,
            timeout_s=config.redis.timeout_ms / 1000,
            lease_s=config.gateway.reservation_lease_s,
        ),
        pool=pool,
        balancer=Balancer(),
        responses=responses,
        background_responses=BackgroundResponses(responses),
        experiment_figures=experiment_figures,
        feedback=FeedbackStore(client, keys, figures_breaker, experiment_figures),
        metrics=metrics,
        usage=usage,
        usage_reader=UsageReader(config, redis_url),
        ledger=ledger,
        assigner=Assigner(),
        shadows=ShadowTraffic(pool, ledger, metrics),
    )
