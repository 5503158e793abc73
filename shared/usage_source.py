"""Where usage rows are found: the SQLite file that gateways fill, else what Redis still has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis

from shared.errors import ConfigError
from shared.redis_schema import RedisKeys
from shared.usage import UsageRecord
from shared.usage_database import UsageDatabase, UsageFilter

NUM_ENTRIES_AT_ONCE = 2000
# A row is written when its request has ended, by the clock of Redis; its arrival is by a gateway's.
CLOCK_SLACK_S = 300.0
_DECODER = msgspec.json.Decoder(UsageRecord)


@dataclass(frozen=True, slots=True)
class UsageSource:
    database: UsageDatabase
    name: str  # for messages
    incomplete_until: float | None = None  # unix time: rows before it may be missing
    num_left_out: int = 0  # rows that cannot be read, or not be summed


@dataclass(frozen=True, slots=True)
class FoundUsage:
    """What came of a question: rows of figures, and what they lack."""

    rows: list[dict[str, Any]]
    incomplete_until: float | None = None  # as above
    num_left_out: int = 0


def file_source(path: str | None) -> UsageSource | None:
    """`path`: as configured. None: there is none. Raises ConfigError if it cannot be read."""
    if path is None:
        return None
    try:
        return UsageSource(UsageDatabase.open_to_read(Path(path)), path)
    except sqlite3.Error as error:
        raise ConfigError(f"cannot read {path}: {error}", "usage.sqlite") from error


def stream_source(client: redis.Redis, keys: RedisKeys, wanted: UsageFilter) -> UsageSource:
    """A copy in memory of the rows that may be wanted. Raises redis.RedisError."""
    database = UsageDatabase.in_memory()
    num_left_out = 0
    for values in _values(client, keys, wanted):
        rows = [row for value in values if (row := _row(value)) is not None]
        num_left_out += len(values) - len(rows) + _insert(database, rows)
    return UsageSource(database, "Redis", _incomplete_until(client, keys, wanted), num_left_out)


def _insert(database: UsageDatabase, rows: list[UsageRecord]) -> int:
    """How many of them could not be put into it: those with an integer of more than 64 bits."""
    try:
        database.insert(rows)
    except OverflowError:
        if len(rows) == 1:
            return 1
        middle = len(rows) // 2
        return _insert(database, rows[:middle]) + _insert(database, rows[middle:])
    return 0


def _row(value: bytes | None) -> UsageRecord | None:
    """None: it is none."""
    try:
        return _DECODER.decode(value or b"")
    except msgspec.DecodeError:
        return None


def _values(client: redis.Redis, keys: RedisKeys, wanted: UsageFilter) -> Iterator[list[bytes | None]]:
    start = "-" if wanted.since is None else str(max(0, int((wanted.since - CLOCK_SLACK_S) * 1000)))
    while entries := _entries(client, keys, start):
        yield [fields.get(b"row") for _, fields in entries]
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
