"""Tenants, routes and changes of them as rows of tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from compose.moments import shown
from compose.policy_desk import Entry

MAX_CHANGE_CHARACTERS = 160  # for a terminal


def tenants_table(entries: Sequence[Entry]) -> Table:
    table = Table(Column("tenant", no_wrap=True), "set by", "models", "limits and options", box=None)
    for entry in entries:
        config = dict(entry["config"])
        config.pop("name", None)
        models = config.pop("models", ["*"])
        table.add_row(entry["name"], _origin(entry), ", ".join(models), _options(config))
    return table


def routes_table(entries: Sequence[Entry]) -> Table:
    table = Table(Column("route", no_wrap=True), "set by", "sticky", "split", "options", box=None)
    for entry in entries:
        config = dict(entry["config"])
        config.pop("name", None)
        split = ", ".join(
            f"{arm['variant']} {arm.get('weight', 1.0):g} → {arm['model']}" for arm in config.pop("split")
        )
        sticky = config.pop("sticky", "user")
        table.add_row(entry["name"], _origin(entry), sticky, split, _options(config))
    return table


def changes_table(changes: Sequence[dict[str, Any]], max_characters: int | None = None) -> Table:
    """`max_characters`: of what is told of a change, which may be a text of any length."""
    table = Table("time", "who", "action", "object", "version", "change", box=None)
    for change in changes:
        version = "" if change["version_after"] is None else str(change["version_after"])
        table.add_row(
            shown(change["time"]),
            escape(change["actor"]),
            change["action"],
            escape(change["object"]),
            version,
            escape(_shortened(_difference(change["change"]), max_characters)),
        )
    return table


def _origin(entry: Entry) -> str:
    return f"{entry['origin']}{', over the file' if entry['hides_file'] else ''}"


def _options(config: dict[str, Any]) -> str:
    return escape(", ".join(f"{key}={json.dumps(value)}" for key, value in config.items()))


def _words(value: Any) -> str:
    """Of a publication: what was added, removed and changed, as far as something was. Else the value."""
    if not isinstance(value, dict) or not set(value) <= {"added", "removed", "changed"}:
        return json.dumps(value)
    return ", ".join(f"{what} {' '.join(names)}" for what, names in value.items() if names) or "–"


def _difference(change: dict[str, Any]) -> str:
    """Of what was and what is, the keys that differ."""
    if set(change) != {"before", "after"}:
        text = "; ".join(f"{key}: {_words(value)}" for key, value in change.items())
    else:
        before, after = change["before"] or {}, change["after"] or {}
        parts = [
            f"{key}: {json.dumps(before.get(key))} → {json.dumps(after.get(key))}"
            for key in {**before, **after}
            if key != "name" and before.get(key) != after.get(key)
        ]
        text = "; ".join(parts)
    return text


def _shortened(text: str, max_characters: int | None) -> str:
    if max_characters is None or len(text) <= max_characters:
        return text
    return f"{text[: max_characters - 1]}…"
