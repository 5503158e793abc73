"""API keys: how they are made, and how they are looked up without being stored.

A key has 256 random bits, so an HMAC is enough: there is nothing to guess that a slow password
hash would protect. The pepper lives outside Redis; a stolen Redis dump holds no usable key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import Any, NamedTuple

from shared.identifiers import TenantId
from shared.redis_schema import ApiKeyRecord, RedisKeys, from_json, to_json

KEY_PREFIX = "hr-"
NUM_DISPLAY_CHARACTERS = len(KEY_PREFIX) + 6


class NewApiKey(NamedTuple):
    secret: str  # shown once
    record: ApiKeyRecord


def new_api_key(tenant: TenantId) -> NewApiKey:
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    record = ApiKeyRecord(
        key_id=f"key_{secrets.token_hex(6)}",
        tenant=tenant,
        display_prefix=secret[:NUM_DISPLAY_CHARACTERS],
        created_at=time.time(),
    )
    return NewApiKey(secret, record)


def digest_of(secret: str, pepper: bytes) -> str:
    """The name under which a key is stored: HMAC-SHA-256 (RFC 2104) in hex."""
    return hmac.new(pepper, secret.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


class ApiKeyStore:
    """Keys in Redis, for commands. (The gateway only ever looks one up: `gateway/auth.py`.)"""

    def __init__(self, client: Any, keys: RedisKeys, pepper: bytes) -> None:
        self._client = client  # redis.Redis
        self._keys = keys
        self._pepper = pepper

    def create(self, tenant: TenantId) -> NewApiKey:
        key = new_api_key(tenant)
        self._put(key)
        return key

    def list(self) -> list[ApiKeyRecord]:
        digests = [digest.decode() for digest in self._client.hvals(self._keys.api_keys)]
        values = self._client.mget([self._keys.api_key(digest) for digest in digests]) if digests else []
        records = [from_json(ApiKeyRecord, value) for value in values if value is not None]
        return sorted(records, key=lambda record: record.created_at)

    def revoke(self, key_id: str) -> bool:
        """Whether there was such a key. Gateways refuse it as soon as their short cache runs out."""
        digest = self._client.hget(self._keys.api_keys, key_id)
        if digest is None:
            return False
        with self._client.pipeline(transaction=True) as pipe:
            pipe.delete(self._keys.api_key(digest.decode()))
            pipe.hdel(self._keys.api_keys, key_id)
            pipe.execute()
        return True

    def _put(self, key: NewApiKey) -> None:
        digest = digest_of(key.secret, self._pepper)
        with self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._keys.api_key(digest), to_json(key.record))
            pipe.hset(self._keys.api_keys, key.record.key_id, digest)
            pipe.execute()
