"""This engine's record in Redis, kept alive while the engine is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import redis

from shared.redis_schema import (
    ENGINE_RECORD_LIFETIME_S,
    ENGINE_REFRESH_INTERVAL_S,
    EngineRecord,
    RedisKeys,
    to_json,
)

logger = logging.getLogger(__name__)

# Another life of the engine may have written the record since; then it is not ours to remove.
_REMOVE_OWN_RECORD = """
local record = redis.call('GET', KEYS[1])
if record and cjson.decode(record)['epoch'] == ARGV[1] then
    return redis.call('DEL', KEYS[1])
end
return 0
"""


class Registry:
    """A thread that writes the record every second. Redis being away is logged once, and waited out."""

    def __init__(
        self,
        client: redis.Redis,
        keys: RedisKeys,
        record: Callable[[], EngineRecord],
        refresh_interval_s: float = ENGINE_REFRESH_INTERVAL_S,
    ) -> None:
        """`record` is asked for before each write, from this thread; `client` has bounded timeouts."""
        self._client = client
        self._keys = keys
        self._record = record
        self._refresh_interval_s = refresh_interval_s
        self._wake = threading.Event()
        self._stopping = False
        self._is_reachable = True
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def refresh(self) -> None:
        """Writes the record now, because its state has changed."""
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread and removes the record, if Redis answers and the record is ours."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._attempt(self._write)
            self._wake.wait(self._refresh_interval_s)
            self._wake.clear()
        self._attempt(self._remove)
        self._client.close()

    def _attempt(self, operation: Callable[[EngineRecord], None]) -> None:
        try:
            operation(self._record())
        except (redis.RedisError, OSError) as error:
            if self._is_reachable:
                logger.warning("Redis does not take this engine's record: %s", error)
            self._is_reachable = False
        else:
            if not self._is_reachable:
                logger.info("Redis takes this engine's record again")
            self._is_reachable = True

    def _write(self, record: EngineRecord) -> None:
        # The record first: a member of the set without one would be pruned by readers.
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(self._keys.engine(record.engine_id), to_json(record), ex=ENGINE_RECORD_LIFETIME_S)
        pipeline.sadd(self._keys.engines, record.engine_id)
        pipeline.execute()

    def _remove(self, record: EngineRecord) -> None:
        key = self._keys.engine(record.engine_id)
        if self._client.eval(_REMOVE_OWN_RECORD, 1, key, record.epoch):
            self._client.srem(self._keys.engines, record.engine_id)
