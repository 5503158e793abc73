"""`/admin/tenants` and `/admin/routes`: entries of the policy, listed, set and deleted one by one.

An answer of success means that the change is committed and in force here; other gateways follow within a
second. A refusal means that nothing was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from gateway.admin.access import AdminAccess, actor_of, answer, expected_version_of
from gateway.errors import ApiError, invalid_request, too_large
from gateway.openai.body import read_json
from gateway.openai.schema import check_section
from gateway.policy import own_routes
from gateway.policy_change import Entry, EntryChange, EntryKind, document_of
from gateway.services import Services
from shared.config import RouteConfig, TenantConfig
from shared.redis_schema import PolicyRecord

MAX_ENTRY_BYTES = 512 * 1024  # one document holds the whole policy, and each gateway reads it


class EntriesEndpoint:
    """Of one kind."""

    def __init__(self, services: Services, access: AdminAccess, kind: EntryKind) -> None:
        self._services = services
        self._access = access
        self._kind = kind

    async def list_all(self, request: web.Request) -> web.Response:
        self._access.check(request)
        version = self._services.policy.current.version
        return answer({"object": "list", "policy_version": version, "data": self.entries()}, version=version)

    async def get(self, request: web.Request) -> web.Response:
        self._access.check(request)
        version = self._services.policy.current.version
        return answer({"policy_version": version, **self._entry(_name_in(request))}, version=version)

    async def put(self, request: web.Request) -> web.Response:
        self._access.check(request)
        name = _name_in(request)
        document = await read_json(request, self._services.policy.current.options)
        change = EntryChange(
            self._kind,
            name,
            self._checked(name, document),
            only_if_new=request.headers.get("If-None-Match", "").strip() == "*",
        )
        was_there = self._find(name) is not None
        record = await self._commit(request, change)
        told = {"policy_version": record.version, **_described(self._kind, name, record)}
        if isinstance(change.entry, TenantConfig):
            # No refusal: who sets up both may begin with either.
            warnings = self._services.policy.current.unknown_routes(change.entry)
            told |= {"warnings": warnings} if warnings else {}
        return answer(told, status=200 if was_there else 201, version=record.version)

    async def delete(self, request: web.Request) -> web.Response:
        """An entry of the admin API goes; the file's of the same name is in force again, if there is one."""
        self._access.check(request)
        name = _name_in(request)
        record = await self._commit(request, EntryChange(self._kind, name, None))
        now = None
        if any(entry.name == name for entry in _entries_of(self._kind, record).values()):
            now = _described(self._kind, name, record)
        told = {"policy_version": record.version, "name": name, "deleted": True, "now": now}
        return answer(told, version=record.version)

    def entries(self) -> list[dict[str, Any]]:
        """Those in force, with who said so."""
        record = self._services.policy.record
        told = [_described(self._kind, name, record) for name in _entries_of(self._kind, record)]
        if self._kind == "route":
            known = _entries_of(self._kind, record)
            told += [_own(route) for name, route in self._own_routes().items() if name not in known]
        return told

    async def _commit(self, request: web.Request, change: EntryChange) -> PolicyRecord:
        return await self._services.policy.commit(
            change, actor=actor_of(request), expected_version=expected_version_of(request)
        )

    def _checked(self, name: str, document: object) -> Entry:
        """Raises ApiError 400 that names the first wrong field, or 413."""
        if not isinstance(document, dict):
            raise invalid_request("The request body must be a JSON object.")
        if document.get("name", name) != name:
            raise invalid_request(
                f"The body names {document['name']!r}, and the URL {name!r}.", "name", "invalid_value"
            )
        kind: type[Entry] = TenantConfig if self._kind == "tenant" else RouteConfig
        entry = check_section(kind, {**document, "name": name})
        if len(msgspec.json.encode(document_of(entry))) > MAX_ENTRY_BYTES:
            raise too_large(MAX_ENTRY_BYTES)
        return entry

    def _entry(self, name: str) -> dict[str, Any]:
        found = self._find(name)
        if found is None:
            raise ApiError(
                404,
                f"There is no {self._kind} {name!r}.",
                kind="invalid_request_error",
                code="not_found",
                param="name",
            )
        return found

    def _find(self, name: str) -> dict[str, Any] | None:
        record = self._services.policy.record
        if name in _entries_of(self._kind, record):
            return _described(self._kind, name, record)
        own = self._own_routes().get(name) if self._kind == "route" else None
        return None if own is None else _own(own)

    def _own_routes(self) -> dict[str, RouteConfig]:
        return own_routes(self._services.config)


def _name_in(request: web.Request) -> str:
    return request.match_info["name"]


def _entries_of(kind: EntryKind, record: PolicyRecord) -> Mapping[str, Entry]:
    """Those in force."""
    entries: list[Any] = record.tenants_in_force if kind == "tenant" else record.routes_in_force
    return {entry.name: entry for entry in entries}


def _described(kind: EntryKind, name: str, record: PolicyRecord) -> dict[str, Any]:
    admin: list[Any] = record.admin_tenants if kind == "tenant" else record.admin_routes
    file: list[Any] = record.tenants if kind == "tenant" else record.routes
    is_of_admin = any(entry.name == name for entry in admin)
    return {
        "name": name,
        "origin": "admin" if is_of_admin else "file",
        "hides_file": is_of_admin and any(entry.name == name for entry in file),
        "config": document_of(_entries_of(kind, record)[name]),
    }


def _own(route: RouteConfig) -> dict[str, Any]:
    """Of a model's own name."""
    return {"name": route.name, "origin": "model", "hides_file": False, "config": document_of(route)}
