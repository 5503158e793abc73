"""A time limit that tells a silent peer from a process that was itself held up."""

from __future__ import annotations

import asyncio
from types import TracebackType

GRACE_S = 0.005


class Patience:
    """As asyncio.timeout. But when the time is over, the event loop first looks once more at what has come:
    where it stood still for longer than the limit, the answer may have been there all the time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._has_expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a task waits"
        self._task = task
        self._num_cancelled_before = task.cancelling()
        self._loop = task.get_loop()
        grace_s = min(GRACE_S, self._limit_s / 4)
        self._handle = self._loop.call_later(self._limit_s - grace_s, self._look_again, grace_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if not self._has_expired:
            return
        is_only_ours = self._task.uncancel() <= self._num_cancelled_before
        if is_only_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError("no answer in time") from error

    def _look_again(self, grace_s: float) -> None:
        self._handle = self._loop.call_later(grace_s, self._expire)

    def _expire(self) -> None:
        self._has_expired = True
        self._task.cancel()


def patience(limit_s: float) -> Patience:
    return Patience(limit_s)
