"""Waiting until an instant."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadtest.precise_timer import PreciseTimer


@pytest.mark.parametrize("has_file", [True, False])
async def test_nobody_wakes_before_the_time(has_file: bool) -> None:
    """With timerfd, and with the loop's own timers, which the clock of another kind falls back to."""
    timer = PreciseTimer(time.monotonic_ns if has_file else lambda: time.monotonic_ns())
    for wait_us in (50, 400, 1499, 2500):
        due_ns = time.monotonic_ns() + wait_us * 1000
        await asyncio.wait_for(timer.wait_until(due_ns), 10)
        assert time.monotonic_ns() >= due_ns
    await timer.wait_until(time.monotonic_ns() - 1)  # past: at once
    timer.close()
    timer.close()


async def test_abandoned_wait_does_not_disturb_the_next_one() -> None:
    timer = PreciseTimer()
    waiting = asyncio.create_task(timer.wait_until(time.monotonic_ns() + 5_000_000))
    await asyncio.sleep(0)
    waiting.cancel()
    due_ns = time.monotonic_ns() + 20_000_000
    await asyncio.wait_for(timer.wait_until(due_ns), 10)
    assert time.monotonic_ns() >= due_ns
    timer.close()
