"""Changes of the policy: what they make of the stored one, and why they are refused. Nothing here waits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
from pydantic import ValidationError

from gateway.errors import ApiError, invalid_request
from shared.config import HeadraceConfig, RouteConfig, TenantConfig
from shared.redis_schema import PolicyRecord

Entry = TenantConfig | RouteConfig
EntryKind = Literal["tenant", "route"]


class PolicyChange(Protocol):
    """What somebody wants to be different."""

    @property
    def action(self) -> str: ...

    @property
    def object(self) -> str: ...

    def applied_to(self, record: PolicyRecord, config: HeadraceConfig) -> PolicyRecord | None:
        """The record after it, still with the version of the one before; None: there is nothing to change.

        Raises ApiError 4xx for what must not be. `config`: the file's, with the models that run.
        """

    def told(self, before: PolicyRecord, after: PolicyRecord) -> dict[str, Any]:
        """For the audit, without secrets."""


@dataclass(frozen=True, slots=True)
class EntryChange:
    """One tenant or route of the admin API is set, or goes."""

    kind: EntryKind
    name: str
    entry: Entry | None  # None: it goes
    only_if_new: bool = False

    @property
    def action(self) -> str:
        return f"{self.kind}.{'delete' if self.entry is None else 'set'}"

    @property
    def object(self) -> str:
        return self.name

    def applied_to(self, record: PolicyRecord, config: HeadraceConfig) -> PolicyRecord | None:
        current = self._in_force(record)
        if self.entry is None:
            self._check_may_go(record, config)
        elif self.only_if_new and current is not None:
            raise version_conflict(f"There is a {self.kind} {self.name!r} already.", "If-None-Match")
        entries = self._of_admin(record)
        kept: list[Any] = [entry for entry in entries if entry.name != self.name]
        if self.entry is not None:
            # In its place, so that lists keep their order.
            index = next((i for i, entry in enumerate(entries) if entry.name == self.name), len(kept))
            kept.insert(index, self.entry)
        if kept == entries:
            return None
        changed = msgspec.structs.replace(record, **{f"admin_{self.kind}s": kept})
        check_policy(record, changed, config, self.entry)
        return changed

    def told(self, before: PolicyRecord, after: PolicyRecord) -> dict[str, Any]:
        return {"before": _document(self._in_force(before)), "after": _document(self._in_force(after))}

    def _of_admin(self, record: PolicyRecord) -> Sequence[Entry]:
        return record.admin_tenants if self.kind == "tenant" else record.admin_routes

    def _in_force(self, record: PolicyRecord) -> Entry | None:
        entries: Sequence[Entry] = (
            record.tenants_in_force if self.kind == "tenant" else record.routes_in_force
        )
        return next((entry for entry in entries if entry.name == self.name), None)

    def _check_may_go(self, record: PolicyRecord, config: HeadraceConfig) -> None:
        if any(entry.name == self.name for entry in self._of_admin(record)):
            return
        if self._in_force(record) is not None:
            raise _conflict(
                f"The {self.kind} {self.name!r} stands in the configuration file: take it out there. "
                "Only what the admin API has set can be deleted by it.",
            )
        if self.kind == "route" and any(model.name == self.name for model in config.models):
            raise _conflict(f"The route {self.name!r} is a model's own name, and goes with the model.")
        raise ApiError(
            404,
            f"There is no {self.kind} {self.name!r}.",
            kind="invalid_request_error",
            code="not_found",
            param="name",
        )


@dataclass(frozen=True, slots=True)
class FilePublication:
    """The file's tenants and routes in the place of the file's earlier ones. What the admin API has set
    stays, also what refers to something that is no more: the file must not undo it."""

    config: HeadraceConfig
    only_if_absent: bool = False

    @property
    def action(self) -> str:
        return "file.publish"

    @property
    def object(self) -> str:
        return "policy"

    def applied_to(self, record: PolicyRecord, config: HeadraceConfig) -> PolicyRecord | None:
        source_hash = source_hash_of(self.config)
        if record.version > 0 and (self.only_if_absent or record.source_hash == source_hash):
            return None
        return msgspec.structs.replace(
            record, source_hash=source_hash, tenants=self.config.tenants, routes=self.config.routes
        )

    def told(self, before: PolicyRecord, after: PolicyRecord) -> dict[str, Any]:
        is_first = before.version == 0
        return {
            "tenants": _names_changed([] if is_first else before.tenants, after.tenants),
            "routes": _names_changed([] if is_first else before.routes, after.routes),
        }


def file_record(config: HeadraceConfig) -> PolicyRecord:
    """Where nothing was published yet."""
    return PolicyRecord(0, source_hash_of(config), config.tenants, config.routes)


def source_hash_of(config: HeadraceConfig) -> str:
    source = msgspec.json.encode(
        [
            [tenant.model_dump(mode="json") for tenant in config.tenants],
            [route.model_dump(mode="json") for route in config.routes],
        ]
    )
    return hashlib.sha256(source).hexdigest()


def check_policy(
    before: PolicyRecord, after: PolicyRecord, config: HeadraceConfig, changed: Entry | None
) -> None:
    """By the very checks of the file. Raises ApiError 400 that says what of `changed` is wrong, or 409 if
    something else would be without what is deleted (None)."""
    if isinstance(changed, RouteConfig):
        known = [model.name for model in config.models]
        for index, arm in enumerate(changed.split):
            if arm.model not in known:
                raise invalid_request(
                    f"No model is named {arm.model!r}; there are {', '.join(known)}.",
                    f"split[{index}].model",
                    "invalid_value",
                )
    problem = _problem(config, after.tenants_in_force, after.routes_in_force)
    if problem is not None and _problem(config, before.tenants_in_force, before.routes_in_force) is not None:
        # There was one before, that a change of the file has left behind. It must not stand in the way.
        problem = (
            _problem(config, after.tenants_in_force, [changed]) if isinstance(changed, RouteConfig) else None
        )
    if problem is None:
        return
    if changed is None:
        raise _conflict(f"Something else needs it: {problem}.")
    raise invalid_request(f"This cannot be: {problem}.", None, "invalid_value")


def version_conflict(message: str, param: str = "If-Match") -> ApiError:
    return ApiError(412, message, kind="invalid_request_error", code="version_conflict", param=param)


def document_of(entry: Entry) -> dict[str, Any]:
    """As JSON, without what is as by default: what a person would write."""
    return entry.model_dump(mode="json", exclude_defaults=True)


def _problem(config: HeadraceConfig, tenants: list[TenantConfig], routes: list[RouteConfig]) -> str | None:
    """Of all of it together."""
    try:
        HeadraceConfig(gateway=config.gateway, models=config.models, tenants=tenants, routes=routes)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return None


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, kind="invalid_request_error", code="conflict", param="name")


def _document(entry: Entry | None) -> dict[str, Any] | None:
    return None if entry is None else document_of(entry)


def _names_changed(before: Sequence[Entry], after: Sequence[Entry]) -> dict[str, list[str]]:
    old, new = {entry.name: entry for entry in before}, {entry.name: entry for entry in after}
    return {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name, entry in new.items() if name in old and old[name] != entry],
    }
