"""The one API key that a stack makes by itself, so that there is something to try it with."""

from __future__ import annotations

from typing import Any

import msgspec

from compose.run_directory import RunDirectory
from shared.api_keys import ApiKeyStore, digest_of
from shared.identifiers import TenantId
from shared.redis_schema import ApiKeyRecord, RedisKeys, from_json


def demo_key(directory: RunDirectory, client: Any, keys: RedisKeys, pepper: str, tenant: TenantId) -> str:
    """The key of this run directory. A new one only if Redis does not (or no longer) know it for `tenant`."""
    secrets = directory.secrets()
    if secrets.demo_key is not None:
        stored = client.get(keys.api_key(digest_of(secrets.demo_key, pepper.encode())))
        if stored is not None and from_json(ApiKeyRecord, stored).tenant == tenant:
            return secrets.demo_key
    made = ApiKeyStore(client, keys, pepper.encode()).create(tenant)
    directory.keep_secrets(msgspec.structs.replace(secrets, demo_key=made.secret))
    return made.secret
