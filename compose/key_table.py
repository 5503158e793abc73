"""API keys as they are shown: in a table, one alone, or as JSON. Never with what they are found by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from compose.moments import in_json, shown
from shared.redis_schema import ApiKeyRecord


def state_of(record: ApiKeyRecord, now: float) -> str:
    if record.revoked_at is not None:
        return "revoked"
    if record.not_after is not None and now >= record.not_after:
        return "expired"
    if record.not_before is not None and now < record.not_before:
        return "not valid yet"
    return "valid"


def key_table(records: Sequence[ApiKeyRecord], now: float) -> Table:
    table = Table(box=None)
    for name in ("key id", "begins with", "tenant"):
        table.add_column(name, no_wrap=True)
    for name in ("name", "state", "created", "expires"):
        table.add_column(name)
    for record in records:
        table.add_row(
            record.key_id,
            "\n".join(f"{secret.display_prefix}…" for secret in _live(record, now)),
            _plain(record.tenant),
            _plain(record.name),
            state_of(record, now),
            shown(record.created_at),
            shown(record.not_after),
        )
    return table


def key_card(record: ApiKeyRecord, now: float) -> Table:
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    limits = record.limits.model_dump(exclude_defaults=True) if record.limits is not None else {}
    rows = {
        "key id": record.key_id,
        "tenant": record.tenant,
        "name": record.name or "–",
        "state": state_of(record, now),
        "created": shown(record.created_at),
        "valid from": shown(record.not_before, "its creation"),
        "expires": shown(record.not_after, "never"),
        "revoked": shown(record.revoked_at, "no"),
        "models": "all of its tenant's" if record.models is None else ", ".join(record.models),
        "addresses": ", ".join(record.cidrs) or "any",
        "limits": ", ".join(f"{name} {value}" for name, value in limits.items()) or "its tenant's for keys",
        "version": str(record.version),
    }
    for name, value in rows.items():
        table.add_row(name, _plain(value))
    for secret in record.secrets:
        ends = shown(secret.not_after, "never")
        table.add_row("secret", f"{secret.display_prefix}… of {shown(secret.created_at)}, ends {ends}")
    return table


def key_document(record: ApiKeyRecord, now: float) -> dict[str, Any]:
    return {
        "key_id": record.key_id,
        "tenant": record.tenant,
        "name": record.name,
        "state": state_of(record, now).replace(" ", "_"),
        "created_at": in_json(record.created_at),
        "not_before": in_json(record.not_before),
        "not_after": in_json(record.not_after),
        "revoked_at": in_json(record.revoked_at),
        "models": record.models,
        "cidrs": record.cidrs,
        "limits": None if record.limits is None else record.limits.model_dump(exclude_defaults=True),
        "version": record.version,
        "secrets": [
            {
                "display_prefix": secret.display_prefix,
                "created_at": in_json(secret.created_at),
                "not_after": in_json(secret.not_after),
            }
            for secret in record.secrets
        ],
    }


def _plain(text: str) -> str:
    """Fit for a terminal: what it would obey is written out, as "\\x1b"."""
    return escape("".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text))


def _live(record: ApiKeyRecord, now: float) -> list[Any]:
    return [secret for secret in record.secrets if secret.not_after is None or now < secret.not_after]
