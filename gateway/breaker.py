"""Redis with a bounded wait, also when it is frozen: a few requests find out, the next ones need not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import BusyLoadingError, ResponseError

from gateway.patience import patience
from gateway.redis_errors import REDIS_ERRORS

logger = logging.getLogger(__name__)

OPEN_FOR_S = 1.0
NUM_FAILURES = 3  # in a row: a machine that is busy for a moment must not switch limits off
QUIET_S = 60.0  # between two outages that are told: one that comes and goes must not fill the log
T = TypeVar("T")


class RedisUnavailableError(Exception):
    """Redis did not answer in time, or has failed so recently that it was not asked."""


class RedisBreaker:
    """Runs Redis calls; after a few failures it refuses at once for a second, then lets one call try.

    Each kind of call has its own, since a Redis that is full answers those that only read.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        purpose: str = "keys",
        limit_s: float | None = None,
    ) -> None:
        """`limit_s`: longest wait for a call; None: the client's own."""
        self._clock = clock
        self.purpose = purpose
        self._limit_s = limit_s
        self._num_failures = 0  # since the last success
        self._closed_again_at = 0.0
        self._told_at = -QUIET_S
        self._is_told = False

    @property
    def is_open(self) -> bool:
        """Whether Redis counts as unavailable."""
        return self._num_failures >= NUM_FAILURES

    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        """The operation's result. Raises RedisUnavailableError."""
        if self.is_open:
            now = self._clock()
            if now < self._closed_again_at:
                raise RedisUnavailableError("Redis failed a moment ago")
            self._closed_again_at = now + OPEN_FOR_S  # this call is the probe; others still wait
        try:
            if self._limit_s is None:
                result = await operation()
            else:
                async with patience(self._limit_s):
                    result = await operation()
            _keep_cancellation()
        except REDIS_ERRORS as error:
            self.failed(error)
            raise RedisUnavailableError(str(error)) from error
        self.succeeded()
        return result

    def failed(self, error: BaseException) -> None:
        """A call has, whoever made it."""
        self._num_failures += 1
        if not self.is_open:
            return
        now = self._clock()
        self._closed_again_at = now + OPEN_FOR_S
        if not self._is_told and now - self._told_at >= QUIET_S:
            self._is_told, self._told_at = True, now
            logger.warning("Redis is unavailable for %s: %s", self.purpose, told(error))

    def succeeded(self) -> None:
        """A call has, whoever made it."""
        self._num_failures = 0
        if self._is_told:
            self._is_told = False
            logger.warning("Redis is available again for %s", self.purpose)


def told(error: BaseException) -> str:
    """What is wrong, for people: what helps against a Redis that is full does not help against a dead one."""
    if isinstance(error, ResponseError | BusyLoadingError):
        return f"it answers with an error: {error}"
    if isinstance(error, TimeoutError) or "timeout" in type(error).__name__.lower():
        return f"it is silent: {error}"
    return f"it cannot be reached: {error}"


def _keep_cancellation() -> None:
    """Raises CancelledError if this task was cancelled while it waited.

    `asyncio.wait_for` of Python 3.11, which redis-py calls, swallows a cancellation that arrives
    together with the result (CPython issue 86296). A client who left at that moment would never be
    noticed again.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
