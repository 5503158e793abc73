"""Usage rows in SQLite: the file that gateways fill by option, or a table in memory to sum rows with."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.usage import UsageRecord

BUSY_TIMEOUT_MS = 5000  # another gateway writes; a batch takes milliseconds

_COLUMNS: dict[str, str] = {
    "record_id": "TEXT PRIMARY KEY",
    "arrived_at": "REAL NOT NULL",  # unix time
    "request_id": "TEXT",
    "response_id": "TEXT",
    "tenant": "TEXT",
    "key_id": "TEXT",
    "operation": "TEXT",
    "route": "TEXT",
    "experiment_version": "INTEGER",
    "assigned_variant": "TEXT",
    "variant": "TEXT",
    "model": "TEXT",
    "engine_id": "TEXT",
    "subject_hash": "TEXT",  # 16 hexadecimal digits: SQLite's integers have a sign
    "is_streamed": "INTEGER",
    "is_shadow": "INTEGER",
    "is_overridden": "INTEGER",
    "input_tokens": "INTEGER",
    "cached_tokens": "INTEGER",
    "output_tokens": "INTEGER",
    "time_to_first_token_s": "REAL",
    "duration_s": "REAL",
    "generation_s": "REAL",
    "finish_reasons": "TEXT",  # with commas
    "outcome": "TEXT",
    "status": "INTEGER",
    "error_code": "TEXT",
}
# What rows can be grouped by, and how it is computed.
GROUPINGS: dict[str, str] = {
    "tenant": "tenant",
    "key": "key_id",
    "route": "route",
    "variant": "variant",
    "model": "model",
    "engine": "engine_id",
    "operation": "operation",
    "outcome": "outcome",
    "day": "date(arrived_at, 'unixepoch')",  # of UTC
    "hour": "strftime('%Y-%m-%dT%H:00Z', arrived_at, 'unixepoch')",
}
SUMS: dict[str, str] = {
    "requests": "count(*)",
    "input_tokens": "total(input_tokens)",
    "cached_tokens": "total(cached_tokens)",
    "output_tokens": "total(output_tokens)",
    "errors": "total(outcome = 'failed')",
    "refused": "total(outcome = 'refused')",
    "aborted": "total(outcome = 'aborted')",
}


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Which rows are meant. Times are unix seconds of their arrival, the end not included."""

    since: float | None = None
    until: float | None = None
    tenant: str | None = None
    route: str | None = None
    key: str | None = None
    with_shadow: bool = False  # nobody asked for those, and nobody pays

    def where(self) -> tuple[str, list[Any]]:
        """An SQL condition and its values."""
        conditions: list[tuple[str, Any]] = [
            ("arrived_at >= ?", self.since),
            ("arrived_at < ?", self.until),
            ("tenant = ?", self.tenant),
            ("route = ?", self.route),
            ("key_id = ?", self.key),
        ]
        given = [(text, value) for text, value in conditions if value is not None]
        texts = [text for text, _ in given] + ([] if self.with_shadow else ["is_shadow = 0"])
        return " AND ".join(texts) or "1", [value for _, value in given]


class UsageDatabase:
    """Owns a connection; it belongs to the thread that made it. All methods may raise sqlite3.Error."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> UsageDatabase:
        """Makes the file, and the columns that an older version did not have."""
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None)
        try:
            # WAL: who reads does not hold up who writes. NORMAL: a power failure may cost the last batches.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            _make_table(connection)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    @classmethod
    def open_to_read(cls, path: Path) -> UsageDatabase:
        """Raises sqlite3.OperationalError if there is no such file."""
        uri = f"{path.absolute().as_uri()}?mode=ro"
        return cls(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000))

    @classmethod
    def in_memory(cls) -> UsageDatabase:
        connection = sqlite3.connect(":memory:", isolation_level=None)
        _make_table(connection)
        return cls(connection)

    def insert(self, rows: Iterable[UsageRecord]) -> None:
        """All or none. A row that is there already stays as it is."""
        names = ", ".join(_COLUMNS)
        marks = ", ".join("?" * len(_COLUMNS))
        with _transaction(self._connection):
            self._connection.executemany(
                f"INSERT OR IGNORE INTO usage ({names}) VALUES ({marks})", map(_values_of, rows)
            )

    def delete_before(self, moment: float, at_most: int) -> int:
        """Rows that arrived before it, the oldest first; how many have gone.

        Found by an index, so that it takes as long as it deletes rows, however many there are.
        """
        oldest = "SELECT rowid FROM usage WHERE arrived_at < ? ORDER BY arrived_at LIMIT ?"
        with _transaction(self._connection):
            cursor = self._connection.execute(
                f"DELETE FROM usage WHERE rowid IN ({oldest})", (moment, at_most)
            )
        return cursor.rowcount

    def sums(self, wanted: UsageFilter, by: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each group, in order; one for all without `by`, whose words are those of GROUPINGS."""
        condition, values = wanted.where()
        groups = [f"{GROUPINGS[name]} AS {name}" for name in by]
        sums = [
            f"{text if name == 'requests' else f'cast({text} AS INTEGER)'} AS {name}"
            for name, text in SUMS.items()
        ]
        positions = ", ".join(str(number) for number in range(1, len(by) + 1))
        tail = f" GROUP BY {positions} ORDER BY {positions}" if by else ""
        query = f"SELECT {', '.join([*groups, *sums])} FROM usage WHERE {condition}{tail}"
        return list(_dicts(self._connection.execute(query, values)))

    def rows(self, wanted: UsageFilter) -> Iterator[dict[str, Any]]:
        """As they came, by their arrival."""
        condition, values = wanted.where()
        names = ", ".join(_COLUMNS)
        query = f"SELECT {names} FROM usage WHERE {condition} ORDER BY arrived_at"
        yield from _dicts(self._connection.execute(query, values))

    def close(self) -> None:
        self._connection.close()


class _transaction:  # noqa: N801 - reads as the thing that it is
    """Begun at once as a writing one: to be upgraded later can fail without waiting."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _make_table(connection: sqlite3.Connection) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
    connection.execute(f"CREATE TABLE IF NOT EXISTS usage ({columns})")
    there = {row[1] for row in connection.execute("PRAGMA table_info(usage)")}
    for name, kind in _COLUMNS.items():
        if name not in there:
            connection.execute(f"ALTER TABLE usage ADD COLUMN {name} {kind}")
    connection.execute("CREATE INDEX IF NOT EXISTS usage_by_tenant ON usage (tenant, arrived_at)")
    connection.execute("CREATE INDEX IF NOT EXISTS usage_by_arrival ON usage (arrived_at)")


def _values_of(row: UsageRecord) -> list[Any]:
    fields = msgspec.structs.asdict(row)
    fields["finish_reasons"] = ",".join(row.finish_reasons)
    fields["subject_hash"] = f"{row.subject_hash:016x}"
    return [fields[name] for name in _COLUMNS]


def _dicts(cursor: sqlite3.Cursor) -> Iterator[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    for values in cursor:
        yield dict(zip(names, values, strict=True))
