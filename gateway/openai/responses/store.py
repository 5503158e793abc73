"""Answers that can be looked up later and gone on from: by tenant, for a time, in Redis.

One that is made in the background is stored before it is begun. While it is made it has a *lease*, a small
key of its own that holds its status and lives on only as long as its gateway extends it. Who deletes the
lease, in one step with writing the record, has decided how the response ended: its gateway, or whoever
cancelled it. A record that says it is waiting, without a lease, is of a gateway that has died.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import redis.asyncio
from redis.exceptions import ResponseError

from gateway import long_work
from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import ApiError, invalid_request, unavailable
from gateway.openai.responses.identity import is_response_id
from shared.identifiers import TenantId
from shared.redis_schema import RESPONSE_LEASE_LIFETIME_S, RedisKeys, ResponseRecord, from_json, to_json

logger = logging.getLogger(__name__)

LONG_RECORD_BYTES = 65_536  # reading or writing more than this takes milliseconds
WAITING = "queued"  # what a record says until its response has ended; the lease has its true status
RESPONSE_TOO_LONG = "response_too_long"
LOST = "The gateway that made this response has ended before the response was complete."

# The record first: a Redis that is full refuses it, and the lease is left for another try.
_END = """
if redis.call('EXISTS', KEYS[1]) == 0 then
    return 0
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
redis.call('DEL', KEYS[1])
return 1
"""

ResultT = TypeVar("ResultT")


class ResponseStore:
    """What `put` cannot store, for whichever reason, is an answer all the same: it never raises for it."""

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
        self._end_script: Any = client.register_script(_END)

    @property
    def is_on(self) -> bool:
        return self._lifetime_s > 0

    async def put(self, tenant: TenantId, record: ResponseRecord) -> bool:
        """Whether it is stored now."""
        if not self.is_on:
            return False
        response_id = record.response["id"]
        value = await _written(record)
        if len(value) > self._max_bytes:
            logger.warning("%s is not stored: it has %d bytes", response_id, len(value))
            return False
        key = self._keys.response(tenant, response_id)
        try:
            return await self._breaker.call(lambda: self._set(key, value))
        except RedisUnavailableError:
            return False  # which its client is told; in the log the breaker has said so, once

    async def get(self, tenant: TenantId, response_id: str) -> ResponseRecord | None:
        """None: there is none, or it is another tenant's. Raises ApiError 503 if it cannot be known."""
        if not is_response_id(response_id):
            return None
        keys = self._keys_of(tenant, response_id)
        lease, value = await self._reached(lambda: self._client.mget(keys))
        if value is None:
            return None
        try:
            record = await long_work.do(
                lambda: from_json(ResponseRecord, value), is_long=len(value) > LONG_RECORD_BYTES
            )
        except msgspec.DecodeError as error:  # of another version of Headrace, perhaps
            logger.error("%s is stored, but cannot be read: %s", response_id, error)
            return None
        return _as_it_stands(record, lease)

    async def delete(self, tenant: TenantId, response_id: str) -> bool:
        """Whether there was one. Raises ApiError 503 if that cannot be known."""
        if not is_response_id(response_id):
            return False
        keys = self._keys_of(tenant, response_id)  # without a lease its gateway gives up
        return await self._reached(lambda: self._client.delete(*keys)) > 0

    # ------------------------------------------------------------------ what is made in the background

    async def begin(self, tenant: TenantId, record: ResponseRecord) -> None:
        """Stores a response that waits, with a lease. Raises ApiError 400 or 503: without this there is
        nothing to be asked for later."""
        assert record.response["status"] == WAITING, "the lease has its status from now on"
        value = await _written(record)
        if len(value) > self._max_bytes:
            raise invalid_request(
                "The conversation is too long to be stored, which one in the background has to be.", "input"
            )
        lease, key = self._keys_of(tenant, record.response["id"])
        if not await self._reached(lambda: self._set(key, value, lease)):
            raise _cannot_be_reached()

    async def note_progress(self, tenant: TenantId, response_id: str) -> None:
        """It has begun. Nothing depends on it, so a failure is passed over."""
        lease, _ = self._keys_of(tenant, response_id)
        try:
            await self._breaker.call(
                lambda: self._client.set(lease, "in_progress", ex=RESPONSE_LEASE_LIFETIME_S, xx=True)
            )
        except RedisUnavailableError:
            logger.warning("%s goes on to be told as queued: Redis is unavailable", response_id)

    async def extend_leases(self, responses: Sequence[tuple[TenantId, str]]) -> list[bool]:
        """Of each whether it still has one. Raises ApiError 503."""

        async def extend() -> list[bool]:
            async with self._client.pipeline(transaction=False) as pipe:
                for response in responses:
                    lease, _ = self._keys_of(*response)
                    pipe.expire(lease, RESPONSE_LEASE_LIFETIME_S)
                return list(map(bool, await pipe.execute()))

        return await self._reached(extend)

    async def end(self, tenant: TenantId, record: ResponseRecord) -> bool:
        """Stores how a response ended, unless it has ended already: whether it has by this. Raises ApiError
        500 if it is too long, 503 if Redis cannot be asked."""
        value = await _written(record)
        if len(value) > self._max_bytes:
            raise ApiError(
                500, "The response is too long to be stored.", kind="api_error", code=RESPONSE_TOO_LONG
            )
        keys = self._keys_of(tenant, record.response["id"])

        async def end() -> bool | None:
            try:
                return bool(await self._end_script(keys=keys, args=[value, self._lifetime_s]))
            except ResponseError as error:
                logger.warning("Redis does not take a response: %s", error)
                return None

        has_ended = await self._reached(end)
        if has_ended is None:
            raise _cannot_be_reached()
        return has_ended

    async def _reached(self, operation: Callable[[], Awaitable[ResultT]]) -> ResultT:
        try:
            return await self._breaker.call(operation)
        except RedisUnavailableError as error:
            raise _cannot_be_reached() from error

    def _keys_of(self, tenant: TenantId, response_id: str) -> tuple[str, str]:
        """Lease and record."""
        return self._keys.response_lease(tenant, response_id), self._keys.response(tenant, response_id)

    async def _set(self, key: str, value: bytes, lease: str | None = None) -> bool:
        try:
            if lease is None:
                await self._client.set(key, value, ex=self._lifetime_s)
                return True
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.set(key, value, ex=self._lifetime_s)
                pipe.set(lease, WAITING, ex=RESPONSE_LEASE_LIFETIME_S)
                await pipe.execute()
        except ResponseError as error:
            # Redis is there and says no: it is full, perhaps. That must not count as an outage, which
            # would cost other requests their limits and their keys.
            logger.warning("Redis does not take a response: %s", error)
            return False
        return True


async def _written(record: ResponseRecord) -> bytes:
    return await long_work.do(lambda: to_json(record), is_long=_is_long(record))


def _is_long(record: ResponseRecord) -> bool:
    return len(record.input_items) > 64 or (record.response["usage"] or {}).get("total_tokens", 0) > 8192


def _as_it_stands(record: ResponseRecord, lease: bytes | str | None) -> ResponseRecord:
    if record.response["status"] != WAITING:
        return record
    if lease is not None:
        status = lease if isinstance(lease, str) else lease.decode()
        return ResponseRecord({**record.response, "status": status}, record.input_items)
    error = {"code": "server_error", "message": LOST}
    return ResponseRecord({**record.response, "status": "failed", "error": error}, record.input_items)


def _cannot_be_reached() -> ApiError:
    return unavailable("Stored responses cannot be reached at the moment.", 1.0)
