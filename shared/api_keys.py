"""API keys: how they are made, changed and kept without their secrets.

A secret has 256 random bits, so an HMAC is enough: there is nothing to guess that a slow password
hash would protect. The pepper lives outside Redis; a stolen Redis dump holds no usable key.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from shared.errors import UserError
from shared.identifiers import TenantId
from shared.redis_schema import ApiKeyRecord, ApiKeySecret, RedisKeys, from_json, to_json

logger = logging.getLogger(__name__)

KEY_PREFIX = "hr-"
NUM_DISPLAY_CHARACTERS = len(KEY_PREFIX) + 6
NUM_READ_AT_ONCE = 500
MAX_ATTEMPTS = 20  # at a change that others keep overtaking


class ApiKeyError(UserError):
    """What was asked for cannot be done to this key."""


class NewApiKey(NamedTuple):
    secret: str  # shown once
    record: ApiKeyRecord


def digest_of(secret: str, pepper: bytes) -> str:
    """The name under which a secret is known: HMAC-SHA-256 (RFC 2104) in hex."""
    return hmac.digest(pepper, secret.encode("utf-8", "surrogatepass"), "sha256").hex()


def unstored_api_key(tenant: TenantId, pepper: bytes, **fields: Any) -> NewApiKey:
    """A key that works as soon as it is stored. `fields`: of ApiKeyRecord."""
    secret, now = _fresh_secret(), time.time()
    record = ApiKeyRecord(
        key_id=f"key_{secrets.token_hex(6)}",
        tenant=tenant,
        created_at=now,
        version=1,
        secrets=[_secret_record(secret, pepper, now)],
        **fields,
    )
    return NewApiKey(secret, record)


def with_new_secret(record: ApiKeyRecord, pepper: bytes, overlap_s: float) -> NewApiKey:
    """The key with a further secret; the one that it had works for `overlap_s` more.

    Raises ApiKeyError if there are two already: clients that have not changed yet would be cut off.
    """
    secret, now = _fresh_secret(), time.time()
    live = _live_secrets(record, now) if overlap_s > 0 else []
    if len(live) > 1:
        raise ApiKeyError(
            f"{record.key_id} has two secrets already: end the older one first (`headrace keys retire`)"
        )
    ending = [
        msgspec.structs.replace(old, not_after=min(now + overlap_s, old.not_after or float("inf")))
        for old in live
    ]
    newest = _secret_record(secret, pepper, now)
    return NewApiKey(secret, msgspec.structs.replace(record, secrets=[newest, *ending]))


def without_old_secret(record: ApiKeyRecord) -> ApiKeyRecord:
    """Raises ApiKeyError if it has no second one."""
    if len(_live_secrets(record, time.time())) < 2:
        raise ApiKeyError(f"{record.key_id} has one secret only")
    return msgspec.structs.replace(record, secrets=record.secrets[:1])


def revoked(record: ApiKeyRecord) -> ApiKeyRecord:
    return msgspec.structs.replace(record, revoked_at=time.time())


class ApiKeyStore:
    """Keys in Redis, for commands. (The gateway only ever looks them up: `gateway/auth/known_keys.py`.)

    All methods may raise redis.RedisError, and msgspec.DecodeError for what another program has written.
    """

    def __init__(self, client: Any, keys: RedisKeys, pepper: bytes) -> None:
        self._client = client  # redis.Redis
        self._keys = keys
        self._pepper = pepper
        self._script = client.register_script(
            resources.files("shared").joinpath("api_key_write.lua").read_text(encoding="utf-8")
        )

    def create(self, tenant: TenantId, **fields: Any) -> NewApiKey:
        """`fields`: of ApiKeyRecord. Raises ApiKeyError if another key has its id by chance."""
        made = unstored_api_key(tenant, self._pepper, **fields)
        if self.write(made.record, 0) != "ok":
            # It is there: as this very key, which the client has sent twice because the first answer was
            # lost, or as another one, and then this secret would never be let in.
            known = self.of_secret(made.secret)
            if known is None or known.key_id != made.record.key_id:
                raise ApiKeyError(f"there is another key {made.record.key_id} already; try again")
        return made

    def get(self, key_id: str) -> ApiKeyRecord:
        """Raises ApiKeyError if there is none."""
        stored = self._client.hget(self._keys.api_keys, key_id)
        if stored is None:
            raise ApiKeyError(f"there is no key {key_id!r}; see `headrace keys list`")
        return from_json(ApiKeyRecord, stored)

    def of_secret(self, secret: str) -> ApiKeyRecord | None:
        """The key with this secret, if it still has it; perhaps revoked or expired."""
        digest = digest_of(secret, self._pepper)
        key_id = self._client.hget(self._keys.api_key_digests, digest)
        stored = None if key_id is None else self._client.hget(self._keys.api_keys, key_id)
        return None if stored is None else from_json(ApiKeyRecord, stored)

    def list(self) -> list[ApiKeyRecord]:
        """All that there have ever been, oldest first. Those that cannot be read are logged and left out."""
        records = {}
        for key_id, value in self._client.hscan_iter(self._keys.api_keys, count=NUM_READ_AT_ONCE):
            try:
                records[key_id] = from_json(ApiKeyRecord, value)
            except msgspec.DecodeError as error:
                logger.warning("the API key %r in Redis cannot be read: %s", key_id.decode(), error)
        return sorted(records.values(), key=lambda record: record.created_at)

    def rotate(self, key_id: str, overlap_s: float) -> NewApiKey:
        """Gives it a further secret; the old one works for `overlap_s` more. Raises ApiKeyError."""
        made: list[NewApiKey] = []

        def rotated(record: ApiKeyRecord) -> ApiKeyRecord:
            made[:] = [with_new_secret(record, self._pepper, overlap_s)]
            return made[0].record

        written = self.change(key_id, rotated)
        return NewApiKey(made[0].secret, written)

    def retire(self, key_id: str) -> ApiKeyRecord:
        """Ends the older one of its two secrets. Raises ApiKeyError."""
        return self.change(key_id, without_old_secret)

    def revoke(self, key_id: str) -> ApiKeyRecord:
        """Ends it for good; gateways refuse it within seconds. Raises ApiKeyError."""
        return self.change(key_id, revoked)

    def change(self, key_id: str, changed: Callable[[ApiKeyRecord], ApiKeyRecord]) -> ApiKeyRecord:
        """The key as it is then. `changed` is called anew if others write in between. Raises ApiKeyError."""
        for _ in range(MAX_ATTEMPTS):
            read = self.get(key_id)
            if read.revoked_at is not None:
                raise ApiKeyError(f"{key_id} is revoked, and stays so")
            record = msgspec.structs.replace(changed(read), version=read.version + 1)
            # The second: the client has sent it twice, because the first answer was lost.
            if self.write(record, read.version) == "ok" or self.get(key_id) == record:
                return record
        raise ApiKeyError(f"{key_id} is being changed by others all the time; try again")

    def write(self, record: ApiKeyRecord, read_version: int) -> str:
        """What the script says. `read_version`: that this record follows; 0: it is new."""
        assert record.version == read_version + 1, "a record follows the one that was read"
        names = [self._keys.api_keys, self._keys.api_key_digests, self._keys.api_keys_version]
        result: bytes = self._script(names, [record.key_id, read_version, to_json(record)])
        return result.decode()


def _fresh_secret() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _secret_record(secret: str, pepper: bytes, now: float) -> ApiKeySecret:
    return ApiKeySecret(digest_of(secret, pepper), secret[:NUM_DISPLAY_CHARACTERS], now)


def _live_secrets(record: ApiKeyRecord, now: float) -> list[ApiKeySecret]:
    return [secret for secret in record.secrets if secret.not_after is None or now < secret.not_after]
