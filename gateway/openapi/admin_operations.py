"""Operations of `/admin`, behind the operator's token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.admin.audit import DEFAULT_LIMIT, MAX_LIMIT
from gateway.admin.entry_body import RouteBody, TenantBody
from gateway.admin.key_bodies import KeySettingsBody, NewKeyBody, RotationBody
from gateway.admin.status import ResetBody
from gateway.admin.usage import DEFAULT_GROUPS, MAX_SECONDS
from gateway.openapi.answers.admin import (
    AuditList,
    DeletedRoute,
    DeletedTenant,
    ExperimentList,
    Key,
    KeyList,
    KeyWithSecret,
    Policy,
    RouteAnswer,
    RouteList,
    TenantAnswer,
    TenantList,
    UsageSumList,
)
from gateway.openapi.answers.operation import AdminStatus, ResetAnswer
from gateway.openapi.operation import BODY_ERRORS, Access, Operation
from shared.usage_database import GROUPINGS

OPERATION = "Operation"
POLICY = "Policy"
KEYS = "Keys"

_CHANGE_ERRORS = (401, 409, 412, 503)  # 409: something else says otherwise; 412: If-Match, If-None-Match

_GROUP = "|".join(GROUPINGS)
_GROUPS_PATTERN = f"^(({_GROUP})(,({_GROUP}))*)?$"


def _entries(kind: str, plural: str, body: Any, one: Any, several: Any, deleted: Any) -> Iterator[Operation]:
    path = f"/admin/{plural}"
    named = {"name": f"Of the {kind}; it may hold slashes."}
    title = kind.title()
    yield Operation(
        "GET", path, f"list{plural.title()}", POLICY, f"List the {plural} in force, and who said so.",
        access=Access.ADMIN, answers={200: several}, errors=(401,),
    )  # fmt: skip
    yield Operation(
        "GET", f"{path}/{{name}}", f"retrieve{title}", POLICY, f"Tell about one {kind}.",
        access=Access.ADMIN, parameters=named, answers={200: one}, errors=(401, 404),
    )  # fmt: skip
    yield Operation(
        "PUT", f"{path}/{{name}}", f"set{title}", POLICY, f"Set a {kind}, whatever the file says of it.",
        access=Access.ADMIN, parameters=named, body=body, answers={200: one, 201: one},
        errors=(*BODY_ERRORS, *_CHANGE_ERRORS),
    )  # fmt: skip
    yield Operation(
        "DELETE", f"{path}/{{name}}", f"delete{title}", POLICY,
        f"Take back what the admin API has set of a {kind}.",
        access=Access.ADMIN, parameters=named, answers={200: deleted}, errors=(400, 404, *_CHANGE_ERRORS),
    )  # fmt: skip


def _keys() -> Iterator[Operation]:
    path, one = "/admin/keys", "/admin/keys/{key_id}"
    named = {"key_id": "As the key's creation and the list tell it."}
    errors = (401, 404, 409, 503)
    yield Operation(
        "GET", path, "listKeys", KEYS, "List all keys there have ever been, the oldest first.",
        access=Access.ADMIN, query={"tenant": {"type": "string", "description": "Only this one's."}},
        answers={200: KeyList}, errors=(401, 503),
    )  # fmt: skip
    yield Operation(
        "POST", path, "createKey", KEYS, "Make a key; its secret is told this once.",
        access=Access.ADMIN, body=NewKeyBody, answers={201: KeyWithSecret}, errors=(*BODY_ERRORS, 401, 503),
    )  # fmt: skip
    yield Operation(
        "GET", one, "retrieveKey", KEYS, "Tell about one key.",
        access=Access.ADMIN, parameters=named, answers={200: Key}, errors=(401, 404, 503),
    )  # fmt: skip
    yield Operation(
        "PATCH", one, "updateKey", KEYS, "Change what a key is good for: what is named, and nothing else.",
        access=Access.ADMIN, parameters=named, body=KeySettingsBody, answers={200: Key},
        errors=(*BODY_ERRORS, *errors),
    )  # fmt: skip
    yield Operation(
        "POST", f"{one}/rotate", "rotateKey", KEYS, "Give a key a new secret; the old one works for a while.",
        access=Access.ADMIN, parameters=named, body=RotationBody, may_lack_body=True,
        answers={200: KeyWithSecret}, errors=(*BODY_ERRORS, *errors),
    )  # fmt: skip
    yield Operation(
        "POST", f"{one}/retire", "retireKey", KEYS, "End the older secret of a key that was rotated.",
        access=Access.ADMIN, parameters=named, answers={200: Key}, errors=errors,
    )  # fmt: skip
    yield Operation(
        "POST", f"{one}/revoke", "revokeKey", KEYS, "End a key for good, on every gateway, within seconds.",
        access=Access.ADMIN, parameters=named, answers={200: Key}, errors=errors,
    )  # fmt: skip


ADMIN_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET",
        "/admin/status",
        "getStatus",
        OPERATION,
        "Tell what this gateway knows of tenants, routes and engines.",
        access=Access.ADMIN,
        answers={200: AdminStatus},
        errors=(401,),
    ),
    Operation(
        "POST",
        "/admin/prefix-cache/reset",
        "resetPrefixCache",
        OPERATION,
        "Have engines forget the prompts that they cached.",
        access=Access.ADMIN,
        body=ResetBody,
        may_lack_body=True,
        answers={200: ResetAnswer},
        errors=(*BODY_ERRORS, 401, 404),
    ),
    Operation(
        "GET",
        "/admin/policy",
        "getPolicy",
        POLICY,
        "Tell all tenants, routes and options in force.",
        access=Access.ADMIN,
        answers={200: Policy},
        errors=(401,),
    ),
    *_entries("tenant", "tenants", TenantBody, TenantAnswer, TenantList, DeletedTenant),
    *_entries("route", "routes", RouteBody, RouteAnswer, RouteList, DeletedRoute),
    *_keys(),
    Operation(
        "GET",
        "/admin/experiments",
        "listExperiments",
        POLICY,
        "List the routes that split requests over several variants.",
        access=Access.ADMIN,
        answers={200: ExperimentList},
        errors=(401,),
    ),
    Operation(
        "GET",
        "/admin/usage",
        "sumUsage",
        POLICY,
        "Sum requests and tokens of all gateways, as far back as rows are kept.",
        access=Access.ADMIN,
        query={
            **{
                name: {"type": "integer", "minimum": 0, "maximum": MAX_SECONDS, "description": what}
                for name, what in (
                    ("since", "Unix seconds of arrival."),
                    ("until", "Not included."),
                )
            },
            **{name: {"type": "string"} for name in ("tenant", "route", "key")},
            "with_shadow": {"type": "boolean", "default": False},
            "by": {
                "type": "string",
                "default": DEFAULT_GROUPS,
                "pattern": _GROUPS_PATTERN,
                "description": "What to sum by, with commas; empty for one sum.",
            },
        },
        answers={200: UsageSumList},
        errors=(400, 401, 503),
    ),
    Operation(
        "GET",
        "/admin/audit",
        "listChanges",
        POLICY,
        "List who changed what, the latest first.",
        access=Access.ADMIN,
        query={
            "since": {"type": "integer", "minimum": 0, "maximum": 10**11, "default": 0},
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
            "before": {"type": "string", "description": "The id of a change: only those before it."},
        },
        answers={200: AuditList},
        errors=(400, 401, 503),
    ),
)
