"""`/admin/keys`: API keys of tenants. A secret is told once, when it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import redis
from aiohttp import web

from gateway.admin.access import AdminAccess, actor_of, answer
from gateway.admin.key_bodies import KeySettingsBody, NewKeyBody, RotationBody
from gateway.auth.key_office import KeyOffice
from gateway.errors import ApiError, invalid_request
from gateway.openai.body import read_json
from gateway.openai.schema import AnyBody, check_body
from gateway.services import Services
from shared.api_key_settings import KeySettingError, with_settings
from shared.api_keys import ApiKeyError, NewApiKey, revoked, without_old_secret
from shared.identifiers import TenantId
from shared.moments import date_of
from shared.redis_schema import ApiKeyRecord
from shared.route_names import unknown_routes

ResultT = TypeVar("ResultT")


class KeysEndpoint:
    def __init__(self, services: Services, access: AdminAccess) -> None:
        self._services = services
        self._access = access
        self._office: KeyOffice = services.key_office

    async def list_all(self, request: web.Request) -> web.Response:
        self._access.check(request)
        tenant = request.query.get("tenant")
        records = await self._do(self._office.all_keys)
        data = [_told(record) for record in records if tenant in (None, record.tenant)]
        return answer({"object": "list", "data": data})

    async def get(self, request: web.Request) -> web.Response:
        self._access.check(request)
        return answer(_told(await self._existing(request)))

    async def create(self, request: web.Request) -> web.Response:
        self._access.check(request)
        body = await self._body(NewKeyBody, request)
        if TenantId(body.tenant) not in self._services.policy.current.tenants:
            raise invalid_request(f"There is no tenant {body.tenant!r}.", "tenant", "invalid_value")
        made = await self._do(
            partial(self._office.create, TenantId(body.tenant), body.fields(), actor_of(request))
        )
        return answer(_told_with_secret(made) | self._warnings(body), status=201)

    async def update(self, request: web.Request) -> web.Response:
        """Changes what the body names, and nothing else."""
        self._access.check(request)
        body = await self._body(KeySettingsBody, request)
        fields = body.fields()

        def changed(record: ApiKeyRecord) -> ApiKeyRecord:
            return with_settings(record, fields)

        return await self._change(request, changed, "key.update", fields, self._warnings(body))

    async def rotate(self, request: web.Request) -> web.Response:
        self._access.check(request)
        has_body = request.can_read_body
        overlap_s = (await self._body(RotationBody, request) if has_body else RotationBody()).overlap_s
        key_id = (await self._existing(request)).key_id
        made = await self._do(partial(self._office.rotate, key_id, overlap_s, actor_of(request)))
        return answer(_told_with_secret(made))

    async def retire(self, request: web.Request) -> web.Response:
        """Ends the older one of two secrets."""
        self._access.check(request)
        return await self._change(request, without_old_secret, "key.retire", {})

    async def revoke(self, request: web.Request) -> web.Response:
        """For good. Idempotent."""
        self._access.check(request)
        record = await self._existing(request)
        if record.revoked_at is not None:
            return answer(_told(record))
        return await self._change(request, revoked, "key.revoke", {})

    async def _change(
        self,
        request: web.Request,
        changed: Callable[[ApiKeyRecord], ApiKeyRecord],
        action: str,
        told: dict[str, Any],
        warnings: dict[str, Any] | None = None,
    ) -> web.Response:
        key_id = (await self._existing(request)).key_id
        change = partial(self._office.change, key_id, changed, action, told, actor_of(request))
        return answer(_told(await self._do(change)) | (warnings or {}))

    def _warnings(self, body: KeySettingsBody) -> dict[str, Any]:
        """What is said of routes that there are not, or not yet."""
        routes = self._services.policy.current.routes
        warnings = list(unknown_routes("models", body.models or (), routes))
        return {"warnings": warnings} if warnings else {}

    async def _existing(self, request: web.Request) -> ApiKeyRecord:
        """Raises ApiError 404."""
        key_id = request.match_info["key_id"]
        try:
            return await self._do(partial(self._office.get, key_id))
        except ApiError as error:
            if error.status != 409:
                raise
            raise ApiError(
                404,
                f"There is no key {key_id!r}.",
                kind="invalid_request_error",
                code="not_found",
                param="key_id",
            ) from error

    async def _body(self, kind: type[AnyBody], request: web.Request) -> AnyBody:
        return check_body(kind, await read_json(request, self._services.policy.current.options))

    async def _do(self, work: Callable[[], ResultT]) -> ResultT:
        """Raises ApiError 400 for a wrong field, 409 for what cannot be done to this key, and 503."""
        try:
            return await asyncio.to_thread(work)
        except KeySettingError as error:
            raise invalid_request(
                f"Invalid value for {error.field}: {error.message}.", error.field, "invalid_value"
            ) from error
        except ApiKeyError as error:
            raise ApiError(
                409, f"{error.message}.", kind="invalid_request_error", code="conflict", param="key_id"
            ) from error
        except redis.RedisError as error:
            raise ApiError(
                503,
                "Redis does not answer: look whether a change was made.",
                kind="api_error",
                code="outcome_unknown",
                retry_after_s=2.0,
            ) from error


def _told_with_secret(made: NewApiKey) -> dict[str, Any]:
    return {"secret": made.secret, **_told(made.record)}


def _told(record: ApiKeyRecord) -> dict[str, Any]:
    """Never with what it is found by."""
    limits = record.limits
    return {
        "key_id": record.key_id,
        "tenant": record.tenant,
        "name": record.name,
        "created_at": _moment(record.created_at),
        "not_before": _moment(record.not_before),
        "not_after": _moment(record.not_after),
        "revoked_at": _moment(record.revoked_at),
        "models": record.models,
        "cidrs": record.cidrs,
        "limits": None if limits is None else limits.model_dump(mode="json", exclude_defaults=True),
        "version": record.version,
        "secrets": [
            {
                "display_prefix": secret.display_prefix,
                "created_at": _moment(secret.created_at),
                "not_after": _moment(secret.not_after),
            }
            for secret in record.secrets
        ],
    }


def _moment(seconds: float | None) -> str | None:
    """What is no date is told as the number that it is."""
    if seconds is None:
        return None
    date = date_of(seconds)
    return str(seconds) if date is None else date.isoformat(timespec="seconds")
