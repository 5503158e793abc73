"""Usage rows in an SQLite file, by option: for billing, beyond what Redis keeps."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gateway.usage.outlet import PlaceUnavailableError
from shared.usage import UsageRecord
from shared.usage_database import UsageDatabase

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class UsageFile:
    """Several gateways may share the file. It is only touched in a thread: a disk may take its time."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._database: UsageDatabase | None = None
        # One thread: SQLite's connections belong to theirs.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage")

    async def write(self, number: int, rows: Sequence[UsageRecord]) -> None:
        try:
            await self._run(lambda database: database.insert(rows))
        except OverflowError:  # the one batch that it never takes must not hold up all others
            logger.exception("%d usage rows cannot be written to %s", len(rows), self.name)

    async def delete_before(self, moment: float, at_most: int) -> int:
        """How many rows have gone. Raises PlaceUnavailableError."""
        return await self._run(lambda database: database.delete_before(moment, at_most))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[UsageDatabase], ResultT]) -> ResultT:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._done, work)
        except (sqlite3.Error, OSError) as error:
            raise PlaceUnavailableError(str(error)) from error

    def _done(self, work: Callable[[UsageDatabase], ResultT]) -> ResultT:
        if self._database is None:
            self._database = UsageDatabase.open(self._path)
        try:
            return work(self._database)
        except sqlite3.Error:
            self._close()  # the file may have been replaced, or its disk: the next try opens it anew
            raise

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
