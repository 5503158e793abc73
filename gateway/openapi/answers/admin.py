"""What `/admin` tells of the policy and of its changes."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict  # typing's own lacks what pydantic needs before Python 3.12

from gateway.openapi.answers import CLOSED
from shared.config import GatewayConfig, Limits, RouteConfig, TenantConfig

# "model": a model's own name, which is a route to it.
Origin = Literal["file", "admin", "model"]


@with_config(CLOSED)
class TenantEntry(TypedDict):
    name: str
    origin: Origin
    hides_file: bool
    config: TenantConfig


@with_config(CLOSED)
class RouteEntry(TypedDict):
    name: str
    origin: Origin
    hides_file: bool
    config: RouteConfig


@with_config(CLOSED)
class TenantAnswer(TenantEntry):
    policy_version: int
    warnings: NotRequired[list[str]]  # of what names routes that there are not, or not yet


@with_config(CLOSED)
class RouteAnswer(RouteEntry):
    policy_version: int


@with_config(CLOSED)
class TenantList(TypedDict):
    object: Literal["list"]
    policy_version: int
    data: list[TenantEntry]


@with_config(CLOSED)
class RouteList(TypedDict):
    object: Literal["list"]
    policy_version: int
    data: list[RouteEntry]


@with_config(CLOSED)
class DeletedTenant(TypedDict):
    policy_version: int
    name: str
    deleted: Literal[True]
    now: TenantEntry | None


@with_config(CLOSED)
class DeletedRoute(TypedDict):
    policy_version: int
    name: str
    deleted: Literal[True]
    now: RouteEntry | None


@with_config(CLOSED)
class Policy(TypedDict):
    policy_version: int
    tenants: list[TenantEntry]
    routes: list[RouteEntry]
    options: GatewayConfig


@with_config(CLOSED)
class RequestCountsAnswer(TypedDict):
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    outcomes: dict[str, int]
    finish_reasons: dict[str, int]


@with_config(CLOSED)
class ExperimentVariant(TypedDict):
    variant: str
    model: str
    weight: float
    weight_now: float
    assigned: RequestCountsAnswer | None  # None: Redis cannot be asked


@with_config(CLOSED)
class Experiment(TypedDict):
    route: str
    version: int
    sticky: str
    variants: list[ExperimentVariant]


@with_config(CLOSED)
class ExperimentList(TypedDict):
    object: Literal["list"]
    policy_version: int
    data: list[Experiment]


@with_config(CLOSED)
class AuditEntry(TypedDict):
    id: str
    time: float
    actor: str
    action: str
    object: str
    version_before: int | None
    version_after: int | None
    change: dict[str, Any]


@with_config(CLOSED)
class AuditList(TypedDict):
    object: Literal["list"]
    data: list[AuditEntry]
    has_more: bool


@with_config(CLOSED)
class UsageSum(TypedDict):
    """Those of `by` are there that were asked for; "": such requests were refused before they had one."""

    tenant: NotRequired[str]
    key: NotRequired[str]
    route: NotRequired[str]
    variant: NotRequired[str]
    model: NotRequired[str]
    engine: NotRequired[str | None]
    operation: NotRequired[str]
    outcome: NotRequired[str]
    day: NotRequired[str]
    hour: NotRequired[str]
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    errors: int
    refused: int
    aborted: int


@with_config(CLOSED)
class UsageSumList(TypedDict):
    object: Literal["list"]
    data: list[UsageSum]
    incomplete_until: float | None  # unix seconds: requests before it may be missing
    num_left_out: int  # rows that cannot be read


@with_config(CLOSED)
class KeySecret(TypedDict):
    display_prefix: str
    created_at: str
    not_after: str | None


@with_config(CLOSED)
class Key(TypedDict):
    key_id: str
    tenant: str
    name: str
    created_at: str
    not_before: str | None
    not_after: str | None
    revoked_at: str | None
    models: list[str] | None
    cidrs: list[str]
    limits: Limits | None
    version: int
    secrets: list[KeySecret]
    warnings: NotRequired[list[str]]  # as a tenant's


@with_config(CLOSED)
class KeyWithSecret(Key):
    secret: str


@with_config(CLOSED)
class KeyList(TypedDict):
    object: Literal["list"]
    data: list[Key]
