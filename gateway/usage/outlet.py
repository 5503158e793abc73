"""Rows on their way to one place where they are kept: batched, in a bounded queue, never waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shared.usage import UsageRecord

logger = logging.getLogger(__name__)

BATCH_ROWS = 200
BATCH_INTERVAL_S = 0.5
RETRY_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 3.0


class PlaceUnavailableError(Exception):
    """Rows cannot be written at the moment. The same batch will be tried again."""


class Place(Protocol):
    """Where rows are kept."""

    @property
    def name(self) -> str: ...

    async def write(self, number: int, rows: Sequence[UsageRecord]) -> None:
        """A batch that is written twice under its number counts once. Raises PlaceUnavailableError."""


class UsageOutlet:
    """Owns the rows until their place has them. `put` is all that a request has to do with it."""

    def __init__(self, place: Place, *, max_waiting: int, on_dropped: Callable[[str], None]) -> None:
        self._place = place
        self._max_waiting = max_waiting
        self._on_dropped = on_dropped
        self._waiting: deque[UsageRecord] = deque()
        self._batch: list[UsageRecord] = []  # that is being written, or could not be
        self._number = 1  # of that batch
        self._is_due = asyncio.Event()
        self._is_failing = False
        self._is_dropping = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._batch)

    def put(self, row: UsageRecord) -> None:
        """Beyond the bound the new rows are dropped, and counted."""
        num_waiting = len(self._waiting)
        if num_waiting >= self._max_waiting:
            self._drop()
            return
        self._waiting.append(row)
        if num_waiting + 1 == BATCH_ROWS:
            self._is_due.set()

    async def follow(self) -> None:
        """Writes for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_INTERVAL_S if self._is_failing else BATCH_INTERVAL_S):
                    await self._is_due.wait()
            self._is_due.clear()
            await self._write_all()

    async def close(self) -> None:
        """The last rows, when `follow` has ended. What cannot be written in time is lost, and said to be."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write_all()
        if self.num_waiting:
            logger.error("%d usage rows are lost: %s does not take them", self.num_waiting, self._place.name)

    async def _write_all(self) -> None:
        while self.num_waiting:
            if not self._batch:
                self._batch = [self._waiting.popleft() for _ in range(min(BATCH_ROWS, len(self._waiting)))]
            try:
                await self._place.write(self._number, self._batch)
            except PlaceUnavailableError as error:
                if not self._is_failing:
                    logger.warning("usage rows wait: %s does not take them: %s", self._place.name, error)
                self._is_failing = True
                return
            self._batch = []
            self._number += 1
            if self._is_failing:
                logger.warning("usage rows go to %s again", self._place.name)
            self._is_failing = self._is_dropping = False

    def _drop(self) -> None:
        self._on_dropped(self._place.name)
        if not self._is_dropping:
            self._is_dropping = True
            logger.error(
                "usage rows are dropped: %d wait for %s already", len(self._waiting), self._place.name
            )
