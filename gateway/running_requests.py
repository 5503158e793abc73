"""The generation requests that are being answered: waited for at the end, and then ended."""

from __future__ import annotations

import asyncio

LAST_WORDS_S = 2.0  # for ended requests to tell their clients


class RunningRequests:
    """Which handlers run. aiohttp's own shutdown waits for handlers, but cannot end them with a word."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self.are_ended = False  # whoever is cancelled from now on is cancelled by us, not by its client

    def enter(self) -> asyncio.Task[object]:
        """Takes note of the current task. Give the result to `leave`."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._tasks.add(task)
        return task

    def leave(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)

    async def drain(self, limit_s: float) -> None:
        """Waits until all have ended, or for so long; then ends the rest, which tell their clients."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=limit_s)
        self.are_ended = True
        rest = list(self._tasks)
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=LAST_WORDS_S)
