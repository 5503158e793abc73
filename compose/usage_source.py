"""Where `headrace usage` finds its rows: the SQLite file that gateways fill, else what Redis still has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis

from shared.config import HeadraceConfig
from shared.errors import ConfigError
from shared.redis_schema import RedisKeys
from shared.usage import UsageRecord
from shared.usage_database import UsageDatabase, UsageFilter

NUM_ENTRIES_AT_ONCE = 2000
# A row is written when its request has ended, by the clock of Redis; its arrival is by a gateway's.
CLOCK_SLACK_S = 300.0


@dataclass(frozen=True, slots=True)
class UsageSource:
    database: UsageDatabase
    incomplete_until: float | None = None  # unix time: rows before it may be missing


def file_source(config: HeadraceConfig) -> UsageSource | None:
    """None: no file is configured. Raises ConfigError if it cannot be read."""
    if config.usage.sqlite is None:
        return None
    try:
        return UsageSource(UsageDatabase.open_to_read(Path(config.usage.sqlite)))
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read {config.usage.sqlite}: {error}", "usage.sqlite") from error


def stream_source(client: redis.Redis, keys: RedisKeys, wanted: UsageFilter) -> UsageSource:
    """A copy in memory of the rows that may be wanted. Raises redis.RedisError."""
    database = UsageDatabase.in_memory()
    database.insert(_rows(client, keys, wanted))
    return UsageSource(database, _incomplete_until(client, keys, wanted))


def _rows(client: redis.Redis, keys: RedisKeys, wanted: UsageFilter) -> Iterator[UsageRecord]:
    decode = msgspec.json.Decoder(UsageRecord).decode
    start = "-" if wanted.since is None else str(max(0, int((wanted.since - CLOCK_SLACK_S) * 1000)))
    while entries := _entries(client, keys, start):
        for _, fields in entries:
            yield decode(fields[b"row"])
        start = f"({entries[-1][0].decode()}"


def _entries(client: redis.Redis, keys: RedisKeys, start: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    found: Any = client.xrange(keys.usage, min=start, count=NUM_ENTRIES_AT_ONCE)
    entries: list[tuple[bytes, dict[bytes, bytes]]] = found
    return entries


def _incomplete_until(client: redis.Redis, keys: RedisKeys, wanted: UsageFilter) -> float | None:
    if not client.exists(keys.usage):
        return None
    state: Any = client.xinfo_stream(keys.usage)
    if state["entries-added"] <= state["length"] or not state["first-entry"]:
        return None
    first_s = int(state["first-entry"][0].partition(b"-")[0]) / 1000
    return first_s if wanted.since is None or wanted.since < first_s else None
