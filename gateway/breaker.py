"""Redis with a bounded wait, also when it is frozen: one request finds out, the next ones need not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

OPEN_FOR_S = 1.0
T = TypeVar("T")


class RedisUnavailableError(Exception):
    """Redis did not answer in time, or has failed so recently that it was not asked."""


class RedisBreaker:
    """Runs Redis calls; after a failure it refuses at once for a second, then lets one call try."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._closed_again_at = 0.0
        self._is_failing = False

    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        """The operation's result. Raises RedisUnavailableError."""
        now = self._clock()
        if self._is_failing:
            if now < self._closed_again_at:
                raise RedisUnavailableError("Redis failed a moment ago")
            self._closed_again_at = now + OPEN_FOR_S  # this call is the probe; others still wait
        try:
            result = await operation()
            _keep_cancellation()
        except (RedisError, OSError, TimeoutError) as error:
            if not self._is_failing:
                logger.warning("Redis is unavailable: %s", error)
            self._is_failing = True
            self._closed_again_at = self._clock() + OPEN_FOR_S
            raise RedisUnavailableError(str(error)) from error
        if self._is_failing:
            logger.warning("Redis is available again")
            self._is_failing = False
        return result


def _keep_cancellation() -> None:
    """Raises CancelledError if this task was cancelled while it waited.

    `asyncio.wait_for` of Python 3.11, which redis-py calls, swallows a cancellation that arrives
    together with the result (CPython issue 86296). A client who left at that moment would never be
    noticed again.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
