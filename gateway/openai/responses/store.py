"""Answers that can be looked up later and gone on from: by tenant, for a time, in Redis."""

from __future__ import annotations

import logging

import msgspec
import redis.asyncio
from redis.exceptions import ResponseError

from gateway import long_work
from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import unavailable
from gateway.openai.responses.identity import is_response_id
from shared.identifiers import TenantId
from shared.redis_schema import RedisKeys, ResponseRecord, from_json, to_json

logger = logging.getLogger(__name__)

LONG_RECORD_BYTES = 65_536  # reading or writing more than this takes milliseconds


class ResponseStore:
    """What is not stored, for whichever reason, is an answer all the same: `put` never raises for it."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        breaker: RedisBreaker,
        *,
        lifetime_s: int,
        max_bytes: int,
    ) -> None:
        self._client = client
        self._keys = keys
        self._breaker = breaker
        self._lifetime_s = lifetime_s
        self._max_bytes = max_bytes

    @property
    def is_on(self) -> bool:
        return self._lifetime_s > 0

    async def put(self, tenant: TenantId, record: ResponseRecord) -> bool:
        """Whether it is stored now."""
        if not self.is_on:
            return False
        response_id = record.response["id"]
        value = await long_work.do(lambda: to_json(record), is_long=_is_long(record))
        if len(value) > self._max_bytes:
            logger.warning("%s is not stored: it has %d bytes", response_id, len(value))
            return False
        key = self._keys.response(tenant, response_id)
        try:
            return await self._breaker.call(lambda: self._set(key, value))
        except RedisUnavailableError:
            logger.warning("%s is not stored: Redis is unavailable", response_id)
            return False

    async def get(self, tenant: TenantId, response_id: str) -> ResponseRecord | None:
        """None: there is none, or it is another tenant's. Raises ApiError 503 if it cannot be known."""
        if not is_response_id(response_id):
            return None
        key = self._keys.response(tenant, response_id)
        try:
            value = await self._breaker.call(lambda: self._client.get(key))
        except RedisUnavailableError as error:
            raise _cannot_be_reached() from error
        if value is None:
            return None
        found = value
        try:
            return await long_work.do(
                lambda: from_json(ResponseRecord, found), is_long=len(found) > LONG_RECORD_BYTES
            )
        except msgspec.DecodeError as error:  # of another version of Headrace, perhaps
            logger.error("%s is stored, but cannot be read: %s", response_id, error)
            return None

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        """Whether there was one. Raises ApiError 503 if that cannot be known."""
        if not is_response_id(response_id):
            return False
        key = self._keys.response(tenant, response_id)
        try:
            num_deleted: int = await self._breaker.call(lambda: self._client.delete(key))
        except RedisUnavailableError as error:
            raise _cannot_be_reached() from error
        return num_deleted > 0

    async def _set(self, key: str, value: bytes) -> bool:
        try:
            await self._client.set(key, value, ex=self._lifetime_s)
        except ResponseError as error:
            # Redis is there and says no: it is full, perhaps. That must not count as an outage, which
            # would cost other requests their limits and their keys.
            logger.warning("Redis does not take a response: %s", error)
            return False
        return True


def _is_long(record: ResponseRecord) -> bool:
    return len(record.input_items) > 64 or (record.response["usage"] or {}).get("total_tokens", 0) > 8192


def _cannot_be_reached() -> Exception:
    return unavailable("Stored responses cannot be reached at the moment.", 1.0)
