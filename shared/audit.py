"""Who changed what: one record for each change of tenants, routes or keys that was made."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_AUDIT_RECORDS = 10_000
MAX_ACTOR_CHARACTERS = 128
MAX_CHANGE_BYTES = 16_384  # a longer one is told by its size only
AUDIT_FIELD = b"record"  # of an entry of the stream; its id has the time, by Redis' own clock


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`change` never holds a secret."""

    change_id: str
    actor: str  # as it says of itself in x-headrace-actor: whoever has the token may say anything
    action: str  # "tenant.set", "tenant.delete", "route.set", "route.delete", "file.publish", "key.create" …
    object: str  # its name
    version_before: int | None = None  # of the policy; None: the action is not about it
    version_after: int | None = None
    change: dict[str, Any] = {}


def bounded_actor(given: str, otherwise: str) -> str:
    """Fit for a log and for a terminal."""
    printable = "".join(filter(str.isprintable, given)).strip()
    return printable[:MAX_ACTOR_CHARACTERS] or otherwise


def audit_bytes(record: AuditRecord) -> bytes:
    encoded = msgspec.json.encode(record)
    if len(encoded) <= MAX_CHANGE_BYTES:
        return encoded
    return msgspec.json.encode(msgspec.structs.replace(record, change={"bytes": len(encoded)}))
