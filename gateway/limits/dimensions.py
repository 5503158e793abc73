"""Which limits apply to a request: those of its tenant, of its tenant on this route, and of its key."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from shared.config import LimitName, Limits, OnRedisFailure, TenantConfig
from shared.identifiers import TenantId
from shared.redis_schema import RedisKeys

Scope = Literal["tenant", "route", "key"]
FIRST_SLOTS_KEY = 4  # see accounts.lua; Lua counts from one


class Kind(enum.IntEnum):
    """As in accounts.lua."""

    RATE = 1
    DAY = 2
    SLOTS = 3


class Counts(enum.IntEnum):
    """What of a request a limit counts, as in accounts.lua."""

    REQUESTS = 0
    INPUT = 1
    OUTPUT = 2
    TOKENS = 3

    def amount(self, input_tokens: int, output_tokens: int) -> int:
        if self is Counts.REQUESTS:
            return 1
        return (input_tokens if self is not Counts.OUTPUT else 0) + (
            output_tokens if self is not Counts.INPUT else 0
        )


_MEANING: dict[LimitName, tuple[Kind, Counts, str]] = {
    "requests_per_minute": (Kind.RATE, Counts.REQUESTS, "requests per minute"),
    "input_tokens_per_minute": (Kind.RATE, Counts.INPUT, "input tokens per minute"),
    "output_tokens_per_minute": (Kind.RATE, Counts.OUTPUT, "output tokens per minute"),
    "tokens_per_minute": (Kind.RATE, Counts.TOKENS, "tokens per minute"),
    "tokens_per_day": (Kind.DAY, Counts.TOKENS, "tokens per day"),
    "max_concurrency": (Kind.SLOTS, Counts.REQUESTS, "concurrent requests"),
}
assert set(_MEANING) == set(get_args(LimitName)), "every limit has a meaning"


@dataclass(frozen=True, slots=True)
class Dimension:
    """One limit of one scope."""

    scope: Scope
    name: LimitName
    kind: Kind
    counts: Counts
    field: str  # of its account
    limit: int
    burst: int  # what an idle account lets through at one instant
    is_shadow: bool
    on_redis_failure: OnRedisFailure

    @property
    def reason(self) -> str:
        """For machines."""
        return f"{self.scope}.{self.name}"

    @property
    def text(self) -> str:
        """For people."""
        scope = {"tenant": "this tenant", "route": "this tenant on this model", "key": "this API key"}
        return f"{self.limit} {_MEANING[self.name][2]} of {scope[self.scope]}"

    def cost(self, input_tokens: int, output_tokens: int) -> int:
        return self.counts.amount(input_tokens, output_tokens)


class Bound(NamedTuple):
    """Of the length of a single request."""

    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Dimensions:
    """All limits of the requests of one key on one route."""

    tenant: TenantId
    all: tuple[Dimension, ...]
    max_prompt: Bound | None
    max_output: Bound | None
    redis_keys: tuple[str, ...]  # as accounts.lua wants them
    packed: msgspec.Raw  # msgpack, as the scripts want them

    @property
    def has_slots(self) -> bool:
        return len(self.redis_keys) >= FIRST_SLOTS_KEY

    @property
    def counts_tokens(self) -> bool:
        return any(dimension.counts is not Counts.REQUESTS for dimension in self.all)


def dimensions_of(
    tenant: TenantConfig,
    route: str | None,
    key_id: str,
    key_limits: Limits | None,
    keys: RedisKeys,
    on_redis_failure: OnRedisFailure,
) -> Dimensions:
    """`route`: None: the request is of none. `key_limits`: of this key alone, instead of what the tenant has
    for each of its keys."""
    scopes: list[tuple[Scope, str, Limits | None]] = [
        ("tenant", "tenant", tenant),
        ("route", f"route:{route}", None if route is None else tenant.route_limits.get(route)),
        ("key", f"key:{key_id}", key_limits or tenant.key_limits),
    ]
    in_force = [(scope, subject, limits) for scope, subject, limits in scopes if limits is not None]
    tenant_id = TenantId(tenant.name)
    redis_keys = list(keys.limit_state(tenant_id))
    dimensions, packed = [], []
    for scope, subject, limits in in_force:
        for name in _MEANING:
            if getattr(limits, name) is None:
                continue
            dimension = _dimension(scope, subject, name, limits, on_redis_failure)
            account: str | int = dimension.field
            if dimension.kind is Kind.SLOTS:
                redis_keys.append(keys.concurrency_slots(tenant_id, subject))
                account = len(redis_keys)
            dimensions.append(dimension)
            packed.append(_packed(dimension, account))
    return Dimensions(
        tenant_id,
        tuple(dimensions),
        _tightest("max_prompt_tokens", in_force),
        _tightest("max_output_tokens", in_force),
        tuple(redis_keys),
        msgspec.Raw(msgspec.msgpack.encode(packed)),
    )


def _dimension(
    scope: Scope, subject: str, name: LimitName, limits: Limits, on_redis_failure: OnRedisFailure
) -> Dimension:
    kind, counts, _ = _MEANING[name]
    limit: int = getattr(limits, name)
    burst = limits.burst if name == "requests_per_minute" else None
    mode = limits.on_redis_failure
    if isinstance(mode, dict):
        mode = mode.get(name)
    return Dimension(
        scope,
        name,
        kind,
        counts,
        f"{subject} {name}",
        limit,
        limit if burst is None else burst,
        is_shadow=name in limits.shadow,
        on_redis_failure=mode or on_redis_failure,
    )


def _packed(dimension: Dimension, account: str | int) -> list[Any]:
    is_enforced = 0 if dimension.is_shadow else 1
    kind, counts = int(dimension.kind), int(dimension.counts)
    return [kind, account, dimension.limit, dimension.burst, counts, is_enforced]


def _tightest(
    name: Literal["max_prompt_tokens", "max_output_tokens"], in_force: list[tuple[Scope, str, Limits]]
) -> Bound | None:
    bounds = [
        Bound(value, f"{scope}.{name}")
        for scope, _, limits in in_force
        if (value := getattr(limits, name)) is not None
    ]
    return min(bounds, default=None)
