"""API keys as the commands handle them: only for tenants that exist, and with errors for people."""

from __future__ import annotations

from typing import Any

from shared.api_keys import ApiKeyStore, NewApiKey
from shared.errors import ConfigError
from shared.identifiers import TenantId
from shared.redis_schema import ApiKeyRecord, PolicyRecord, RedisKeys, from_json


class KeyDesk:
    """All methods may raise redis.RedisError."""

    def __init__(self, client: Any, keys: RedisKeys, pepper: str) -> None:
        self._client = client
        self._keys = keys
        self._store = ApiKeyStore(client, keys, pepper.encode())

    def create(self, tenant: str) -> NewApiKey:
        """Raises ConfigError for a tenant that the published policy does not have."""
        policy = self._client.get(self._keys.policy)
        if policy is not None:  # None: no gateway has run yet; nobody knows the tenants
            known = [entry.name for entry in from_json(PolicyRecord, policy).tenants]
            if tenant not in known:
                raise ConfigError(f"no tenant is named {tenant!r}; known: {', '.join(known)}", "tenant")
        return self._store.create(TenantId(tenant))

    def list(self) -> list[ApiKeyRecord]:
        return self._store.list()

    def tenant_of(self, key_id: str) -> TenantId:
        """Raises ConfigError when there is no such key."""
        for record in self._store.list():
            if record.key_id == key_id:
                return record.tenant
        raise _unknown(key_id)

    def revoke(self, key_id: str) -> None:
        """Raises ConfigError when there is no such key."""
        if not self._store.revoke(key_id):
            raise _unknown(key_id)


def _unknown(key_id: str) -> ConfigError:
    return ConfigError(f"there is no key {key_id!r}; see `headrace keys list`", "KEY_ID")
