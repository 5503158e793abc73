"""The latest usage rows in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import ResponseError

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.usage.outlet import PlaceUnavailableError
from shared.identifiers import GatewayId
from shared.redis_schema import USAGE_BATCH_LIFETIME_S, RedisKeys
from shared.usage import UsageRecord


class UsageStream:
    """One script for a batch: a command for each row would cost ten times as much, here and there."""

    name = "Redis"

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        breaker: RedisBreaker,
        gateway_id: GatewayId,
        *,
        max_rows: int,
    ) -> None:
        self._breaker = breaker
        self._keys = [keys.usage, keys.usage_batch(gateway_id)]
        self._max_rows = max_rows
        self._encoder = msgspec.json.Encoder()
        self._append: Any = client.register_script(
            resources.files("gateway.usage").joinpath("rows.lua").read_text()
        )

    async def write(self, number: int, rows: Sequence[UsageRecord]) -> None:
        arguments = [self._max_rows, number, USAGE_BATCH_LIFETIME_S, *map(self._encoder.encode, rows)]
        try:
            refusal = await self._breaker.call(lambda: self._run(arguments))
        except RedisUnavailableError as error:
            raise PlaceUnavailableError(str(error)) from error
        if refusal is not None:
            raise PlaceUnavailableError(str(refusal)) from refusal

    async def _run(self, arguments: list[Any]) -> ResponseError | None:
        """Its refusal is no reason not to ask it for anything else: it may be full, and still know keys."""
        try:
            await self._append(keys=self._keys, args=arguments)
        except ResponseError as error:
            return error
        return None
