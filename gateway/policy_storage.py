"""The policy in Redis: read, and changed by compare-and-set together with its audit record."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import ResponseError

from gateway.breaker import RedisBreaker, RedisUnavailableError
from gateway.errors import ApiError, unavailable
from gateway.policy_change import FilePublication, PolicyChange, file_record, version_conflict
from shared.audit import AUDIT_FIELD, MAX_AUDIT_RECORDS, AuditRecord, audit_bytes
from shared.config import HeadraceConfig
from shared.redis_schema import PolicyRecord, RedisKeys, from_json, to_json

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 20  # while others change it, too
COMMIT_LIMIT_US = 2_000_000  # after which Redis no longer takes a change that was on its way
NUM_RECENT_CHANGES = 200  # of the audit, among which one's own is looked for
ASK_AGAIN_AFTER_S = 0.25
ASK_LIMIT_S = 6.0


class UnreadablePolicyError(Exception):
    """Something is there that this version cannot read. It may be a newer one's: it is not overwritten."""


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    data: bytes
    record: PolicyRecord

    def with_file(self, config: HeadraceConfig) -> StoredPolicy:
        """What it would be if the file could be published."""
        record = msgspec.structs.replace(self.record, tenants=config.tenants, routes=config.routes)
        return StoredPolicy(self.data, record)


class PolicyStorage:
    def __init__(self, client: redis.asyncio.Redis, keys: RedisKeys, breaker: RedisBreaker) -> None:
        self._client = client
        self._keys = keys
        self._breaker = breaker
        self._commit: Any = client.register_script(
            resources.files("gateway").joinpath("commit_policy.lua").read_text()
        )

    async def read(self) -> bytes | None:
        """Raises RedisUnavailableError."""
        found: Any = await self._breaker.call(lambda: self._client.get(self._keys.policy))
        data: bytes | None = found
        return data

    async def commit(
        self,
        change: PolicyChange,
        config: HeadraceConfig,
        *,
        actor: str,
        expected_version: int | None = None,
    ) -> StoredPolicy:
        """The policy with this change, which every gateway will see; or as it is, if there is none to make.

        Raises ApiError 4xx if it was refused, and then nothing has changed; 503 with the code
        `outcome_unknown` if Redis was lost on the way, else if it could not be asked or refuses to write, as
        one that is full does. Raises UnreadablePolicyError.
        """
        change_id = secrets.token_hex(12)
        for _ in range(MAX_ATTEMPTS):
            try:
                data, now_us = await self._breaker.call(self._read_with_time)
            except RedisUnavailableError as error:
                if isinstance(error.__cause__, ResponseError):
                    raise _refused(error.__cause__) from error
                raise unavailable("Redis cannot be asked at the moment; nothing was changed.") from error
            before = file_record(config) if data is None else readable(data)
            if expected_version is not None and before.version != expected_version:
                raise version_conflict(
                    f"The policy has version {before.version} by now, not {expected_version}."
                )
            changed = change.applied_to(before, config)
            if changed is None:
                return StoredPolicy(data or b"", before)
            after = msgspec.structs.replace(changed, version=before.version + 1, change_id=change_id)
            stored = StoredPolicy(to_json(after), after)
            audit = audit_bytes(
                AuditRecord(
                    change_id=change_id,
                    actor=actor,
                    action=change.action,
                    object=change.object,
                    version_before=before.version,
                    version_after=after.version,
                    change=change.told(before, after),
                )
            )
            deadline_us = now_us + COMMIT_LIMIT_US
            if await self._is_committed(data, stored, audit, deadline_us, change):
                return stored
        raise unavailable("Others keep changing the policy; nothing was changed.", 1.0)

    async def _is_committed(
        self, data: bytes | None, stored: StoredPolicy, audit: bytes, deadline_us: int, change: PolicyChange
    ) -> bool:
        """False: somebody else was faster, or it came too late. Raises ApiError 503."""
        refusal: ResponseError | None = None
        arguments = [data or b"", stored.data, audit, deadline_us, MAX_AUDIT_RECORDS]
        try:
            outcome = await self._breaker.call(
                lambda: self._commit(keys=[self._keys.policy, self._keys.audit], args=arguments)
            )
        except RedisUnavailableError as error:
            if isinstance(error.__cause__, ResponseError):  # it is full, or a replica: asking on is no help
                refusal = error.__cause__
            elif isinstance(change, FilePublication):  # it is tried again anyway, and does nothing twice
                raise unavailable("Redis was lost on the way.") from error
            else:
                return await self._was_committed_after_all(stored.record.change_id, deadline_us)
        else:
            if outcome == 1:
                return True
        # redis-py sends a command once more when a connection breaks: the first one may have done it.
        try:
            is_committed = await self._breaker.call(lambda: self._has_change(stored.record.change_id))
        except RedisUnavailableError:
            is_committed = await self._was_committed_after_all(stored.record.change_id, deadline_us)
        if refusal is not None and not is_committed:
            raise _refused(refusal) from refusal
        return is_committed

    async def _was_committed_after_all(self, change_id: str, deadline_us: int) -> bool:
        """Asks until Redis is past the deadline, since what was sent may still be on its way.

        Raises ApiError 503 `outcome_unknown`.
        """
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                while True:
                    await asyncio.sleep(ASK_AGAIN_AFTER_S)
                    try:
                        _, now_us = await self._breaker.call(self._read_with_time)
                        if await self._breaker.call(lambda: self._has_change(change_id)):
                            return True
                    except RedisUnavailableError:
                        continue
                    if now_us > deadline_us:
                        return False
        except TimeoutError as error:
            raise ApiError(
                503,
                "Redis was lost while it was told of the change: look whether it was made.",
                kind="api_error",
                code="outcome_unknown",
                retry_after_s=2.0,
            ) from error

    async def _has_change(self, change_id: str) -> bool:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(self._keys.policy)
            pipe.xrevrange(self._keys.audit, count=NUM_RECENT_CHANGES)
            data, entries = await pipe.execute(raise_on_error=False)
        wanted = change_id.encode()
        if isinstance(data, bytes) and wanted in data:
            return True
        return isinstance(entries, list) and any(
            wanted in fields.get(AUDIT_FIELD, b"") for _, fields in entries
        )

    async def _read_with_time(self) -> tuple[bytes | None, int]:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(self._keys.policy)
            pipe.time()
            data, (seconds, microseconds) = await pipe.execute()
        return data, seconds * 1_000_000 + microseconds


def _refused(error: ResponseError) -> ApiError:
    reason = str(error).partition(" script: ")[0].rstrip(".")  # which line of ours it was is no help
    return unavailable(f"Redis answers with an error: {reason}; nothing was changed.")


def readable(data: bytes) -> PolicyRecord:
    """Raises UnreadablePolicyError."""
    try:
        return from_json(PolicyRecord, data)
    except (msgspec.DecodeError, ValueError) as error:
        raise UnreadablePolicyError(f"the policy in Redis cannot be read: {error}") from error
