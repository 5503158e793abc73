"""Rows of figures as a table for people, or as a file for other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.table import Column, Table

from shared.errors import ConfigError
from shared.usage_database import SUMS

OutputFormat = Literal["table", "csv", "json", "parquet"]
Row = dict[str, Any]


def usage_table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    table = Table(
        *(
            # On two lines, since what stands below is often shorter.
            Column(name.replace("_", "\n"), justify="right" if name in SUMS else "left", no_wrap=True)
            for name in columns
        ),
        box=None,
    )
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    return table


def as_csv(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_json(rows: Sequence[Row]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n"


def write_parquet(rows: Sequence[Row], columns: Sequence[str], path: Path) -> None:
    """Raises ConfigError without the package that knows the format, and for a path that cannot be written."""
    try:
        import pyarrow  # local: an extra, which hardly anybody needs
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            "parquet needs the package pyarrow: pip install 'headrace[parquet]'", "format"
        ) from error
    table = pyarrow.table({name: [row[name] for row in rows] for name in columns})
    try:
        parquet.write_table(table, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "output") from error


def _cell(value: Any) -> str:
    if value in (None, ""):
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)
