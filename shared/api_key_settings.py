"""What an API key may be set to: the same for the command line and for the admin API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from shared.errors import UserError
from shared.moments import END_OF_DATES
from shared.redis_schema import ApiKeyRecord

MAX_NAME_CHARACTERS = 256
MAX_MODELS = 1000
MAX_NETWORKS = 256  # each request's address is looked for in all of them
MAX_OVERLAP_S = 366 * 86_400.0  # of an old secret with a new one
FIRST_MOMENT = datetime(2000, 1, 1, tzinfo=UTC).timestamp()

_LENGTHS = {
    "name": (MAX_NAME_CHARACTERS, "characters"),
    "models": (MAX_MODELS, "models"),
    "cidrs": (MAX_NETWORKS, "networks"),
}


class KeySettingError(UserError):
    """`param` names the field of ApiKeyRecord that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param)
        self.field = param


def check_settings(fields: Mapping[str, Any], known: ApiKeyRecord | None = None) -> None:
    """`fields`: of ApiKeyRecord. `known`: the key that they change; None: they make one.

    Raises KeySettingError. What is not among `fields` is not looked at: an older key may go beyond.
    """
    for name, (largest, things) in _LENGTHS.items():
        if len(fields.get(name) or ()) > largest:
            raise KeySettingError(f"at most {largest} {things}", name)
    for name in ("not_before", "not_after"):
        moment = fields.get(name)
        if moment is not None and not FIRST_MOMENT <= moment < END_OF_DATES:
            raise KeySettingError("it must be from the year 2000 on and before the year 9000", name)
    _check_period(fields, known)


def with_settings(record: ApiKeyRecord, fields: Mapping[str, Any]) -> ApiKeyRecord:
    """Raises KeySettingError."""
    check_settings(fields, record)
    return msgspec.structs.replace(record, **fields)


def _check_period(fields: Mapping[str, Any], known: ApiKeyRecord | None) -> None:
    """An end that has passed is only refused for a new key: to set one is a way to end a key."""
    begin = fields.get("not_before", None if known is None else known.not_before)
    end = fields.get("not_after", None if known is None else known.not_after)
    if end is None or not {"not_before", "not_after"} & set(fields):
        return
    if begin is not None and end <= begin:
        name = "not_after" if "not_after" in fields else "not_before"
        raise KeySettingError("the key would end before it begins", name)
    if known is None and end <= time.time():
        raise KeySettingError("it has passed already", "not_after")
