"""The one API key that a stack makes by itself, so that there is something to try it with."""

from __future__ import annotations

from typing import Any

import msgspec

from compose.run_directory import RunDirectory
from shared.api_keys import ApiKeyStore
from shared.identifiers import TenantId
from shared.redis_schema import RedisKeys


def demo_key(directory: RunDirectory, client: Any, keys: RedisKeys, pepper: str, tenant: TenantId) -> str:
    """The key of this run directory. A new one only if Redis does not (or no longer) know it for `tenant`."""
    store, secrets = ApiKeyStore(client, keys, pepper.encode()), directory.secrets()
    if secrets.demo_key is not None:
        known = store.of_secret(secrets.demo_key)
        if known is not None and known.tenant == tenant and known.revoked_at is None:
            return secrets.demo_key
    made = store.create(tenant, name="demo")
    directory.keep_secrets(msgspec.structs.replace(secrets, demo_key=made.secret))
    return made.secret
