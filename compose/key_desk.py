"""API keys as the commands handle them: only for tenants that exist, with errors for people, and audited."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from compose.engine_registry import EngineRegistry
from compose.key_settings import KeySettings
from compose.operator_name import user_name
from shared.api_key_settings import MAX_OVERLAP_S
from shared.api_keys import ApiKeyStore, NewApiKey
from shared.audit import AUDIT_FIELD, MAX_AUDIT_RECORDS, AuditRecord, audit_bytes
from shared.config import Limits
from shared.errors import ConfigError
from shared.identifiers import TenantId
from shared.redis_schema import ApiKeyRecord, PolicyRecord, RedisKeys, from_json
from shared.route_names import unknown_routes

logger = logging.getLogger(__name__)


class KeyDesk:
    """All methods may raise redis.RedisError, and UserError for what cannot be done."""

    def __init__(
        self,
        client: Any,
        keys: RedisKeys,
        pepper: str,
        *,
        configured: Iterable[str] = (),
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """`configured`: names of models. `warn` is told what is odd, but no reason to refuse it."""
        self._configured = frozenset(configured)
        self._warn = warn
        self._client = client
        self._keys = keys
        self._store = ApiKeyStore(client, keys, pepper.encode())

    def create(self, tenant: str, settings: KeySettings | None = None) -> NewApiKey:
        """Raises ConfigError for a tenant that the published policy does not have."""
        policy = self._policy()
        if policy is not None:
            known = [entry.name for entry in policy.tenants_in_force]
            if tenant not in known:
                raise ConfigError(f"no tenant is named {tenant!r}; known: {', '.join(known)}", "tenant")
        fields = settings.of_new_key() if settings is not None else {}
        self._warn_of_unknown(fields)
        made = self._store.create(TenantId(tenant), **fields)
        self._audit("key.create", made.record, {"tenant": tenant, **fields})
        return made

    def get(self, key_id: str) -> ApiKeyRecord:
        return self._store.get(key_id)

    def list(self) -> list[ApiKeyRecord]:
        return self._store.list()

    def update(self, key_id: str, settings: KeySettings) -> ApiKeyRecord:
        record = self._store.change(key_id, settings.applied_to)
        self._warn_of_unknown(settings.fields(record.limits))
        self._audit(
            "key.update", record, {name: getattr(record, name) for name in settings.fields(record.limits)}
        )
        return record

    def rotate(self, key_id: str, overlap_s: float) -> NewApiKey:
        """Raises ConfigError for an old secret that would go on for more than a year."""
        if overlap_s > MAX_OVERLAP_S:
            raise ConfigError(f"--overlap: at most {MAX_OVERLAP_S / 86_400:.0f} days", "--overlap")
        made = self._store.rotate(key_id, overlap_s)
        self._audit("key.rotate", made.record, {"overlap_s": overlap_s})
        return made

    def retire(self, key_id: str) -> ApiKeyRecord:
        record = self._store.retire(key_id)
        self._audit("key.retire", record, {})
        return record

    def revoke(self, key_id: str) -> ApiKeyRecord:
        record = self._store.revoke(key_id)
        self._audit("key.revoke", record, {})
        return record

    def _policy(self) -> PolicyRecord | None:
        """That was published. None: no gateway has run yet; nobody knows tenants and routes."""
        stored = self._client.get(self._keys.policy)
        return None if stored is None else from_json(PolicyRecord, stored)

    def _warn_of_unknown(self, fields: dict[str, Any]) -> None:
        """Of what a key is to be good for: it may still come."""
        policy = self._policy() if fields.get("models") else None
        if policy is None:
            return
        running = EngineRegistry(self._client, self._keys).engines()
        known = {route.name for route in policy.routes_in_force} | {record.model for record in running}
        for problem in unknown_routes("--models", fields["models"], known | self._configured):
            self._warn(problem)

    def _audit(self, action: str, record: ApiKeyRecord, change: dict[str, Any]) -> None:
        """After the change, which is made by now: it must not be told as if it had failed, and a new
        secret must reach whoever asked for it."""
        try:
            self._write_audit(action, record, change)
        except Exception as error:  # whatever it is, the change is made
            logger.warning("%s of %s is not in the audit: %s", action, record.key_id, error)

    def _write_audit(self, action: str, record: ApiKeyRecord, change: dict[str, Any]) -> None:
        told = {
            name: value.model_dump(exclude_defaults=True) if isinstance(value, Limits) else value
            for name, value in change.items()
        }
        entry = AuditRecord(
            change_id=secrets.token_hex(12),
            actor=f"{user_name()} (headrace keys)",
            action=action,
            object=record.key_id,
            change={**told, "version": record.version},
        )
        self._client.xadd(
            self._keys.audit,
            {AUDIT_FIELD: audit_bytes(entry)},
            maxlen=MAX_AUDIT_RECORDS,
            approximate=True,
        )
