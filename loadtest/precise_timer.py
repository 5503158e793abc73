"""Waiting until an instant to within a tenth of a millisecond.

Event loops round their timers to milliseconds. At 2,000 requests per second that is two requests, and
of a short first token it is several percent. Linux' timerfd_create(2) has no such step, costs two system
calls for a wait, and works for any event loop, which sees a file that becomes readable.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TIMER_ABSTIME = 1
_NANOSECONDS_PER_SECOND = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class PreciseTimer:
    """For one waiter at a time, in the running event loop. Falls back to the loop's own timers where the
    system has no timerfd, or the clock is not time.monotonic_ns. Never wakes before the time."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._spec = _Itimerspec()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = -1
        if clock_ns is time.monotonic_ns and hasattr(self._libc, "timerfd_create"):
            self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file >= 0:
            self._loop.add_reader(self._file, self._fire)

    async def wait_until(self, t_ns: int) -> None:
        while (wait_ns := t_ns - self._clock_ns()) > 0:
            if self._file < 0:
                await asyncio.sleep(wait_ns / _NANOSECONDS_PER_SECOND)
                continue
            self._waiter = self._loop.create_future()
            self._arm(t_ns)
            await self._waiter

    def close(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _arm(self, t_ns: int) -> None:
        value = self._spec.it_value
        value.tv_sec, value.tv_nsec = divmod(t_ns, _NANOSECONDS_PER_SECOND)
        failed = self._libc.timerfd_settime(self._file, _TIMER_ABSTIME, ctypes.byref(self._spec), None)
        if failed:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def _fire(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
