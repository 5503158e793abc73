"""What a key is good for, as flags say it: from their texts to fields of its record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from compose.moments import moment
from shared.api_key_settings import KeySettingError, check_settings, with_settings
from shared.config import Limits
from shared.errors import ConfigError
from shared.networks import parse_network
from shared.redis_schema import ApiKeyRecord

NONE = "none"  # takes a setting back
_FLAGS = {"not_after": "--expires", "not_before": "--not-before", "cidrs": "--cidr"}


@dataclass(frozen=True, slots=True)
class KeySettings:
    """None, or no entry: not said, and so left as it is."""

    name: str | None = None
    not_before: str | None = None
    expires: str | None = None
    models: Sequence[str] = ()
    cidrs: Sequence[str] = ()
    limits: dict[str, int | None] = field(default_factory=dict)  # 0 takes one back

    def applied_to(self, record: ApiKeyRecord) -> ApiKeyRecord:
        """Raises ConfigError that names the flag."""
        fields = self.fields(record.limits)
        with _flag_named():
            return with_settings(record, fields)

    def of_new_key(self) -> dict[str, Any]:
        """Fields of its record. Raises ConfigError that names the flag."""
        fields = self.fields()
        with _flag_named():
            check_settings(fields)
        return fields

    def fields(self, limits: Limits | None = None) -> dict[str, Any]:
        """Those that change. Raises ConfigError that names the flag."""
        now, changed = time.time(), dict[str, Any]()
        if self.name is not None:
            changed["name"] = self.name
        if self.not_before is not None:
            changed["not_before"] = _moment_or_none(self.not_before, "--not-before", now)
        if self.expires is not None:
            changed["not_after"] = _moment_or_none(self.expires, "--expires", now)
        if self.models:
            models = _words(self.models, "--models")
            changed["models"] = None if models == [NONE] else models
        if self.cidrs:
            changed["cidrs"] = _networks(_words(self.cidrs, "--cidr"))
        if any(limit is not None for limit in self.limits.values()):
            changed["limits"] = self._limits(limits)
        return changed

    def _limits(self, given: Limits | None) -> Limits | None:
        document = given.model_dump(exclude_defaults=True) if given is not None else {}
        if self.limits.get("requests_per_minute") == 0 and self.limits.get("burst") is None:
            document.pop("burst", None)  # it goes with its rate
        for name, limit in self.limits.items():
            if limit == 0:
                document.pop(name, None)
            elif limit is not None:
                document[name] = limit
        try:
            return Limits.model_validate(document) if document else None
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else "limits"
            raise ConfigError(
                f"--{name.replace('_', '-')}: {first['msg'].removeprefix('Value error, ')}", name
            ) from error


@contextmanager
def _flag_named() -> Iterator[None]:
    try:
        yield
    except KeySettingError as error:
        flag = _FLAGS.get(error.field, f"--{error.field}")
        raise ConfigError(f"{flag}: {error.message}", flag) from error


def _moment_or_none(text: str, option: str, now: float) -> float | None:
    return None if text == NONE else moment(text, option, now)


def _words(given: Sequence[str], option: str) -> list[str]:
    """Repeated flags and lists with commas mean the same."""
    words = [word.strip() for text in given for word in text.split(",")]
    if not all(words) or (NONE in words and len(words) > 1):
        raise ConfigError(f"{option}: {', '.join(given)!r} is neither a list nor {NONE!r}", option)
    return list(dict.fromkeys(words))


def _networks(words: list[str]) -> list[str]:
    if words == [NONE]:
        return []
    try:
        return [str(parse_network(word)) for word in words]
    except ValueError as error:
        raise ConfigError(f"--cidr: {error}", "--cidr") from error
