"""Work whose time depends on what a client asked for: long pieces of it run beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

MANY_SCORED_TOKENS = 256  # with 20 alternatives each they take some 20 ms to be named or written

ResultT = TypeVar("ResultT")


async def do(work: Callable[[], ResultT], *, is_long: bool) -> ResultT:
    """In a thread if it is long, which costs about 0.1 ms. A thread that nobody waits for any more goes on to
    the end of its work, so the work must not change what others still use."""
    return await asyncio.to_thread(work) if is_long else work()
