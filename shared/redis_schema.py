"""Every key that Headrace keeps in Redis: its name, type, owner and lifetime.

| key (after the namespace)     | type   | written by          | lives                     |
|-------------------------------|--------|---------------------|---------------------------|
| engines                       | set    | engines             | members pruned by readers |
| engine:ID                     | string | the engine ID       | 5 s, refreshed each second|
| policy                        | string | gateways            | for good, versioned       |
| audit:{POLICY}                | stream | gateways            | the last 10,000 changes   |
| usage                         | stream | gateways            | usage.max_rows, roughly   |
| usage_batch:{USAGE}:ID        | string | the gateway ID      | 1 h after its last batch  |
| {api_keys}:records            | hash   | `headrace keys`     | key id -> JSON, for good  |
| {api_keys}:digests            | hash   | `headrace keys`     | digest of a secret -> id  |
| {api_keys}:version            | string | `headrace keys`     | another with each write   |
| limit:{TENANT}:accounts       | hash   | gateways            | 2 days; see accounts.lua  |
| limit:{TENANT}:reservations   | hash   | gateways            | until settled; msgpack    |
| limit:{TENANT}:leases         | zset   | gateways            | reservation -> its expiry |
| limit:{TENANT}:slots:SUBJECT  | zset   | gateways            | slots expire one by one   |
| gateways                      | zset   | gateways            | 5 s, refreshed each second|
| response:{TENANT}:ID          | string | gateways            | gateway.responses_ttl_s   |
| response_lease:{TENANT}:ID    | string | who makes it        | 15 s, extended each second|
| experiments                   | set    | gateways            | members pruned by readers |
| experiment:{ROUTE}:N          | hash   | gateways            | a life of one -> JSON     |
| experiment_subjects:{ROUTE}:N | bitmap | gateways            | a bit for each cell, 256 KiB |
| experiment_tenants:{ROUTE}:N  | set    | gateways            | who has sent feedback     |
| experiment_feedback:{TENANT}:ROUTE:N | hash | gateways       | sums by variant and cluster |
| experiment_comments:{TENANT}:ROUTE:N | hash | gateways       | response id -> JSON; the first 1,000 |
| answer:{TENANT}:ID            | string | gateways            | 24 h; of experiments only |
| feedback:{TENANT}:ID          | string | gateways            | 24 h, the score in millionths |

What begins with `experiment` lives for 90 days after it was last written; N is the experiment's version.

The braces are Redis hash tags: all limits of one tenant lie in one cluster slot, so one script can
check them together, and so do all API keys. {POLICY} and {USAGE} are the whole names of those two keys:
what is written together with them lies in their slots. Values are JSON, so that a person can read them
with redis-cli.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from shared.config import STORED, Limits, RouteConfig, TenantConfig
from shared.identifiers import EngineEpoch, EngineId, GatewayId, TenantId
from shared.messages import EngineLoad

ENGINE_RECORD_LIFETIME_S = 5
ENGINE_REFRESH_INTERVAL_S = 1.0
GATEWAY_LIFETIME_S = 5
GATEWAY_REFRESH_INTERVAL_S = 1.0
RESPONSE_LEASE_LIFETIME_S = 15
RESPONSE_LEASE_REFRESH_INTERVAL_S = 1.0
EXPERIMENT_LIFETIME_S = 90 * 86_400
ANSWER_LIFETIME_S = 86_400

USAGE_BATCH_LIFETIME_S = 3600

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

    @property
    def audit(self) -> str:
        return f"{self._namespace}:audit:{{{self.policy}}}"

    @property
    def usage(self) -> str:
        return f"{self._namespace}:usage"

    def usage_batch(self, gateway_id: GatewayId) -> str:
        return f"{self._namespace}:usage_batch:{{{self.usage}}}:{gateway_id}"

    @property
    def api_keys(self) -> str:
        return f"{self._namespace}:{{api_keys}}:records"

    @property
    def api_key_digests(self) -> str:
        return f"{self._namespace}:{{api_keys}}:digests"

    @property
    def api_keys_version(self) -> str:
        return f"{self._namespace}:{{api_keys}}:version"

    def limit_state(self, tenant: TenantId) -> tuple[str, str, str]:
        """Accounts, reservations and leases, as the scripts of gateway/limits/ want them."""
        prefix = f"{self._namespace}:limit:{{{tenant}}}"
        return f"{prefix}:accounts", f"{prefix}:reservations", f"{prefix}:leases"

    def concurrency_slots(self, tenant: TenantId, subject: str = "tenant") -> str:
        """`subject`: tenant, route:NAME or key:ID."""
        return f"{self._namespace}:limit:{{{tenant}}}:slots:{subject}"

    @property
    def gateways(self) -> str:
        return f"{self._namespace}:gateways"

    def response(self, tenant: TenantId, response_id: str) -> str:
        return f"{self._namespace}:response:{{{tenant}}}:{response_id}"

    def response_lease(self, tenant: TenantId, response_id: str) -> str:
        return f"{self._namespace}:response_lease:{{{tenant}}}:{response_id}"

    @property
    def experiments(self) -> str:
        """Members: ROUTE:N of each."""
        return f"{self._namespace}:experiments"

    def experiment(self, route: str, version: int) -> str:
        return f"{self._namespace}:experiment:{{{route}}}:{version}"

    def experiment_subjects(self, route: str, version: int) -> str:
        return f"{self._namespace}:experiment_subjects:{{{route}}}:{version}"

    def experiment_tenants(self, route: str, version: int) -> str:
        return f"{self._namespace}:experiment_tenants:{{{route}}}:{version}"

    def experiment_feedback(self, tenant: TenantId, route: str, version: int) -> str:
        return f"{self._namespace}:experiment_feedback:{{{tenant}}}:{route}:{version}"

    def experiment_comments(self, tenant: TenantId, route: str, version: int) -> str:
        return f"{self._namespace}:experiment_comments:{{{tenant}}}:{route}:{version}"

    def answer(self, tenant: TenantId, response_id: str) -> str:
        return f"{self._namespace}:answer:{{{tenant}}}:{response_id}"

    def feedback(self, tenant: TenantId, response_id: str) -> str:
        return f"{self._namespace}:feedback:{{{tenant}}}:{response_id}"


class EngineRecord(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    engine_id: EngineId
    epoch: EngineEpoch
    address: str  # ZeroMQ endpoint that gateways connect to
    model: str
    state: EngineState
    pid: int
    load: EngineLoad | None = None  # None while loading


class ApiKeySecret(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client sends to use a key. It is nowhere itself: only an HMAC of it. Times are unix seconds."""

    digest: str
    display_prefix: str  # first characters, for support
    created_at: float
    not_after: float | None = None  # a replaced one ends then


class ApiKeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An API key: who it stands for, and what it is good for. Changed only by `shared/api_key_write.lua`."""

    key_id: str
    tenant: TenantId
    created_at: float
    version: int  # one more with each write: an older one can never replace a newer one
    secrets: list[ApiKeySecret]  # newest first; two while clients change from one to the other
    name: str = ""
    not_before: float | None = None
    not_after: float | None = None
    revoked_at: float | None = None  # for good
    models: list[str] | None = None  # routes that it may use; None: all of its tenant's
    cidrs: list[str] = []  # addresses of clients that may use it; empty: any
    limits: Limits | None = None  # None: the tenant's `key_limits`


class PolicyRecord(msgspec.Struct, frozen=True):
    """Tenants and routes as one document, so that they always change together.

    Those of the file and those of the admin API are kept apart: each may be written anew without undoing
    the other. In force is what the file says, with the admin API's entries in the place of those of the
    same name.
    """

    version: int  # one more with each change, whoever makes it
    source_hash: str  # of the configuration that was published; equal ones are not published again
    tenants: list[TenantConfig]  # the file's
    routes: list[RouteConfig]
    admin_tenants: list[TenantConfig] = []
    admin_routes: list[RouteConfig] = []
    change_id: str = ""  # of the change that made this version; also in its audit record

    @property
    def tenants_in_force(self) -> list[TenantConfig]:
        return _overlaid(self.tenants, self.admin_tenants)

    @property
    def routes_in_force(self) -> list[RouteConfig]:
        return _overlaid(self.routes, self.admin_routes)


class ResponseRecord(msgspec.Struct, frozen=True):
    """An answer of /v1/responses, with the whole conversation before it: the next turn needs no other."""

    response: dict[str, Any]  # as the client got it
    input_items: list[dict[str, Any]]  # of all turns up to this one, the answers between them included


Entry = TypeVar("Entry", TenantConfig, RouteConfig)


def _overlaid(file: list[Entry], admin: list[Entry]) -> list[Entry]:
    """By name; what only the admin API has comes last."""
    entries = {entry.name: entry for entry in file} | {entry.name: entry for entry in admin}
    return list(entries.values())


Record = TypeVar("Record", EngineRecord, ApiKeyRecord, PolicyRecord, ResponseRecord)


def to_json(record: EngineRecord | ApiKeyRecord | PolicyRecord | ResponseRecord) -> bytes:
    return msgspec.json.encode(record, enc_hook=_encode_section)


def from_json(kind: type[Record], value: bytes | str) -> Record:
    """Raises msgspec.DecodeError on anything but a record of this kind."""
    return msgspec.json.decode(value, type=kind, dec_hook=_decode_section)


def _encode_section(value: object) -> object:
    if isinstance(value, TenantConfig | RouteConfig | Limits):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"no JSON form for {type(value)}")


def _decode_section(kind: type, value: object) -> object:
    if issubclass(kind, TenantConfig | RouteConfig | Limits):
        return kind.model_validate(value, context=STORED)
    raise NotImplementedError(f"no JSON form for {kind}")
