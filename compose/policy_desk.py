"""Tenants and routes as the commands handle them: through the admin API, with errors for people."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from compose.gateway_client import GatewayClient, GatewayError
from compose.operator_name import actor_headers
from compose.stack_access import AdminApiAccess
from shared.errors import ConfigError

Kind = Literal["tenants", "routes"]
Entry = dict[str, Any]  # name, origin, hides_file, config
Change = Callable[[dict[str, Any]], dict[str, Any]]  # what a person would write in the file, before and after

MAX_ATTEMPTS = 5  # while others change the policy, too
RETRY_INTERVAL_S = 0.4  # a gateway follows what another one has changed within a second
CONFLICT = 412
NOT_FOUND = 404


class PolicyDesk:
    """All methods may raise GatewayError."""

    def __init__(self, access: AdminApiAccess) -> None:
        self._client = GatewayClient(access.url, access.token)

    def list(self, kind: Kind) -> list[Entry]:
        document, _ = self._client.ask("GET", f"/admin/{kind}")
        entries: list[Entry] = document["data"]
        return entries

    def show(self, kind: Kind, name: str) -> Entry:
        document, _ = self._client.ask("GET", _path(kind, name))
        return document

    def change(self, kind: Kind, name: str, change: Change) -> Entry:
        """Sets what `change` makes of what is in force; of nothing ({}), if there is no such entry."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            before, headers = self._in_force(kind, name)
            try:
                document, _ = self._client.ask(
                    "PUT", _path(kind, name), change(before), {**actor_headers(), **headers}
                )
            except GatewayError as error:
                if error.status != CONFLICT or attempt == MAX_ATTEMPTS:
                    raise
                time.sleep(RETRY_INTERVAL_S)
            else:
                return document
        raise AssertionError("the last attempt returns or raises")

    def delete(self, kind: Kind, name: str) -> Entry:
        document, _ = self._client.ask("DELETE", _path(kind, name), headers=actor_headers())
        return document

    def changes(self, since: float, limit: int) -> list[dict[str, Any]]:
        """Of the audit, the oldest first."""
        document, _ = self._client.ask("GET", f"/admin/audit?since={int(since)}&limit={limit}")
        entries: list[dict[str, Any]] = document["data"]
        return entries[::-1]

    def _in_force(self, kind: Kind, name: str) -> tuple[dict[str, Any], dict[str, str]]:
        """And the headers by which a change of it is refused if others were faster."""
        try:
            document, tag = self._client.ask("GET", _path(kind, name))
        except GatewayError as error:
            if error.status != NOT_FOUND:
                raise
            return {}, {"If-None-Match": "*"}
        return document["config"], {} if tag is None else {"If-Match": tag}


def from_file(kind: Kind, name: str, path: Path) -> dict[str, Any]:
    """The table of this name in a headrace.toml, or a document that is such a table. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "file") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid: {error}", "file") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} does not hold a table", "file")
    tables = document.get(kind)
    if not isinstance(tables, list):
        return document
    for table in tables:
        if isinstance(table, dict) and table.get("name") == name:
            return table
    raise ConfigError(f"{path} has no {name!r} in [[{kind}]]", "file")


def from_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Of "key=value", the value as in TOML, or a text as it is. Raises ConfigError."""
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{text!r} is not of the form KEY=VALUE", "KEY=VALUE")
        try:
            values |= tomllib.loads(f"{key} = {value}")
        except tomllib.TOMLDecodeError:
            values[key] = value
    return values


def reweighed(route: dict[str, Any], weights: dict[str, float]) -> dict[str, Any]:
    """The route with other weights. Raises ConfigError for a variant that it does not have."""
    split = route.get("split", [])
    known = [arm["variant"] for arm in split]
    for variant in weights:
        if variant not in known:
            raise ConfigError(f"no variant is named {variant!r}; there are {', '.join(known)}", "weight")
    arms = [{**arm, "weight": weights[arm["variant"]]} if arm["variant"] in weights else arm for arm in split]
    return {**route, "split": arms}


def weights_of(texts: Sequence[str]) -> dict[str, float]:
    """Of "variant=N". Raises ConfigError."""
    weights = {}
    for text in texts:
        variant, _, number = text.rpartition("=")
        try:
            weights[variant] = float(number)
        except ValueError as error:
            raise ConfigError(f"--weight: {text!r} is not of the form VARIANT=NUMBER", "weight") from error
    return weights


def _path(kind: Kind, name: str) -> str:
    return f"/admin/{kind}/{quote(name, safe='')}"
