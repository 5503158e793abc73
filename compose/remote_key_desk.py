"""API keys as the commands handle them where a stack is known by its URL: through its admin API."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

from compose.gateway_client import GatewayClient
from compose.key_settings import KeySettings
from compose.operator_name import actor_headers
from compose.stack_access import AdminApiAccess
from shared.api_keys import NewApiKey
from shared.config import STORED, Limits
from shared.identifiers import TenantId
from shared.moments import date_of
from shared.redis_schema import ApiKeyRecord, ApiKeySecret

NOT_TOLD = ""  # the digests of secrets stay in Redis


class RemoteKeyDesk:
    """Does what KeyDesk does. All methods may raise GatewayError, and UserError for what cannot be done."""

    def __init__(self, access: AdminApiAccess, warn: Callable[[str], None]) -> None:
        """`warn` is told what is odd, but no reason to refuse it."""
        self._client = GatewayClient(access.url, access.token)
        self._warn = warn

    def create(self, tenant: str, settings: KeySettings | None = None) -> NewApiKey:
        fields = settings.of_new_key() if settings is not None else {}
        made = self._ask("POST", "/admin/keys", {"tenant": tenant, **_body(fields)})
        return NewApiKey(made["secret"], _record(made))

    def get(self, key_id: str) -> ApiKeyRecord:
        return _record(self._ask("GET", _path(key_id)))

    def list(self) -> list[ApiKeyRecord]:
        return [_record(document) for document in self._ask("GET", "/admin/keys")["data"]]

    def update(self, key_id: str, settings: KeySettings) -> ApiKeyRecord:
        """A limit that others change meanwhile is lost: the API takes the limits of a key as one."""
        before = self.get(key_id)
        settings.applied_to(before)  # to name the flag, as here alone it can be
        return _record(self._ask("PATCH", _path(key_id), _body(settings.fields(before.limits))))

    def rotate(self, key_id: str, overlap_s: float) -> NewApiKey:
        made = self._ask("POST", f"{_path(key_id)}/rotate", {"overlap_s": overlap_s})
        return NewApiKey(made["secret"], _record(made))

    def retire(self, key_id: str) -> ApiKeyRecord:
        return _record(self._ask("POST", f"{_path(key_id)}/retire"))

    def revoke(self, key_id: str) -> ApiKeyRecord:
        return _record(self._ask("POST", f"{_path(key_id)}/revoke"))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        document, _ = self._client.ask(method, path, body, actor_headers())
        for warning in document.get("warnings", ()):
            self._warn(warning)
        return document


def _path(key_id: str) -> str:
    return f"/admin/keys/{quote(key_id, safe='')}"


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a key's record as the API takes them."""
    return {name: _plain(name, value) for name, value in fields.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Limits):
        return value.model_dump(mode="json", exclude_defaults=True)
    if name in ("not_before", "not_after") and value is not None:
        date = date_of(value)
        assert date is not None, "it was checked"
        return date.isoformat()
    return value


def _record(document: dict[str, Any]) -> ApiKeyRecord:
    limits = document["limits"]
    created_at = _seconds(document["created_at"])
    assert created_at is not None, "every key has been made"
    return ApiKeyRecord(
        key_id=document["key_id"],
        tenant=TenantId(document["tenant"]),
        created_at=created_at,
        version=document["version"],
        secrets=[
            ApiKeySecret(
                NOT_TOLD,
                secret["display_prefix"],
                _seconds(secret["created_at"]) or 0.0,
                _seconds(secret["not_after"]),
            )
            for secret in document["secrets"]
        ],
        name=document["name"],
        not_before=_seconds(document["not_before"]),
        not_after=_seconds(document["not_after"]),
        revoked_at=_seconds(document["revoked_at"]),
        models=document["models"],
        cidrs=document["cidrs"],
        limits=None if limits is None else Limits.model_validate(limits, context=STORED),
    )


def _seconds(moment: str | None) -> float | None:
    """Of a date, or of the number that stands for what is none."""
    if moment is None:
        return None
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return float(moment)
