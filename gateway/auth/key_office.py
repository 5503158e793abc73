"""API keys as the admin API handles them: changed once, also where Redis' answer is lost, and audited."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import redis

from shared.api_key_settings import check_settings
from shared.api_keys import (
    MAX_ATTEMPTS,
    ApiKeyError,
    ApiKeyStore,
    NewApiKey,
    with_new_secret,
)
from shared.audit import AUDIT_FIELD, MAX_AUDIT_RECORDS, AuditRecord, audit_bytes
from shared.identifiers import TenantId
from shared.redis_schema import ApiKeyRecord, RedisKeys

logger = logging.getLogger(__name__)


class KeyOffice:
    """Blocks: to be used in a thread. All methods may raise redis.RedisError, after which nobody knows
    whether something was changed, and ApiKeyError, after which nothing was."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, pepper: bytes) -> None:
        self._client = client
        self._keys = keys
        self._pepper = pepper
        self._store = ApiKeyStore(client, keys, pepper)

    def close(self) -> None:
        self._client.close()

    def all_keys(self) -> list[ApiKeyRecord]:
        return self._store.list()

    def get(self, key_id: str) -> ApiKeyRecord:
        return self._store.get(key_id)

    def create(self, tenant: TenantId, fields: dict[str, Any], actor: str) -> NewApiKey:
        """`fields`: of ApiKeyRecord. Raises KeySettingError."""
        check_settings(fields)
        made = self._store.create(tenant, **fields)
        self._audit("key.create", made.record, fields, actor)
        return made

    def rotate(self, key_id: str, overlap_s: float, actor: str) -> NewApiKey:
        made: list[NewApiKey] = []

        def rotated(record: ApiKeyRecord) -> ApiKeyRecord:
            made[:] = [with_new_secret(record, self._pepper, overlap_s)]
            return made[0].record

        record = self.change(key_id, rotated, "key.rotate", {"overlap_s": overlap_s}, actor)
        return NewApiKey(made[0].secret, record)

    def change(
        self,
        key_id: str,
        changed: Callable[[ApiKeyRecord], ApiKeyRecord],
        action: str,
        told: dict[str, Any],
        actor: str,
    ) -> ApiKeyRecord:
        """The key as it is then. `changed` is called anew if others write in between."""
        for _ in range(MAX_ATTEMPTS):
            read = self._store.get(key_id)
            record = msgspec.structs.replace(changed(read), version=read.version + 1)
            result = self._store.write(record, read.version)
            # Refused, since it is there already: see `create`.
            if result == "ok" or self._store.get(key_id) == record:
                self._audit(action, record, told, actor)
                return record
            if result == "revoked":
                raise ApiKeyError(f"{key_id} is revoked, and stays so", "key_id")
            if result != "conflict":
                raise ApiKeyError(f"{key_id} cannot be changed: it is {result}", "key_id")
        raise ApiKeyError(f"{key_id} is being changed by others all the time; try again", "key_id")

    def _audit(self, action: str, record: ApiKeyRecord, told: dict[str, Any], actor: str) -> None:
        """After the change, which must not be told as if it had failed."""
        entry = AuditRecord(
            change_id=secrets.token_hex(12),
            actor=actor,
            action=action,
            object=record.key_id,
            change={"tenant": record.tenant, "version": record.version, **_plain(told)},
        )
        try:
            self._client.xadd(
                self._keys.audit,
                {AUDIT_FIELD: audit_bytes(entry)},
                maxlen=MAX_AUDIT_RECORDS,
                approximate=True,
            )
        except redis.RedisError as error:
            logger.error("%s of %s by %s is not in the audit: %s", action, record.key_id, actor, error)


def _plain(told: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.model_dump(exclude_defaults=True) if hasattr(value, "model_dump") else value
        for name, value in told.items()
    }
