"""Connections to Redis that never wait for long."""

from __future__ import annotations

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

# redis-py retries by itself with growing pauses; that would turn a bounded wait into a long one.
# One try again covers a connection that the server closed while it was idle. A server that has let one
# wait run out is not asked to wait for once more.
NUM_RETRIES = 1
RETRIED = (redis.ConnectionError,)


def connect(url: str, timeout_ms: int) -> redis.Redis:
    """A blocking client, for engines and commands. Connects on first use."""
    timeout_s = timeout_ms / 1000
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), NUM_RETRIES, RETRIED),
        protocol=2,
    )


def connect_async(url: str, timeout_ms: int, max_connections: int = 64) -> redis.asyncio.Redis:
    """A client for one event loop, that waits for a free connection rather than opening more."""
    timeout_s = timeout_ms / 1000
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=AsyncRetry(NoBackoff(), NUM_RETRIES, RETRIED),
        protocol=2,
    )
    return redis.asyncio.Redis.from_pool(pool)
