"""Every key that Headrace keeps in Redis: its name, type, owner and lifetime.

| key (after the namespace)     | type   | written by          | lives                     |
|-------------------------------|--------|---------------------|---------------------------|
| engines                       | set    | engines             | members pruned by readers |
| engine:ID                     | string | the engine ID       | 5 s, refreshed each second|
| policy                        | string | gateways, `up`      | for good, versioned       |
| api_key:DIGEST                | string | `headrace keys`     | until revoked             |
| api_keys                      | hash   | `headrace keys`     | key id -> digest          |
| limit:{TENANT}:requests       | string | gateways            | until the rate has decayed|
| limit:{TENANT}:slots          | zset   | gateways            | slots expire one by one   |
| response:{TENANT}:ID          | string | gateways            | gateway.responses_ttl_s   |
| response_lease:{TENANT}:ID    | string | who makes it        | 15 s, extended each second|

The braces are Redis hash tags: all limits of one tenant lie in one cluster slot, so one script can
check them together. Values are JSON, so that a person can read them with redis-cli.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from shared.config import RouteConfig, TenantConfig
from shared.identifiers import EngineEpoch, EngineId, TenantId
from shared.messages import EngineLoad

ENGINE_RECORD_LIFETIME_S = 5
ENGINE_REFRESH_INTERVAL_S = 1.0
RESPONSE_LEASE_LIFETIME_S = 15
RESPONSE_LEASE_REFRESH_INTERVAL_S = 1.0

EngineState = Literal["loading", "ready", "draining", "stalled"]


class RedisKeys:
    """Names of keys under one namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    @property
    def engines(self) -> str:
        return f"{self._namespace}:engines"

    def engine(self, engine_id: EngineId) -> str:
        return f"{self._namespace}:engine:{engine_id}"

    @property
    def policy(self) -> str:
        return f"{self._namespace}:policy"

    def api_key(self, digest: str) -> str:
        return f"{self._namespace}:api_key:{digest}"

    @property
    def api_keys(self) -> str:
        return f"{self._namespace}:api_keys"

    def request_rate(self, tenant: TenantId) -> str:
        return f"{self._namespace}:limit:{{{tenant}}}:requests"

    def concurrency_slots(self, tenant: TenantId) -> str:
        return f"{self._namespace}:limit:{{{tenant}}}:slots"

    def response(self, tenant: TenantId, response_id: str) -> str:
        return f"{self._namespace}:response:{{{tenant}}}:{response_id}"

    def response_lease(self, tenant: TenantId, response_id: str) -> str:
        return f"{self._namespace}:response_lease:{{{tenant}}}:{response_id}"


class EngineRecord(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    engine_id: EngineId
    epoch: EngineEpoch
    address: str  # ZeroMQ endpoint that gateways connect to
    model: str
    state: EngineState
    pid: int
    load: EngineLoad | None = None  # None while loading


class ApiKeyRecord(msgspec.Struct, frozen=True):
    """An API key. The key itself is nowhere: only an HMAC of it, which is the name of this record."""

    key_id: str
    tenant: TenantId
    display_prefix: str  # first characters, for support
    created_at: float  # unix seconds


class PolicyRecord(msgspec.Struct, frozen=True):
    """Tenants and routes as one document, so that they always change together."""

    version: int
    source_hash: str  # of the configuration that was published; equal ones are not published again
    tenants: list[TenantConfig]
    routes: list[RouteConfig]


class ResponseRecord(msgspec.Struct, frozen=True):
    """An answer of /v1/responses, with the whole conversation before it: the next turn needs no other."""

    response: dict[str, Any]  # as the client got it
    input_items: list[dict[str, Any]]  # of all turns up to this one, the answers between them included


Record = TypeVar("Record", EngineRecord, ApiKeyRecord, PolicyRecord, ResponseRecord)


def to_json(record: EngineRecord | ApiKeyRecord | PolicyRecord | ResponseRecord) -> bytes:
    return msgspec.json.encode(record, enc_hook=_encode_section)


def from_json(kind: type[Record], value: bytes | str) -> Record:
    """Raises msgspec.DecodeError on anything but a record of this kind."""
    return msgspec.json.decode(value, type=kind, dec_hook=_decode_section)


def _encode_section(value: object) -> object:
    if isinstance(value, TenantConfig | RouteConfig):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"no JSON form for {type(value)}")


def _decode_section(kind: type, value: object) -> object:
    if issubclass(kind, TenantConfig | RouteConfig):
        return kind.model_validate(value)
    raise NotImplementedError(f"no JSON form for {kind}")
