"""The engines that Redis knows of, as commands and the supervisor see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.identifiers import EngineId
from shared.redis_schema import EngineRecord, RedisKeys, from_json


class EngineRegistry:
    """Reads the records that engines keep alive there. May raise redis.RedisError."""

    def __init__(self, client: Any, keys: RedisKeys) -> None:
        self._client = client
        self._keys = keys

    def engines(self) -> list[EngineRecord]:
        """The living ones, by id. (Members of the set whose record has expired are pruned by gateways.)"""
        members = sorted(member.decode() for member in self._client.smembers(self._keys.engines))
        return self._records([EngineId(member) for member in members])

    def alive(self, engine_ids: Sequence[EngineId]) -> list[EngineRecord]:
        """Those of the given ones that have a record."""
        return self._records(engine_ids)

    def forget(self, engine_id: EngineId, pid: int) -> None:
        """Removes the record of an engine process that is known to be dead, ahead of its expiry.

        Only if it is still that process's record: whoever restarts the engine may have been faster.
        """
        if any(record.pid == pid for record in self._records([engine_id])):
            self._client.delete(self._keys.engine(engine_id))

    def _records(self, engine_ids: Sequence[EngineId]) -> list[EngineRecord]:
        if not engine_ids:
            return []
        values = self._client.mget([self._keys.engine(engine_id) for engine_id in engine_ids])
        return [from_json(EngineRecord, value) for value in values if value is not None]
