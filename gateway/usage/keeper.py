"""Takes every usage row of this gateway and sees that it gets where it is to be kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import redis.asyncio

from gateway.breaker import RedisBreaker
from gateway.usage.database_file import UsageFile
from gateway.usage.outlet import PlaceUnavailableError, UsageOutlet
from gateway.usage.stream import UsageStream
from shared.config import UsageConfig
from shared.identifiers import GatewayId
from shared.redis_schema import RedisKeys
from shared.usage import UsageRecord

logger = logging.getLogger(__name__)

FORGET_INTERVAL_S = 3600.0
FORGOTTEN_AT_ONCE = 1000  # some ten milliseconds, for which rows that are to be written have to wait
FORGET_PAUSE_S = 0.05
DAY_S = 86_400.0


class UsageKeeper:
    """A keeper of the ledger. Each place has a queue of its own: trouble with one does not hold the other."""

    def __init__(
        self,
        config: UsageConfig,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        breaker: RedisBreaker,
        gateway_id: GatewayId,
        *,
        on_dropped: Callable[[str], None],
    ) -> None:
        """`on_dropped` is told the name of the place, for each row that it will never have."""
        self._file = UsageFile(Path(config.sqlite)) if config.sqlite is not None else None
        self._keep_days = config.sqlite_keep_days
        stream = UsageStream(client, keys, breaker, gateway_id, max_rows=config.max_rows)
        self._outlets = [
            UsageOutlet(place, max_waiting=config.max_waiting_rows, on_dropped=on_dropped)
            for place in ((stream if config.max_rows else None), self._file)
            if place is not None
        ]

    def put(self, row: UsageRecord) -> None:
        for outlet in self._outlets:
            outlet.put(row)

    async def follow(self) -> None:
        """Writes for ever; waits for ever if there is nowhere to."""
        async with asyncio.TaskGroup() as tasks:
            for outlet in self._outlets:
                tasks.create_task(outlet.follow())
            if self._file is not None and self._keep_days is not None:
                tasks.create_task(self._forget(self._file, self._keep_days * DAY_S))
            await asyncio.Event().wait()

    async def close(self) -> None:
        """The last rows, when `follow` has ended."""
        await asyncio.gather(*(outlet.close() for outlet in self._outlets))
        if self._file is not None:
            await self._file.close()

    async def _forget(self, file: UsageFile, keep_s: float) -> None:
        """Deletes what is too old, for ever: in small batches, between which rows are written.

        Of gateways that share the file each does, since each of them may be the only one tomorrow.
        """
        while True:
            num_gone = 0
            try:
                num_gone = await file.delete_before(time.time() - keep_s, FORGOTTEN_AT_ONCE)
            except PlaceUnavailableError as error:
                logger.warning("old usage rows stay in %s for now: %s", file.name, error)
            await asyncio.sleep(FORGET_PAUSE_S if num_gone == FORGOTTEN_AT_ONCE else FORGET_INTERVAL_S)
