"""A time limit that tells a silent peer from a process that was itself held up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

GRACE_S = 0.005
# Turns of the event loop until an answer that has come is read: the socket, the stream, who waits for it.
NUM_LOOKS = 4
MAX_EXTENSIONS = 3


class Patience:
    """As asyncio.timeout. But when the time is over, the event loop first looks some times more at what has
    come: where it stood still for longer than the limit, or has much to do in each turn, the answer may have
    been there all the time. And a peer that `is_alive` gets the same time again, up to four times in all."""

    def __init__(self, limit_s: float, is_alive: Callable[[], bool] | None = None) -> None:
        self._limit_s = limit_s
        self._is_alive = is_alive
        self._num_extensions_left = MAX_EXTENSIONS if is_alive is not None else 0
        self._has_expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a task waits"
        self._task = task
        self._num_cancelled_before = task.cancelling()
        self._loop = task.get_loop()
        self._grace_s = min(GRACE_S, self._limit_s / 4) / NUM_LOOKS
        self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if not self._has_expired:
            return
        is_only_ours = self._task.uncancel() <= self._num_cancelled_before
        if is_only_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError("no answer in time") from error

    def _begin(self) -> None:
        until_first_look_s = self._limit_s - NUM_LOOKS * self._grace_s
        self._handle = self._loop.call_later(until_first_look_s, self._look_again, NUM_LOOKS)

    def _look_again(self, num_left: int) -> None:
        if num_left:
            self._handle = self._loop.call_later(self._grace_s, self._look_again, num_left - 1)
        elif self._num_extensions_left and self._is_alive is not None and self._is_alive():
            self._num_extensions_left -= 1
            self._begin()
        else:
            self._has_expired = True
            self._task.cancel()


def patience(limit_s: float, is_alive: Callable[[], bool] | None = None) -> Patience:
    return Patience(limit_s, is_alive)
